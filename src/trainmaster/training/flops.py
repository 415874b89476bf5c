"""How much arithmetic a token takes, and how much of it this machine can do: for the share of the matrix peak."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

_GPU_SIZE = 8192
"""Of the square product that is timed on a GPU."""
_CPU_SIZE = 512
"""On the CPU, where the larger one would take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Floating-point operations that one token of a training costs."""

    matrix: float
    attention_per_position: float
    """For each position of the sequence that the token is in."""

    def at(self, sequence_length: float) -> float:
        """Of a token in a sequence of this length."""
        return self.matrix + self.attention_per_position * sequence_length


def token_cost(model: nn.Module) -> TokenCost:
    """What a token costs: forward and backward through all matrices that it meets, the output layer among them.

    Twice the matrix parameters for the forward pass and twice for the gradient of the inputs; twice more for the
    gradient of weights, where the base model's own are trained. Embeddings are looked up and cost nothing; of many
    experts, a token meets only those that it is sent to.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 2 * config.num_hidden_layers * heads * head_size
    return TokenCost(matrix=(4 if frozen else 6) * _matrix_parameters(model), attention_per_position=3 * attention)


def matrix_peak(device: torch.device) -> float:
    """Operations a second of a large matrix product on this device, measured."""
    cuda = device.type == "cuda"
    size = _GPU_SIZE if cuda else _CPU_SIZE
    left = torch.zeros(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    best_s = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(left, left)
        if cuda:
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * size**3 / best_s


def _matrix_parameters(model: nn.Module) -> float:
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    used = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = used / experts if used and experts else 1.0
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "lora_" in name or parameter is embedding.weight:
            continue
        total += parameter.numel() * (share if ".experts." in name else 1.0)
    if output is not None and output.weight is embedding.weight:
        total += output.weight.numel()
    return total
