"""Fine-tuning and pre-training, full or LoRA, by TRL's `SFTTrainer`; nothing of the document is dropped silently."""

# ruff: noqa: ARG002 - the signatures of `TrainerCallback`

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import load_from_disk
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from trainmaster.server.core.training.hyperparameters import FP8
from trainmaster.server.core.training.options import CONFIG, DISTRIBUTED, refused_options
from trainmaster.training import models
from trainmaster.training.checkpoint_mixin import Checkpointing
from trainmaster.training.document import Document, DocumentError, Prepared, parsed
from trainmaster.training.progress_report import Course, Reporting


class ShardingAnywhere(Trainer):
    """A `Trainer` that also shards without a GPU; accelerate silently trains whole models there."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not self.args.fsdp or self.is_fsdp_enabled:
            return
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True


class CheckpointedSFTTrainer(Checkpointing, ShardingAnywhere, SFTTrainer):
    """TRL's trainer, with our checkpoints."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert isinstance(self.processing_class, PreTrainedTokenizerBase)
        return self.processing_class

    def report_to(self, reporting: Reporting) -> None:
        self.add_callback(_ReportingCallback(reporting))


class _ReportingCallback(TrainerCallback):
    def __init__(self, reporting: Reporting) -> None:
        self._reporting = reporting

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        self._following(args, state).begin(state.global_step, state.epoch, more["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._reporting.step_ended(state.global_step, state.epoch)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._following(args, state).log(state.global_step, state.epoch, logs or {})

    def _following(self, args: TrainingArguments, state: TrainerState) -> Reporting:
        """An evaluation that an earlier attempt left over is logged before the training begins."""
        self._reporting.course = Course(
            device=args.device,
            ranks=args.world_size,
            step_rows=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            steps=state.max_steps,
        )
        return self._reporting


def build(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> CheckpointedSFTTrainer:
    """The trainer of one rank, ready to train. Raises DocumentError where it cannot be set up as the job asks."""
    adapter = document.trains_adapter
    try:
        # First, as this also joins the ranks: a mistake in the document is reported before gigabytes are read.
        arguments = SFTConfig(**trl_options(document, prepared, scratch=scratch, world_size=world_size))
    except (TypeError, ValueError) as error:
        raise _cannot_set_up(error) from error
    model = models.load_model(document, prepared, trains_base=not adapter)
    tokenizer = models.load_tokenizer(document, prepared)
    train = load_from_disk(prepared.train_path)
    models.require_embeddings(model, tokenizer, train)
    try:
        trainer = CheckpointedSFTTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=None if prepared.eval_path is None else load_from_disk(prepared.eval_path),
            processing_class=tokenizer,
            peft_config=models.lora_config(document.hyperparameters) if adapter else None,
        )
    except ValueError as error:
        raise _cannot_set_up(error) from error
    trainer.remove_callback(PrinterCallback)
    return trainer


def _cannot_set_up(error: Exception) -> DocumentError:
    return error if isinstance(error, DocumentError) else DocumentError(f"the training cannot be set up: {error}")


_SHARED = (
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "optim",
    "logging_steps",
    "eval_strategy",
    "torch_compile",
    "neftune_noise_alpha",
    "padding_free",
    "use_liger_kernel",
)


def trl_options(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> dict[str, Any]:
    """The arguments of `SFTConfig`. Raises DocumentError where an option is unknown, or cannot be used here."""
    parameters, data, checkpoint = document.hyperparameters, document.data, document.output.checkpoint
    framework = document.training.framework
    for field, instead in refused_options(framework.config, framework.distributed.config, sharded=document.sharded):
        raise DocumentError(f"{field}: {instead}")
    options = _typed(CONFIG, framework.config)
    cuda = torch.cuda.is_available() and not options.get("use_cpu", False)
    precision = models.precision(document, cuda=cuda)
    if precision == FP8:
        raise DocumentError(f"hyperparameters.mixed_precision: fp8 is not computed by {framework.type}; use bf16")
    return {
        **{name: parameters[name] for name in _SHARED},
        "gradient_checkpointing": _recomputes(document),
        "eval_steps": parameters["eval_steps"] if parameters["eval_strategy"] == "steps" else None,
        "output_dir": str(scratch),
        "per_device_train_batch_size": data.batch_size,
        "per_device_eval_batch_size": data.batch_size,
        "gradient_accumulation_steps": data.gradient_accumulation_steps,
        "dataloader_num_workers": data.num_workers,
        "dataloader_pin_memory": cuda if data.pin_memory is None else data.pin_memory,
        "seed": data.seed,
        "data_seed": data.seed,
        "packing": document.packing,
        # Rows were truncated by the preparing step; TRL would only check all of them again.
        "max_length": prepared.max_seq_length if document.packing else None,
        "save_strategy": str(checkpoint.save_strategy),
        "save_steps": checkpoint.save_steps,
        "use_cpu": not cuda,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "warning",
        "log_level_replica": "error",
        **_padding(document, prepared),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **_distribution(document, world_size=world_size, cuda=cuda),
        **options,
    }


def _recomputes(document: Document) -> bool:
    return document.hyperparameters["gradient_checkpointing"] is not False


def _padding(document: Document, prepared: Prepared) -> dict[str, Any]:
    padding = document.data.preprocess.padding
    if padding == "max_length" and not document.packing:
        return {"pad_to_multiple_of": prepared.max_seq_length}
    return {"padding_free": True} if padding == "none" and document.data.batch_size > 1 else {}


def _distribution(document: Document, *, world_size: int, cuda: bool) -> dict[str, Any]:
    distributed = document.training.framework.distributed
    arguments: dict[str, Any] = {}
    if world_size > 1:
        # NCCL needs a GPU.
        arguments["ddp_backend"] = str(distributed.backend) if cuda else "gloo"
    if document.sharded:
        config = {name: parsed(text) for name, text in distributed.config.items()}
        # transformers' own gradient checkpointing would gather the weights of each layer once more.
        config |= {"version": 2, "activation_checkpointing": _recomputes(document)}
        return {**arguments, "gradient_checkpointing": False, "fsdp": True, "fsdp_config": config}
    # Every trained parameter takes part in every step; looking for unused ones costs a walk of the graph.
    arguments["ddp_find_unused_parameters"] = False
    return arguments | _typed(DISTRIBUTED, distributed.config)


def _typed(where: str, options: Mapping[str, str]) -> dict[str, Any]:
    hints = typing.get_type_hints(SFTConfig)
    return {name: _value(f"{where}.{name}", text, hints[name]) for name, text in options.items()}


def _value(where: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    names = {typing.get_origin(kind) or kind for kind in kinds}
    value = parsed(text)
    if type(value) in names or (isinstance(value, int) and not isinstance(value, bool) and float in names):
        return value
    if isinstance(value, float) and value.is_integer() and int in names:
        return int(value)
    if value is None and type(None) in names:
        return None
    if str in names and not isinstance(value, list | dict):
        return text
    wanted = " or ".join(sorted(kind.__name__ for kind in names if kind is not type(None)))
    raise DocumentError(f"{where}: {text!r} is not of type {wanted}")
