"""Supervised fine-tuning and pre-training, full or with LoRA, by TRL's trainer.

Rows come tokenized and labelled. What TRL packs them into, it keeps beside them for the next attempt.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset, load_from_disk
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl import SFTTrainer

from trainmaster.training import models
from trainmaster.training.arguments import sft_arguments
from trainmaster.training.checkpoint_mixin import Checkpointing
from trainmaster.training.document import Document, DocumentError, Prepared


class ShardingAnywhere(Trainer):
    """A `Trainer` that shards also without a GPU, where accelerate silently trains whole models instead."""

    def create_accelerator_and_postprocess(self) -> None:
        """As the loop's; then what accelerate does on a GPU alone."""
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


def build(
    document: Document, prepared: Prepared, *, adapter: bool, scratch: Path, world_size: int
) -> CheckpointedSFTTrainer:
    """The trainer of one rank, ready to train.

    Raises:
        DocumentError: the training cannot be set up as it was asked for.
    """
    # The first thing, as it also joins the ranks: a mistake in the document is told before gigabytes are read.
    arguments = sft_arguments(document, prepared, scratch=scratch, world_size=world_size)
    model = models.load_model(document, prepared, trains_base=not adapter)
    tokenizer = models.load_tokenizer(document, prepared)
    train = load_from_disk(prepared.train_path)
    _require_embeddings(model, tokenizer, train)
    try:
        return CheckpointedSFTTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=None if prepared.eval_path is None else load_from_disk(prepared.eval_path),
            processing_class=tokenizer,
            peft_config=models.lora_config(document.hyperparameters) if adapter else None,
        )
    except ValueError as error:
        raise DocumentError(f"the training cannot be set up like this: {error}") from error


def _require_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> None:
    """See that the model knows all tokens of the rows: else a GPU says no more than that an assertion failed."""
    known = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= known:
        return
    highest = max(pc.max(part.flatten()).as_py() for part in rows.data.column("input_ids").chunks)
    if highest >= known:
        raise DocumentError(
            f"the rows have the token '{tokenizer.decode([highest])}' (number {highest}), and the model has embeddings "
            f"for {known} tokens: name the model's own tokenizer, or a model that was resized for this one"
        )
