"""Supervised fine-tuning and pre-training, full or with LoRA, by TRL's trainer.

Rows come tokenized, with a mask of the positions that are trained on. TRL takes labels instead: they are made here,
a column at a time, and kept beside the rows for the next attempt.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from trl import SFTTrainer

from trainmaster.trainers import models
from trainmaster.trainers.arguments import sft_arguments
from trainmaster.trainers.checkpointing import Checkpointing
from trainmaster.trainers.document import Document, DocumentError, Prepared
from trainmaster.trainers.sharding import ShardingAnywhere

if TYPE_CHECKING:
    from trainmaster.trainers.recipes import Recipe

IGNORED = -100
"""The label of a position that is not trained on."""


class CheckpointedSFTTrainer(Checkpointing, ShardingAnywhere, SFTTrainer):
    """TRL's trainer, with our checkpoints."""


def build(
    document: Document, prepared: Prepared, recipe: Recipe, *, scratch: Path, world_size: int
) -> CheckpointedSFTTrainer:
    """The trainer of one rank, ready to train.

    Raises:
        DocumentError: the training cannot be set up as it was asked for.
    """
    # The first thing, as it also joins the ranks: a mistake in the document is told before gigabytes are read.
    arguments = sft_arguments(document, prepared, scratch=scratch, world_size=world_size)
    model = models.load_model(document, prepared, trains_base=not recipe.adapter)
    train = _rows(prepared.train_path)
    if len(train) == 0:
        raise DocumentError("there is no row to train on: look at the sources and filters of data_config")
    try:
        return CheckpointedSFTTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=None if prepared.eval_path is None else _rows(prepared.eval_path),
            processing_class=models.load_tokenizer(document, prepared),
            peft_config=models.lora_config(document.hyperparameters) if recipe.adapter else None,
        )
    except ValueError as error:
        raise DocumentError(f"the training cannot be set up like this: {error}") from error


def _rows(path: str) -> Dataset:
    # The first rank of a node makes the labels, and the others find them.
    with PartialState().local_main_process_first():
        rows = load_from_disk(path).with_format("arrow")
        return rows.map(_labels, batched=True).with_format(None)


def _labels(rows: pa.Table) -> pa.Table:
    tokens, mask = (rows[name].combine_chunks() for name in ("input_ids", "completion_mask"))
    values = tokens.flatten()
    labels = pc.if_else(pc.equal(mask.flatten(), 0), pa.scalar(IGNORED, values.type), values)
    return rows.drop_columns(["completion_mask"]).append_column("labels", _lists_like(tokens, labels))


def _lists_like(lists: Any, values: pa.Array) -> pa.Array:
    """`values`, parted as `lists` are."""
    ends = pc.cumulative_sum(pc.list_value_length(lists))
    kind = pa.LargeListArray if pa.types.is_large_list(lists.type) else pa.ListArray
    offsets = pa.concat_arrays([pa.array([0], ends.type), ends])
    return kind.from_arrays(offsets, values)
