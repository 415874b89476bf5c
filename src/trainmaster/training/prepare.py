"""The preparing step of a built-in trainer: `python -m trainmaster.training.prepare`.

The account's cache keeps token sequences by a key of all that they depend on, for other attempts and other jobs.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.jobs import inputs
from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataConfig, Sampling
from trainmaster.training import steps
from trainmaster.training.data.encoder import load_tokenizer, sample_length
from trainmaster.training.document import LocalSource, TokenizationConfig, base_model_of
from trainmaster.training.fetching import fetch_named_model, fetch_named_tokenizer, fetch_sources
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, emptied, key_of
from trainmaster.training.fetching.hub import TOKENIZER_PATTERNS
from trainmaster.training.fetching.models import ADAPTER_MARK, adapter_error
from trainmaster.training.steps import InputError, PreparingProgress, note, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORM = 3
"""Version of the cached rows' format: with another number, cached rows are not used."""
_SUMMARY = "summary.json"
_PART_BYTES = 1 << 20


def main() -> None:
    document = inputs.training()
    config, base_model = TokenizationConfig.from_document(document), base_model_of(document)
    access = Access.from_environ(os.environ)
    if (fetched := steps.handed_over()) is not None:
        progress = PreparingProgress(done=("model", "data"))
    else:
        progress = PreparingProgress()
        fetched = _fetch(config.data, base_model, access, progress)
        if base_model.trust_remote_code:
            steps.continue_without_credentials("trainmaster.training.prepare", fetched)
    model, tokenizer = Path(fetched["model"]), Path(fetched["tokenizer"])
    sources = [LocalSource.from_json(source) for source in fetched["sources"]]
    progress.begin("tokens")
    length = sample_length(config.data.max_seq_length, model, tokenizer, model_kwargs=base_model.model_kwargs)
    cache = Cache(access.cache)
    key = rows_key(config, sources, tokenizer, length, cache)

    def make(target: Path) -> None:
        loaded = load_tokenizer(tokenizer, config.data.preprocess, trust_remote_code=base_model.trust_remote_code)
        _tokenize(config, loaded, sources, length, target, progress)

    entry = cache.entry("prepared", key, make)
    summary = json.loads((entry / _SUMMARY).read_text())
    _tell(summary, length)
    steps.leave(
        {
            "model_path": str(model),
            "tokenizer_path": str(entry / "tokenizer" if (entry / "tokenizer").is_dir() else tokenizer),
            "train_path": str(entry / "train"),
            "eval_path": str(entry / "eval") if (entry / "eval").is_dir() else None,
            "train_rows": summary["train_rows"],
            "eval_rows": summary["eval_rows"],
            "train_tokens": summary["train_tokens"],
            "max_seq_length": length,
            "rows_key": key,
            "model_key": weights_key(model),
            "cache_path": str(cache.root),
            "sources": fetched["sources"],
        }
    )
    cache.forget_unused()
    progress.finish()


def _fetch(
    data: DataConfig, base_model: BaseModelConfig, access: Access, progress: PreparingProgress
) -> dict[str, Any]:
    """Everything that needs credentials, as plain JSON. Nothing here runs code that comes with a model."""
    progress.begin("model")
    model = fetch_named_model(base_model, access, progress)
    _require_plain_weights(model, base_model.model_id)
    tokenizer = fetch_named_tokenizer(data, base_model, access) or model
    progress.begin("data")
    sources = [source.to_json() for source in fetch_sources(data, access, progress)]
    return {"model": str(model), "tokenizer": str(tokenizer), "sources": sources}


def rows_key(
    config: TokenizationConfig, sources: Sequence[LocalSource], tokenizer: Path, max_seq_length: int, cache: Cache
) -> str:
    """A key of everything that decides which tokens a job trains on, in which order."""
    data = config.data
    return key_of(
        _FORM,
        {name: version(name) for name in ("transformers", "tokenizers", "jinja2", "trl")},
        max_seq_length,
        {
            "training_type": config.training_type,
            "completion_only_loss": config.completion_only_loss,
            "assistant_only_loss": config.assistant_only_loss,
            **({"unpaired": True} if config.unpaired else {}),
            "preprocess": data.preprocess.model_dump(mode="json", exclude={"padding", "packing"}),
            "max_seq_length": data.max_seq_length,
            "num_workers": None,
            "validation_split": data.validation_split,
            "seed": data.seed or 0,
            "sources": [
                {
                    "path": None,
                    "type": None,
                    "split": local.slices,
                    "format": local.format,
                    "columns": source.columns,
                    "filters": [each.model_dump(mode="json") for each in source.filters or ()],
                    "sampling": (source.sampling or Sampling()).model_dump(mode="json"),
                    **({"validation": True} if source.validation else {}),
                }
                for source, local in zip(data.sources, sources, strict=True)
            ],
        },
        [[cache.digest(file) for file in local.files] for local in sources],
        {
            path.relative_to(tokenizer).as_posix(): cache.digest(path)
            for path in sorted(tokenizer.rglob("*"))
            if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in TOKENIZER_PATTERNS)
        },
    )


def weights_key(model: Path) -> str:
    """A digest of a model's weights, by parts of each file: to read all of them would take long."""
    parts = []
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(_PART_BYTES))
            for place in (size // 2, max(0, size - _PART_BYTES)):
                file.seek(place)
                digest.update(file.read(_PART_BYTES))
        parts.append([path.name, size, digest.hexdigest()])
    return key_of(parts)


def _require_plain_weights(model: Path, shown: str) -> None:
    """Refuse a model whose loading runs code, or loads another model."""
    if (model / ADAPTER_MARK).exists():
        # transformers would also load the adapter's base model, from wherever its configuration says.
        raise adapter_error(shown)
    if not any(model.glob("*.safetensors")):
        raise InputError(
            f"{shown} has no weights in *.safetensors, and built-in trainers load no pickles (*.bin); load it where "
            "you trust it, and save it again with save_pretrained"
        )


def _tokenize(
    config: TokenizationConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[LocalSource],
    max_seq_length: int,
    target: Path,
    progress: PreparingProgress,
) -> None:
    from trainmaster.training.data.dataset import build

    say("reading and tokenizing rows")
    # Worker processes are forked from this one, and rows are tokenized in one thread in each of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false" if config.data.num_workers > 1 else "true")
    preprocess = config.data.preprocess
    scratch = emptied(target) / "scratch"
    scratch.mkdir()
    try:
        built = build(
            config,
            tokenizer,
            sources,
            max_seq_length=max_seq_length,
            directory=scratch,
            progress=lambda share: progress.at(share, "tokenizing"),
        )
        built.train.save_to_disk(str(target / "train"))
        if built.evaluation is not None:
            built.evaluation.save_to_disk(str(target / "eval"))
        if preprocess.chat_template is not None or preprocess.tokenizer_config:
            tokenizer.save_pretrained(str(target / "tokenizer"))
        summary = {
            "train_rows": len(built.train),
            "eval_rows": 0 if built.evaluation is None else len(built.evaluation),
            "train_tokens": built.train_tokens,
            "cut": built.cut,
            "left_out": built.left_out,
            "sources": [asdict(source) for source in built.sources],
        }
        (target / _SUMMARY).write_text(json.dumps(summary))
    finally:
        shutil.rmtree(scratch)


def _tell(summary: Mapping[str, Any], max_seq_length: int) -> None:
    for source in summary["sources"]:
        if source["used"] < source["rows"]:
            note(f"{source['path']}: {source['used']:,} of {source['rows']:,} rows are used")
    if summary["cut"]:
        note(f"{summary['cut']:,} samples are longer than {max_seq_length:,} tokens: their ends are cut off")
    if summary["left_out"]:
        note(f"{summary['left_out']:,} of those are left out, as nothing that is trained on is left of them")
    validation = f" and {summary['eval_rows']:,} for validation" if summary["eval_rows"] else ""
    note(f"{summary['train_rows']:,} samples with {summary['train_tokens']:,} tokens to train on{validation}")


if __name__ == "__main__":
    steps.run(main)
