"""Packed samples see themselves and nothing else, whatever computes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import document as as_json
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from trainmaster.training.document import Document
from trainmaster.training.models import PACKED, PackedSampleAttention, prefer_packed_attention

LENGTHS = (5, 1, 9, 17)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are for GPUs")


def plain_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """What PyTorch's kernel computes, sample by sample."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == cu_seq_q.diff().max()
    attended = []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scale
        ages = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        hidden = (ages < 0) | ((ages > window_size[0]) if window_size[0] >= 0 else torch.zeros_like(ages, dtype=bool))
        attended.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value[start:end])
        )
    return torch.cat(attended)


def kernel_that_shares_heads(*tensors: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    query, key, value, *ends = tensors
    assert enable_gqa
    repeats = query.shape[1] // key.shape[1]
    return plain_kernel(query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), *ends, **options)


@pytest.fixture
def register() -> Iterator[Callable[[Any], None]]:
    def registered(kernel: Any) -> None:
        AttentionInterface.register(PACKED, PackedSampleAttention(kernel))
        AttentionMaskInterface.register(PACKED, flash_attention_mask)

    yield registered
    AttentionInterface._global_mapping.pop(PACKED, None)
    AttentionMaskInterface._global_mapping.pop(PACKED, None)


@pytest.fixture
def pretraining(tmp_path: Path) -> Callable[..., Document]:
    """Makes the document of a training on packed rows."""

    def made(**parts: Any) -> Document:
        path = tmp_path / "training.json"
        path.write_text(json.dumps(as_json("CONTINUED_PRETRAIN", **parts)))
        return Document.read(path)

    return made


def small_model(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    options = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 50,
        "initializer_range": 0.3,
        **changes,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type", "qwen3"), **options))


def packed_rows() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": torch.randint(50, positions.shape), "position_ids": positions}


def logits_and_gradient(model: PreTrainedModel, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logits = model(**rows, use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    return logits.detach(), model.get_input_embeddings().weight.grad.clone()


@pytest.mark.parametrize("kernel", [plain_kernel, kernel_that_shares_heads])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "llama"},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ],
    ids=["qwen3", "llama", "sliding"],
)
def test_packed_attention_computes_what_the_default_computes(
    register: Callable[[Any], None], kernel: Any, changes: dict[str, Any]
) -> None:
    register(kernel)
    model, rows = small_model(**changes), packed_rows()
    usual = logits_and_gradient(model, rows)
    model.set_attn_implementation(PACKED)
    for ours, theirs in zip(logits_and_gradient(model, rows), usual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    shorter = {name: tensor[:, : sum(LENGTHS[:2])].clone() for name, tensor in rows.items()}
    torch.testing.assert_close(model(**shorter).logits, usual[0][:, : sum(LENGTHS[:2])], rtol=1e-4, atol=1e-4)


def test_padding_is_refused(register: Callable[[Any], None]) -> None:
    register(plain_kernel)
    model, rows = small_model(), packed_rows()
    model.set_attn_implementation(PACKED)
    mask = torch.ones_like(rows["input_ids"])
    mask[:, :3] = 0
    with pytest.raises(RuntimeError, match="attn_implementation: sdpa"):
        model(**rows, attention_mask=mask)


def test_without_a_gpu_the_default_stays(monkeypatch: pytest.MonkeyPatch, pretraining: Callable[..., Document]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = small_model()
    prefer_packed_attention(model, pretraining())
    assert model.config._attn_implementation == "sdpa"


@needs_gpu
@pytest.mark.parametrize(
    ("changes", "parts", "chosen"),
    [
        ({}, {}, PACKED),
        ({}, {"data": {"preprocess": {"packing": False}}}, "sdpa"),
        ({}, {"hyperparameters": {"attn_implementation": "eager"}}, "sdpa"),
        ({}, {"hyperparameters": {"mixed_precision": "no"}}, "sdpa"),
        ({"attention_dropout": 0.1}, {}, "sdpa"),
        ({"model_type": "gpt_oss"}, {}, "eager"),
    ],
)
def test_what_is_chosen_on_a_gpu(
    pretraining: Callable[..., Document], changes: dict[str, Any], parts: dict[str, Any], chosen: str
) -> None:
    model = small_model(**changes)
    prefer_packed_attention(model, pretraining(**parts))
    assert model.config._attn_implementation == chosen


@needs_gpu
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}])
def test_the_kernels_of_the_gpu_compute_what_the_default_computes(
    pretraining: Callable[..., Document], changes: dict[str, Any]
) -> None:
    model = small_model(**changes).to("cuda")
    rows = {name: tensor.to("cuda") for name, tensor in packed_rows().items()}
    with torch.autocast("cuda", torch.bfloat16):
        usual = logits_and_gradient(model, rows)
        prefer_packed_attention(model, pretraining())
        assert model.config._attn_implementation == PACKED
        for ours, theirs in zip(logits_and_gradient(model, rows), usual, strict=True):
            assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()
