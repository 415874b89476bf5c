"""From files to the token sequences that a model is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.training.data.encoder import Encoder, Sample
from trainmaster.training.data.row_selection import Indices, select
from trainmaster.training.data.rows import origin_of, write_rows
from trainmaster.training.data.shapes import Judged, Wanted
from trainmaster.training.document import LocalSource, TokenizationConfig
from trainmaster.training.steps import InputError, OnProgress, ignore_progress

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a position that is not trained on; every trainer has the same."""
SEQ_LENGTHS = "seq_lengths"
"""The lengths of a row's sequences, where it has several; TRL's packs have the same column."""
LIKED = "liked"
_SLICE = 50_000
_MORE_COLUMNS = {Wanted.PREFERENCES: (SEQ_LENGTHS,), Wanted.JUDGEMENTS: (LIKED,)}
_BATCH = 256
_ROWS_SHARE = 0.2
"""The share of a build's time that goes into reading rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    path: str
    rows: int
    """In the source's files."""
    kept: int
    """After the filters."""
    used: int
    """After sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Datasets with the columns `input_ids` and `labels`; labels are IGNORED at positions that are not trained on.

    Of a preference, both answers are one row, the chosen one first, and SEQ_LENGTHS has their lengths. LIKED says of
    single answers whether they were.
    """

    train: Dataset
    evaluation: Dataset | None
    sources: tuple[SourceReport, ...]
    train_tokens: int
    cut: int
    """Samples that were truncated to max_seq_length."""
    left_out: int
    """Truncated samples without anything left to train on; they are not in the datasets."""


def build(
    config: TokenizationConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[LocalSource],
    *,
    max_seq_length: int,
    directory: Path,
    progress: OnProgress = ignore_progress,
) -> Built:
    """Make the datasets of a job, mapped from files in `directory`, which the caller removes. Raises InputError."""
    from datasets import Dataset
    from datasets.utils.logging import set_verbosity_error
    from datasets.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    set_verbosity_error()
    data = config.data
    encoder = Encoder(config, tokenizer, max_seq_length)
    rows_file = directory / "rows.arrow"
    counts_by_source = write_rows(rows_file, data.sources, sources, lambda share: progress(share * _ROWS_SHARE))
    selection = select(
        [counts.kept for counts in counts_by_source],
        [source.sampling for source in data.sources],
        validation_split=data.validation_split,
        seed=data.seed or 0,
        validation=[source.validation for source in data.sources],
    )
    rows = Dataset.from_file(str(rows_file))
    work = _Work(encoder, sources)
    total = len(selection.train) + len(selection.evaluation)

    def encoded(indices: Indices, name: str, before: int) -> Dataset:
        def on_progress(done: int) -> None:
            progress(_ROWS_SHARE + (1 - _ROWS_SHARE) * (before + done) / total)

        return _encoded(rows, indices, work, data.num_workers, directory / name, on_progress)

    columns = ["input_ids", "labels", *_MORE_COLUMNS.get(encoder.wanted, ())]
    train = _finished(encoded(selection.train, "train", 0), "train on", max_seq_length, columns)
    evaluation = None
    if len(selection.evaluation):
        held_back = encoded(selection.evaluation, "eval", len(selection.train))
        evaluation = _finished(held_back, "validate with", max_seq_length, columns)
    parts = [train] if evaluation is None else [train, evaluation]
    return Built(
        train=train.dataset,
        evaluation=None if evaluation is None else evaluation.dataset,
        sources=tuple(
            SourceReport(path=local.path, rows=counts.read, kept=counts.kept, used=used)
            for local, counts, used in zip(sources, counts_by_source, selection.used, strict=True)
        ),
        train_tokens=train.tokens,
        cut=sum(part.cut for part in parts),
        left_out=sum(part.left_out for part in parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    dataset: Dataset
    tokens: int
    cut: int
    left_out: int


class _Work:
    """Encodes a batch of rows; it is pickled to worker processes."""

    def __init__(self, encoder: Encoder, sources: Sequence[LocalSource]) -> None:
        self._encoder = encoder
        self._sources = sources

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        places = zip(batch["source"], batch["file"], batch["number"], strict=True)
        origins = [origin_of(self._sources[source], file, number) for source, file, number in places]
        rows = [json.loads(row) for row in batch["row"]]
        of_rows = self._encoder.encode(rows, origins)
        judged = self._encoder.wanted is Wanted.JUDGEMENTS
        shapes = [self._encoder.shape(row, origin) for row, origin in zip(rows, origins, strict=True) if judged]
        if self._encoder.wanted is not Wanted.PREFERENCES:
            of_rows = [[sample] for of_row in of_rows for sample in of_row]
        return {
            "input_ids": [[token for sample in row for token in sample.input_ids] for row in of_rows],
            "labels": [[label for sample in row for label in _labels(sample)] for row in of_rows],
            SEQ_LENGTHS: [[len(sample.input_ids) for sample in row] for row in of_rows],
            LIKED: [isinstance(shape, Judged) and shape.liked for shape in shapes] or [False] * len(of_rows),
            "tokens": [sum(len(sample.input_ids) for sample in row) for row in of_rows],
            "cut": [any(sample.cut for sample in row) for row in of_rows],
            "left_out": [not all(sample.trained for sample in row) for row in of_rows],
        }


def _labels(sample: Sample) -> list[int]:
    if all(sample.mask):
        return sample.input_ids
    return [token if trained else IGNORED for token, trained in zip(sample.input_ids, sample.mask, strict=True)]


def _encoded(
    rows: Dataset, indices: Indices, work: _Work, workers: int, target: Path, progress: Callable[[int], None]
) -> Dataset:
    from datasets import Features, List, Value, concatenate_datasets

    features = Features(
        {
            "input_ids": List(Value("int32")),
            "labels": List(Value("int32")),
            SEQ_LENGTHS: List(Value("int32")),
            LIKED: Value("bool"),
            "tokens": Value("int32"),
            "cut": Value("bool"),
            "left_out": Value("bool"),
        }
    )
    parts = []
    for number, start in enumerate(range(0, len(indices), _SLICE)):
        chosen = rows.select(indices[start : start + _SLICE])
        parts.append(
            chosen.map(
                work,
                batched=True,
                batch_size=_BATCH,
                num_proc=min(workers, -(-len(chosen) // _BATCH)) if workers > 1 else None,
                remove_columns=rows.column_names,
                features=features,
                # The default hashes the work, which takes long.
                new_fingerprint=f"{target.name}-{number}",
                cache_file_name=f"{target}-{number}.arrow",
                load_from_cache_file=False,
            )
        )
        progress(min(start + _SLICE, len(indices)))
    return concatenate_datasets(parts)


def _finished(dataset: Dataset, purpose: str, max_seq_length: int, columns: list[str]) -> _Finished:
    """Leave out samples without anything to train on: a batch of them would have no loss."""
    import numpy as np

    tokens, cut, left_out = (np.asarray(dataset.data.column(name)) for name in ("tokens", "cut", "left_out"))
    if left_out.all():
        raise InputError(
            f"no sample is left to {purpose}: with max_seq_length {max_seq_length}, everything that is trained on is "
            "cut off; raise it"
        )
    kept = dataset.select_columns(columns)
    return _Finished(
        dataset=kept.select(np.flatnonzero(~left_out)) if left_out.any() else kept,
        tokens=int(tokens[~left_out].sum()),
        cut=int(cut.sum()),
        left_out=int(left_out.sum()),
    )
