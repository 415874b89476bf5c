"""Sets up a training by the engine's model."""

from __future__ import annotations

import torch
from datasets import Dataset, load_from_disk
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import align_special_tokens
from trl.data_utils import pack_dataset

from trainmaster.server.core.training.types import LORA_TYPES
from trainmaster.training import models
from trainmaster.training.document import Document, Prepared
from trainmaster.training.loop.batches import Rows
from trainmaster.training.loop.engine_model import EngineModel, engine_config
from trainmaster.training.loop.peers import Peers
from trainmaster.training.loop.trainer import EngineTrainer


def build(document: Document, prepared: Prepared) -> EngineTrainer:
    """The trainer of one rank. Raises LackingError where the engine cannot compute the model, before it is loaded."""
    adapter = document.training.training_type in LORA_TYPES
    parameters = document.hyperparameters
    config = engine_config(models.load_config(document, prepared), prepared.model_path)
    precision = models.precision(document, cuda=torch.cuda.is_available())
    peers = Peers.join(str(document.training.framework.distributed.backend))
    model = models.load_model(document, prepared, trains_base=not adapter)
    tokenizer = models.load_tokenizer(document, prepared)
    train = load_from_disk(prepared.train_path)
    models.require_embeddings(model, tokenizer, train)
    _agree(model, tokenizer)
    dtype = torch.bfloat16 if precision == "bf16" else model.dtype
    set_seed(document.data.seed or 0)  # PEFT draws the adapter's first weights
    return EngineTrainer(
        document,
        EngineModel(
            model,
            config,
            models.lora_config(parameters) if adapter else None,
            device=peers.device,
            dtype=dtype,
            recompute=bool(parameters["gradient_checkpointing"]),
        ),
        tokenizer,
        train=_rows(train, document, prepared, peers),
        evaluation=None
        if prepared.eval_path is None
        else _rows(load_from_disk(prepared.eval_path), document, prepared, peers),
        peers=peers,
    )


def _agree(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The special tokens of an exported model are the tokenizer's, as with TRL."""
    align_special_tokens(model, tokenizer)  # type: ignore[no-untyped-call]
    model.config.use_cache = False


def _rows(dataset: Dataset, document: Document, prepared: Prepared, peers: Peers) -> Rows:
    dataset = dataset.select_columns(["input_ids", "labels"])
    if not document.packing:
        return Rows(dataset)
    return Rows(peers.first_on_node(lambda: pack_dataset(dataset, prepared.max_seq_length, "bfd")))
