"""Sets up a training by the engine's model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow.compute as pc
import torch
from datasets import Dataset, load_from_disk
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import align_special_tokens
from trl.data_utils import pack_dataset

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.quantized import check_fp8
from trainmaster.engine.types import EngineError
from trainmaster.jobs import report
from trainmaster.server.core.training.hyperparameters import FP8, Value
from trainmaster.training import models
from trainmaster.training.data.dataset import LIKED, SEQ_LENGTHS
from trainmaster.training.document import Document, DocumentError, Prepared, parsed
from trainmaster.training.fetching.cache import Cache, key_of
from trainmaster.training.loop.batches import JudgedRows, Rows
from trainmaster.training.loop.engine_model import EngineModel, LackingError, engine_config
from trainmaster.training.loop.objectives import Objective
from trainmaster.training.loop.peers import Peers
from trainmaster.training.loop.references import reference_logprobs
from trainmaster.training.loop.sharding import Sharding
from trainmaster.training.loop.trainer import EngineTrainer
from trainmaster.training.loop.weights import TrainedWeights
from trainmaster.training.steps import say

_COLUMNS = ("input_ids", "labels", SEQ_LENGTHS, LIKED)


def build(document: Document, prepared: Prepared, objective: Objective) -> EngineTrainer:
    """The trainer of one rank. Raises LackingError where the engine cannot compute the model, before it is loaded."""
    adapter = document.trains_adapter
    parameters = document.hyperparameters
    config = _config(document, prepared)
    train, evaluation = _datasets(prepared)
    _require_positions(config, [train, evaluation])
    if document.training.framework.config.get("full_determinism", "").lower() == "true":
        _choose_deterministic_kernels()
    precision = models.precision(document, cuda=torch.cuda.is_available())
    peers = Peers.join(str(document.training.framework.distributed.backend))
    fp8 = precision == FP8
    if fp8:
        _require_fp8(peers.device)
    model = models.load_model(document, prepared, trains_base=not adapter)
    tokenizer = models.load_tokenizer(document, prepared)
    models.require_embeddings(model, tokenizer, train)
    _agree(model, tokenizer)
    halved = precision == "bf16" or (fp8 and peers.device.type == "cuda")
    dtype = torch.bfloat16 if halved else model.dtype
    if dtype == torch.float16:
        raise LackingError("the model's weights are float16, and the engine trains in float32 or bfloat16")
    set_seed(document.data.seed or 0)  # PEFT draws the adapter's first weights
    engine = EngineModel(
        model,
        config,
        models.lora_config(parameters) if adapter else None,
        TrainedWeights(peers, single=peers.count * document.data.gradient_accumulation_steps == 1),
        objective,
        device=peers.device,
        dtype=dtype,
        fp8=fp8,
        recompute=_recomputed_share(parameters["gradient_checkpointing"], peers.device),
        sharding=_sharding(document, peers),
    )
    if peers.device.type == "cuda":
        # A single answer is computed together with another one.
        _require_memory(engine, _longest(train) * (1 + (LIKED in train.column_names)), peers.device)
    rows = {"train": _rows(train, document, prepared, peers)}
    if evaluation is not None:
        rows["eval"] = _rows(evaluation, document, prepared, peers)
    if objective.needs_reference:
        for name, own in rows.items():
            own.reference = reference_logprobs(
                engine,
                own,
                batch_size=document.data.batch_size,
                peers=peers,
                cache=Cache(Path(prepared.cache_path)),
                key=_references_key(document, prepared, name, f"{dtype}, fp8 {fp8}, {peers.device.type}"),
            )
    return EngineTrainer(document, engine, tokenizer, train=rows["train"], evaluation=rows.get("eval"), peers=peers)


def _references_key(document: Document, prepared: Prepared, rows: str, computed_in: str) -> str:
    base = document.training.base_model
    options = base.model_dump(mode="json", include={"model_kwargs", "dtype"})
    return key_of(prepared.model_key, prepared.rows_key, rows, computed_in, options)


def _recomputed_share(checkpointing: Value, device: torch.device) -> float | None:
    """The share of the layers that are recomputed; None: as few as memory asks for."""
    return None if checkpointing == "auto" and device.type == "cuda" else float(checkpointing is not False)


def _require_memory(engine: EngineModel, longest: int, device: torch.device) -> None:
    try:
        engine.require_memory(longest, device)
    except EngineError as error:
        raise DocumentError(f"data_config.max_seq_length: {error}") from error


def _choose_deterministic_kernels() -> None:
    """Have the same sums in the same order in every run; operations that cannot do so raise an error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's libraries are first used
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    if report.rank() == 0:
        say("only deterministic kernels are used")


def _sharding(document: Document, peers: Peers) -> Sharding | None:
    if not document.sharded:
        return None
    if document.hyperparameters["mixed_precision"] == FP8:
        raise DocumentError("hyperparameters.mixed_precision: weights of 8 bits are not sharded; use bf16")
    options = {name: parsed(text) for name, text in document.training.framework.distributed.config.items()}
    return Sharding(peers=peers, **options)


def _config(document: Document, prepared: Prepared) -> ModelConfig:
    try:
        described = models.load_config(document, prepared)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this machine, such as a failing disk
        raise LackingError(f"the model's config.json cannot be read: {error}") from error
    return engine_config(described, prepared.model_path)


def _datasets(prepared: Prepared) -> tuple[Dataset, Dataset | None]:
    return (
        load_from_disk(prepared.train_path),
        None if prepared.eval_path is None else load_from_disk(prepared.eval_path),
    )


def _require_positions(config: ModelConfig, datasets: Iterable[Dataset | None]) -> None:
    """Some models turn positions by other angles in longer samples, and transformers knows these."""
    longest = max(_longest(each, SEQ_LENGTHS) for each in datasets if each is not None)
    if longest > config.max_positions:
        raise LackingError(
            f"the longest sample has {longest} tokens, and the engine computes {config.max_positions} of this model"
        )


def _longest(dataset: Dataset, lengths: str = "") -> int:
    """The tokens of the longest row; by the name of a column of lengths, if there is one, of the longest sequence."""
    if lengths in dataset.column_names:
        return max(int(pc.max(part.flatten()).as_py()) for part in dataset.data.column(lengths).chunks)
    parts = dataset.data.column("input_ids").chunks
    return max(pc.max(pc.list_value_length(part)).as_py() or 0 for part in parts)


def _require_fp8(device: torch.device) -> None:
    try:
        check_fp8(device, torch.bfloat16)
    except EngineError as error:
        raise DocumentError(f"hyperparameters.mixed_precision: {error}") from error


def _agree(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The special tokens of an exported model are the tokenizer's, as with TRL."""
    align_special_tokens(model, tokenizer)  # type: ignore[no-untyped-call]
    model.config.use_cache = False


def _rows(dataset: Dataset, document: Document, prepared: Prepared, peers: Peers) -> Rows:
    dataset = dataset.select_columns([name for name in _COLUMNS if name in dataset.column_names])
    if LIKED in dataset.column_names:
        return JudgedRows(dataset, prepared.max_seq_length)
    if not document.packing:
        return Rows(dataset)
    return Rows(peers.first_on_node(lambda: pack_dataset(dataset, prepared.max_seq_length, "bfd")))
