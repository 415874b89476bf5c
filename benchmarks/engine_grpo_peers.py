"""A whole GRPO step as users of transformers, PEFT and TRL have it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine_peers import generate, pretrained, with_adapter
from benchmarks.engine_work import LEARNING_RATE, RANK, NotAvailableError, Outcome, Setting, peak

_TRAINED_PART = 4
"""Of the sequences on a GPU, one in so many is trained on, and the time is multiplied: the others take as long."""


def grpo_generate(setting: Setting) -> Outcome:
    """`generate` on all samples at once, and a PEFT step, as TRL's trainer computes one without its other costs."""
    model = with_adapter(pretrained(setting))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    part = _TRAINED_PART if setting.cuda else 1

    def step(seed: int, new_tokens: int) -> tuple[float, float]:
        prompts = [each for each in setting.prompts(setting.groups, seed=seed) for _ in range(setting.group_size)]
        model.eval()
        began = setting.begin()
        with _autocast(setting):
            made = _generated(setting, model, prompts, new_tokens)
        sampled_s = setting.end(began)
        model.train()
        inputs = torch.from_numpy(np.stack(prompts)).to(setting.device)
        rows = torch.cat([inputs, made], dim=1)[::part]
        advantages = torch.randn(len(rows), device=setting.device)
        began = time.perf_counter()
        for own, advantage in zip(_batches(rows, setting), _batches(advantages, setting, rows), strict=True):
            with _autocast(setting):
                logprobs = _logprobs(model, own, setting.prompt)
            ratios = (logprobs - logprobs.detach()).exp()
            (-(ratios * advantage[:, None]).sum() / made.numel()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sampled_s, setting.end(began) * part

    step(0, setting.warm_tokens if not setting.cuda else 2)
    sampled_s, trained_s = step(1, setting.new_tokens)
    note = f"{sampled_s:.1f} s of sampling, {trained_s:.1f} s of training"
    if part > 1:
        note += f" (measured on one sequence in {part})"
    return Outcome(
        tokens=setting.groups * setting.group_size * setting.new_tokens,
        seconds=sampled_s + trained_s,
        peak_bytes=peak(setting),
        note=note,
    )


def _generated(setting: Setting, model: Any, prompts: Sequence[np.ndarray], new_tokens: int) -> Tensor:
    """In one batch; if there is no memory for it, in halves."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return generate(setting, model, prompts, new_tokens)
    middle = len(prompts) // 2
    if not middle:
        raise torch.OutOfMemoryError("there is no memory for one sequence")
    return torch.cat([_generated(setting, model, part, new_tokens) for part in (prompts[:middle], prompts[middle:])])


def _batches(values: Tensor, setting: Setting, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of half as many tokens as are computed together, for their logits are there, too; as those of other rows."""
    parts: tuple[Tensor, ...] = values.split(
        max(1, setting.together // 2 // (values if like is None else like).shape[1])
    )
    return parts


def _logprobs(model: Any, rows: Tensor, prompt: int) -> Tensor:
    """Of the new tokens: float32 [sequences, tokens]."""
    logits = model(input_ids=rows[:, :-1], use_cache=False, logits_to_keep=rows.shape[1] - prompt).logits.float()
    targets = rows[:, prompt:]
    return -functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def _autocast(setting: Setting) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if setting.cuda else contextlib.nullcontext()


def grpo_trl(setting: Setting) -> Outcome:
    """TRL's trainer, with a reward that costs nothing: its second step is timed."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotAvailableError(f"{' and '.join(missing)} not installed")
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    times: list[float] = []

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            setting.settle()
            times.append(time.perf_counter())

    def reward(completions: Sequence[str], **_: Any) -> list[float | None]:
        return [float(len(each) % 7) for each in completions]

    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    # One token for each letter, and no template.
    texts = ["".join(chr(97 + token % 26) for token in each) for each in setting.prompts(3 * setting.groups, seed=0)]
    samples = setting.groups * setting.group_size
    per_device = max(1, setting.together // 2 // (setting.prompt + setting.new_tokens))
    per_device = next(size for size in range(min(per_device, samples), 0, -1) if not samples % size)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=samples // per_device,
            num_generations=setting.group_size,
            max_completion_length=setting.new_tokens,
            generation_kwargs={"eos_token_id": None, "min_new_tokens": setting.new_tokens},
            temperature=1.0,
            max_steps=2,
            learning_rate=LEARNING_RATE,
            bf16=setting.cuda,
            use_cpu=not setting.cuda,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=pretrained(setting),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[Times()],
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train()
    outcome = Outcome(tokens=samples * setting.new_tokens, seconds=times[1] - times[0], peak_bytes=peak(setting))
    return dataclasses.replace(outcome, note=f"{per_device} sequences at once in training")
