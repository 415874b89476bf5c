"""Attention among samples that lie end to end, by the kernels of PyTorch that know where each one ends.

transformers' default computes what packed samples do not see of each other too, and masks it then: for a small model
that is most of a step. The kernels come with PyTorch; other ways to them need a package that is built for hours, or
compile for minutes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from trainmaster.training.document import Document

PACKED = "trainmaster_packed"
"""Our name among transformers' implementations of attention."""
_HEAD_DIMS = range(8, 257, 8)
_LAYERS = {"full_attention", "sliding_attention"}
_NOT_COMPUTED = ("s_aux", "softcap")
"""What some models ask of attention beside the usual."""


def prefer_packed_attention(model: PreTrainedModel, document: Document) -> None:
    """Let a model whose samples are laid end to end on a GPU attend by these kernels, if it can."""
    parameters = document.hyperparameters
    if parameters.attn_implementation or not (document.data.packing or parameters.padding_free):
        return
    halved = parameters.mixed_precision != "no" or model.dtype in (torch.bfloat16, torch.float16)
    if halved and torch.cuda.is_available() and torch.cuda.is_bf16_supported() and _able(model) and _register():
        model.set_attn_implementation(PACKED)


def _able(model: PreTrainedModel) -> bool:
    """Whether the kernels compute all that its architecture asks of attention."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return (
        model.config._attn_implementation == "sdpa"
        and bool(getattr(model, "_supports_flash_attn", False))
        and head_dim in _HEAD_DIMS
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and not getattr(config, "attention_dropout", 0)
        and not getattr(config, "attn_logit_softcapping", None)
        and not any(name.endswith("sinks") for name, _ in model.named_parameters())
    )


def _register() -> bool:
    """Make the implementation known to transformers; whether this PyTorch has the kernels."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before 2.10
        return False
    AttentionInterface.register(PACKED, PackedAttention(varlen_attn))
    AttentionMaskInterface.register(PACKED, flash_attention_mask)
    return True


class PackedAttention:
    """Causal attention of each sample to itself.

    Args:
        kernel: PyTorch's `varlen_attn`, or what has its signature.
    """

    def __init__(self, kernel: Callable[..., torch.Tensor]) -> None:
        self._kernel = kernel
        self._shares_heads = "enable_gqa" in inspect.signature(kernel).parameters
        self._positions: torch.Tensor | None = None
        self._ends: tuple[torch.Tensor, int] | None = None

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it: `[batch, heads, length, width]` in, `[batch, length, heads, width]` out."""
        if attention_mask is not None or dropout or position_ids is None:
            raise RuntimeError(
                "rows with padding reached attention for packed samples; set hyperparameters.attn_implementation: sdpa"
            )
        if asked := [name for name in _NOT_COMPUTED if others.get(name) is not None]:
            raise RuntimeError(
                f"attention for packed samples knows no {asked[0]}; set hyperparameters.attn_implementation: sdpa"
            )
        batch, heads, length, width = query.shape
        ends, longest = self._ends_of(position_ids.expand(batch, length))
        window = (sliding_window - 1 if sliding_window else -1, 0)
        options: dict[str, Any] = {"enable_gqa": True} if self._shares_heads else {}
        if not self._shares_heads:
            key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        laid = [_narrow(each).transpose(1, 2).reshape(batch * length, -1, width) for each in (query, key, value)]
        attended = self._kernel(*laid, ends, ends, longest, longest, scale=scaling, window_size=window, **options)
        return attended.view(batch, length, heads, width), None

    @torch.compiler.disable
    def _ends_of(self, positions: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Where each sample ends, beginning with 0, and the length of the longest. Asked by every layer of a step; the
        answer takes a wait for the GPU."""
        if self._ends is None or self._positions is None or self._positions.data_ptr() != positions.data_ptr():
            flat = positions.flatten()
            starts = (flat == 0).nonzero().flatten()
            ends = torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)
            # The positions are kept: while they are, no others can have their address.
            self._positions, self._ends = positions, (ends, int(ends.diff().max()))
        return self._ends


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """In the 16 bits that are computed with: norms may have widened it."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor
