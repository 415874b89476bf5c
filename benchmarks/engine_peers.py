"""What a user would write instead of asking the engine: a loop over transformers and PEFT, and `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine_work import (
    LEARNING_RATE,
    RANK,
    NotAvailableError,
    Outcome,
    Setting,
    Step,
    measured,
    peak,
    tokens_of,
)

IGNORED = -100
"""A target that does not count."""


def train_peft(
    setting: Setting,
    *,
    data: str,
    compiled: bool = False,
    narrow: bool = False,
    packed: bool = False,
    full: bool = False,
) -> Outcome:
    """Steps of a loop over transformers and PEFT.

    Sequences are sorted by length and padded at their ends to the longest of those that are computed together. No
    token sees what comes after it, so attention needs no mask, and takes its fastest kernel.

    Args:
        data: `mixed` or `equal`.
        compiled: each layer, and the head with the loss: they share their graphs, and are compiled once.
        narrow: adapters in the base model's 16 bits. Faster than the usual float32 with autocast, and less exact.
        packed: without padding, sequences end to end; transformers can do that with flash-attention alone.
        full: all weights, in float32 with autocast, and no adapter.
    """
    if packed and importlib.util.find_spec("flash_attn") is None:
        raise NotAvailableError("flash_attn is not installed")
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(
        setting.model,
        dtype=torch.float32 if full else setting.torch_dtype,
        device_map={"": setting.device},
        attn_implementation="flash_attention_2" if packed else "sdpa",
    )
    adapted = whole.train() if full else with_adapter(whole, narrow=narrow)
    body, head, loss_of = whole.model, whole.lm_head.weight, _summed_loss
    if compiled:
        how: dict[str, Any] = {"dynamic": data == "mixed"} | ({} if setting.cuda else {"backend": "aot_eager"})
        torch._dynamo.config.recompile_limit = 64  # past it, what is slow would be run in silence
        for layer in body.layers:
            layer.compile(**how)
        loss_of = torch.compile(_summed_loss, **how)
    trained = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    batches = setting.batches(data)
    autocast = setting.cuda and not narrow

    def step(number: int, together: int) -> Step:
        count, loss = tokens_of(batches[number]), torch.zeros((), device=setting.device)
        for rows in _together(batches[number], together):
            inputs, targets, where = _packed(rows, setting) if packed else _padded(rows, setting)
            with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
                hidden = body(input_ids=inputs, position_ids=where, use_cache=False).last_hidden_state
                own = loss_of(hidden, head, targets)
            (own / count).backward()
            loss += own.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Step(count, loss.item())

    outcome = None
    for together, checkpointing in (
        (setting.together, False),
        (setting.together // 2, False),
        (setting.together, True),
    ):
        if checkpointing:
            whole.gradient_checkpointing_enable({"use_reentrant": False})
        with contextlib.suppress(torch.OutOfMemoryError):
            outcome = measured(setting, functools.partial(step, together=together))
            break
        # Not while the error is handled: it would keep what the step had computed.
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
    if outcome is None:
        raise RuntimeError("out of memory, even with gradient checkpointing")
    note = f"{outcome.note}, {together:,} tokens at once{', with gradient checkpointing' if checkpointing else ''}"
    return dataclasses.replace(outcome, note=f"{note}; {_graphs()}" if compiled else note)


def with_adapter(model: Any, *, narrow: bool = False) -> Any:
    """The model with a new adapter, in training mode."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora, autocast_adapter_dtype=not narrow).train()


def _summed_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, head).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _graphs() -> str:
    """What the compiler made: layers that share one graph are compiled once."""
    from torch._dynamo.utils import counters

    return f"{counters['stats']['unique_graphs']} graphs, {sum(counters['graph_break'].values())} breaks"


def _together(rows: Sequence[np.ndarray], budget: int) -> Iterator[list[np.ndarray]]:
    """Sequences of like lengths, as many as fit when all are as long as the longest."""
    group: list[np.ndarray] = []
    for row in sorted(rows, key=len):
        if group and (len(group) + 1) * (len(row) - 1) > budget:
            yield group
            group = []
        group.append(row)
    yield group


def _padded(rows: Sequence[np.ndarray], setting: Setting) -> tuple[Tensor, Tensor, None]:
    inputs = np.zeros((len(rows), max(map(len, rows)) - 1), np.int64)
    targets = np.full_like(inputs, IGNORED)
    for place, row in enumerate(rows):
        inputs[place, : len(row) - 1], targets[place, : len(row) - 1] = row[:-1], row[1:]
    return torch.from_numpy(inputs).to(setting.device), torch.from_numpy(targets).to(setting.device), None


def _packed(rows: Sequence[np.ndarray], setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    laid = (
        np.concatenate([row[:-1] for row in rows]),
        np.concatenate([row[1:] for row in rows]),
        np.concatenate([np.arange(len(row) - 1) for row in rows]),
    )
    inputs, targets, positions = (torch.from_numpy(each)[None].to(setting.device) for each in laid)
    return inputs, targets, positions


def sample_generate(setting: Setting, *, count: int, static: bool = False) -> Outcome:
    """The same by transformers; with a static cache it compiles the model, too."""
    model = pretrained(setting)
    # A static cache has the size of what is asked for, and is compiled for it.
    generate(setting, model, setting.prompts(count, seed=0), setting.new_tokens if static else 8, static=static)
    began = setting.begin()
    tokens = generate(setting, model, setting.prompts(count, seed=1), setting.new_tokens, static=static).numel()
    return Outcome(tokens=tokens, seconds=setting.end(began), peak_bytes=peak(setting))


@functools.lru_cache(maxsize=1)
def pretrained(setting: Setting) -> Any:
    """The model as transformers loads it, once in a process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        setting.model, dtype=setting.torch_dtype, device_map={"": setting.device}, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def generate(
    setting: Setting, model: Any, prompts: Sequence[np.ndarray], new_tokens: int, *, static: bool = False
) -> Tensor:
    """So many new tokens for each prompt, all in one batch."""
    inputs = torch.from_numpy(np.stack(prompts)).to(setting.device)
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    if static:
        how["cache_implementation"] = "static"
    made = model.generate(
        input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, use_cache=True, **how
    )
    new: Tensor = made[:, inputs.shape[1] :]
    if new.numel() != len(prompts) * new_tokens:
        raise RuntimeError(f"{new.numel()} tokens came, not {len(prompts)} times {new_tokens}")
    return new
