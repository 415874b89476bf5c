"""Shows what a model will see of a job's data: `python -m trainmaster.training.data_check`, with JSON in and out."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.schema.data import CheckedData, CheckedSource, DataProblem, DataSample, TokenSegment
from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataSource
from trainmaster.training.data.encoder import Encoder, Sample, load_tokenizer, sample_length
from trainmaster.training.data.rows import Row, RowCounts, nothing_left, rows_of
from trainmaster.training.data.shapes import Chat, Judged, Pair, Plain, Preference, Wanted
from trainmaster.training.document import LocalSource, TokenizationConfig, base_model_of
from trainmaster.training.fetching import fetch_source
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.models import fetch_config, fetch_tokenizer
from trainmaster.training.steps import Origin, PreparingError, RowError, continue_without_credentials

BEGINNING_BYTES = 64 << 20
"""Fetched of a remote file."""
MAX_FILE_BYTES = 1 << 30
"""Of a written file: the first file of a Hub dataset is fetched whole, and archives are unpacked."""
MAX_CPU_S = 600
"""Ends a check whose server is gone."""
MAX_READ = 100_000
"""Rows of a source that are read and filtered."""
MAX_ENCODED = 1_000
"""Rows of a source that are tokenized; of the others only the shape is checked."""
MAX_PROBLEMS = 10
"""Of one source; more of them usually have one cause."""
MAX_TOKENS_SHOWN = 4_096
"""Of one row."""
_SHAPES = {Chat: "messages", Pair: "prompt and completion", Plain: "text"}
_LIKED = {True: "liked completion", False: "disliked completion"}
_ANSWERS = ("prompt and chosen", "prompt and rejected")


def check(
    document: Mapping[str, Any], access: Access, *, limit: int, fetched: Mapping[str, Any] | None = None
) -> CheckedData:
    """Check a job's data, and show up to `limit` rows of each source. `fetched`: by `fetch_all`; None: when needed."""
    config, base_model = TokenizationConfig.from_document(document), _base_model(document)
    answer: CheckedData = {"ok": False, "problem": None, "max_seq_length": None, "sources": []}
    encoder = None
    try:
        tokenizer = _fetch_tokenizer(config, base_model, access) if fetched is None else fetched["tokenizer"]
        if directories := _without_problem(tokenizer)["directories"]:
            encoder = _open_encoder(config, base_model, *map(Path, directories))
            answer["max_seq_length"] = encoder.max_seq_length
    except PreparingError as error:
        answer["problem"] = str(error)
    for number, source in enumerate(config.data.sources):
        local = _fetch_source(source, number, access) if fetched is None else fetched["sources"][number]
        answer["sources"].append(_checked(source, local, encoder, limit))
        shutil.rmtree(_scratch(number, access), ignore_errors=True)  # before the next one takes its space
    answer["ok"] = answer["problem"] is None and all(source["ok"] for source in answer["sources"])
    return answer


def fetch_all(document: Mapping[str, Any], access: Access) -> dict[str, Any]:
    """Fetch everything that a check needs before it runs code that comes with a model. Returns plain JSON."""
    config = TokenizationConfig.from_document(document)
    return {
        "tokenizer": _fetch_tokenizer(config, _base_model(document), access),
        "sources": [_fetch_source(source, number, access) for number, source in enumerate(config.data.sources)],
    }


def _fetch_tokenizer(config: TokenizationConfig, base_model: BaseModelConfig | None, access: Access) -> dict[str, Any]:
    """The directories of tokenizer and model configuration, None where no tokenizer is named; or the problem."""
    named = config.data.preprocess.tokenizer_id
    if base_model is not None:
        named = named or base_model.tokenizer_id or base_model.model_id
    if not named:
        return {"directories": None}
    try:
        directory = fetch_tokenizer(named, base_model, access)
    except PreparingError as error:
        return {"problem": str(error)}
    model = (fetch_config(base_model, access) if base_model else None) or directory
    return {"directories": [str(directory), str(model)]}


def _fetch_source(source: DataSource, number: int, access: Access) -> dict[str, Any]:
    try:
        local = fetch_source(source, replace(access, cache=_scratch(number, access)))
    except PreparingError as error:
        return {"problem": str(error)}
    return {**local.to_json(), "whole": local.whole}


def _scratch(number: int, access: Access) -> Path:
    return access.cache / f"source-{number}"


def _without_problem(fetched: Mapping[str, Any]) -> Mapping[str, Any]:
    if "problem" in fetched:
        raise PreparingError(fetched["problem"])
    return fetched


def _base_model(document: Mapping[str, Any]) -> BaseModelConfig | None:
    return base_model_of(document) if document["training_config"].get("base_model") else None


def _open_encoder(
    config: TokenizationConfig, base_model: BaseModelConfig | None, directory: Path, model: Path
) -> Encoder:
    trusted = base_model is not None and base_model.trust_remote_code
    tokenizer = load_tokenizer(directory, config.data.preprocess, trust_remote_code=trusted)
    model_kwargs = base_model.model_kwargs if base_model else None
    length = sample_length(config.data.max_seq_length, model, directory, model_kwargs=model_kwargs)
    return Encoder(config, tokenizer, length)


def _checked(source: DataSource, fetched: Mapping[str, Any], encoder: Encoder | None, limit: int) -> CheckedSource:
    answer: CheckedSource = {
        "path": source.path,
        "ok": False,
        "format": None,
        "files": 0,
        "rows": 0,
        "kept": 0,
        "complete": False,
        "columns": [],
        "tokenized": 0,
        "tokens": None,
        "cut": 0,
        "untrained": 0,
        "problems": [],
        "samples": [],
    }
    try:
        local = replace(LocalSource.from_json(_without_problem(fetched)), whole=fetched["whole"])
        answer["path"], answer["format"], answer["files"] = local.path, local.format, len(local.files)
        _read(source, local, encoder, limit, answer)
    except PreparingError as error:
        answer["problems"].append(_problem(str(error), error if isinstance(error, RowError) else None))
    answer["ok"] = not answer["problems"]
    return answer


def _read(source: DataSource, local: LocalSource, encoder: Encoder | None, limit: int, answer: CheckedSource) -> None:
    counts = RowCounts()
    rows = rows_of(source, local, counts, whole=local.whole)
    lengths: list[int] = []
    try:
        for row in itertools.takewhile(lambda _: counts.read < MAX_READ, rows):
            if len(answer["samples"]) < limit and encoder is None:
                answer["samples"].append(_raw_sample(row))
            if encoder is None or len(answer["problems"]) >= MAX_PROBLEMS:
                continue
            try:
                if answer["tokenized"] < MAX_ENCODED:
                    _encode(row, encoder, limit, lengths, answer)
                else:
                    encoder.shape(row.values, row.origin)
            except RowError as error:
                answer["problems"].append(_problem(str(error), error))
        else:
            answer["complete"] = local.whole and counts.read < MAX_READ
    finally:
        answer["rows"], answer["kept"], answer["columns"] = counts.read, counts.kept, list(counts.columns)
    if not counts.kept:
        answer["problems"].append(_problem(f"{local.path}: {nothing_left(source, counts)}"))
    if lengths:
        answer["tokens"] = {"min": min(lengths), "median": int(statistics.median(lengths)), "max": max(lengths)}


def _encode(row: Row, encoder: Encoder, limit: int, lengths: list[int], answer: CheckedSource) -> None:
    samples = encoder.encode([row.values], [row.origin])[0]
    answer["tokenized"] += 1
    lengths.append(sum(sample.full_length for sample in samples))
    answer["cut"] += any(sample.cut for sample in samples)
    needed = all if encoder.wanted is Wanted.PREFERENCES else any
    answer["untrained"] += not needed(sample.trained for sample in samples)
    if answer["tokenized"] <= limit:
        answer["samples"] += previews(encoder, row.values, row.origin, samples)


def previews(encoder: Encoder, row: Mapping[str, Any], origin: Origin, samples: Sequence[Sample]) -> list[DataSample]:
    """A row as it will be trained on: the first of its samples, or both answers of a preference."""
    shape = encoder.shape(row, origin)
    if isinstance(shape, Preference):
        return [_preview(encoder, origin, [sample], name) for sample, name in zip(samples, _ANSWERS, strict=True)]
    name = _LIKED[shape.liked] if isinstance(shape, Judged) else _SHAPES[type(shape)]
    return [_preview(encoder, origin, samples, name)]


def _preview(encoder: Encoder, origin: Origin, samples: Sequence[Sample], shape: str) -> DataSample:
    first, decode = samples[0], encoder.tokenizer.decode
    trained = [bool(mark) for mark in first.mask]
    segments: list[TokenSegment] = []
    for is_trained, positions in itertools.groupby(range(len(trained)), trained.__getitem__):
        ids = [first.input_ids[position] for position in positions]
        segments.append({"text": str(decode(ids)), "tokens": len(ids), "trained": is_trained})
    return {
        "file": origin.file,
        "row": origin.number,
        "shape": shape,
        "values": None,
        "length": sum(sample.full_length for sample in samples),
        "samples": len(samples),
        "cut": first.cut,
        "input_ids": first.input_ids[:MAX_TOKENS_SHOWN],
        "tokens": [str(decode([token])) for token in first.input_ids[:MAX_TOKENS_SHOWN]],
        "trained": trained[:MAX_TOKENS_SHOWN],
        "segments": segments,
    }


def _raw_sample(row: Row) -> DataSample:
    text = json.dumps(row.values, ensure_ascii=False, default=str)
    return {
        "file": row.origin.file,
        "row": row.origin.number,
        "shape": None,
        "values": text if len(text) <= MAX_TOKENS_SHOWN else text[:MAX_TOKENS_SHOWN] + "…",
        "length": None,
        "samples": 0,
        "cut": False,
        "input_ids": [],
        "tokens": [],
        "trained": [],
        "segments": [],
    }


def _problem(message: str, error: RowError | None = None) -> DataProblem:
    origin = error.origin if error else None
    return {
        "message": message,
        "file": origin.file if origin else None,
        "row": origin.number if origin else None,
        "column": error.column if error else None,
    }


def main() -> None:
    """Nothing but the answer goes to the standard output."""
    request = json.load(sys.stdin)
    if memory := request.get("memory_bytes"):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    access = Access.from_environ(os.environ, beginning_bytes=BEGINNING_BYTES)
    document, fetched = request["document"], request.get("fetched")
    if fetched is None and (base_model := _base_model(document)) and base_model.trust_remote_code:
        fetched = fetch_all(document, access)
        continue_without_credentials("trainmaster.training.data_check", {**request, "fetched": fetched})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not spoil the answer
    with answers:
        json.dump(check(document, access, limit=request["limit"], fetched=fetched), answers)


if __name__ == "__main__":
    main()
