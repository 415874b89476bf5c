"""The preparing step of a built-in trainer: `python -m trainmaster.training.prepare`.

Fetches the model and the data, and makes the token sequences that the ranks train on. They are kept in the account's
cache under a key of everything that they depend on: another attempt, or another job with the same data, finds them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from trainmaster.jobs import inputs
from trainmaster.training import steps
from trainmaster.training.data.config import DataConfig, LocalSource
from trainmaster.training.data.tokenizers import load_tokenizer, sample_length
from trainmaster.training.errors import InputError
from trainmaster.training.fetching import Access, fetch_model, fetch_sources, fetch_tokenizer, tell_model
from trainmaster.training.fetching.cache import Cache, emptied, key_of
from trainmaster.training.fetching.hub import TOKENIZER_PATTERNS
from trainmaster.training.fetching.models import ADAPTER_MARK, adapter_error
from trainmaster.training.steps import Progress, note, say

_FORM = 3
"""Of what is kept: another number, and nothing that is kept is taken any more."""
_SUMMARY = "summary.json"
_PART_BYTES = 1 << 20


def main() -> None:
    """Prepare the job of this process's environment."""
    document = inputs.training()
    config = DataConfig.from_document(document)
    base_model = document["training_config"]["base_model"]
    access = Access.from_environ(os.environ)
    if (handed := steps.handed_over()) is not None:
        fetched, progress = _Fetched.from_json(handed), Progress(done=("model", "data"))
    else:
        progress = Progress()
        fetched = _fetch(config, base_model, access, progress)
        if base_model.get("trust_remote_code"):
            steps.go_on_without_credentials("trainmaster.training.prepare", fetched.to_json())
    model, tokenizer, sources = fetched.model, fetched.tokenizer, fetched.sources
    progress.begin("tokens")
    length = sample_length(config.max_seq_length, model, tokenizer, model_kwargs=base_model.get("model_kwargs"))
    cache = Cache(access.cache)
    key = rows_key(config, sources, tokenizer, length, cache)
    work = _Work(document, config, sources, tokenizer, length, progress)
    entry = cache.entry("prepared", key, work.make)
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
            "sources": [source.to_json() for source in sources],
        }
    )
    cache.forget_unused()
    progress.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """What rows of tokens are made of, on this machine."""

    model: Path
    tokenizer: Path
    sources: Sequence[LocalSource]

    def to_json(self) -> dict[str, Any]:
        sources = [source.to_json() for source in self.sources]
        return {"model": str(self.model), "tokenizer": str(self.tokenizer), "sources": sources}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        return cls(
            model=Path(document["model"]),
            tokenizer=Path(document["tokenizer"]),
            sources=[LocalSource.from_json(source) for source in document["sources"]],
        )


def _fetch(config: DataConfig, base_model: Mapping[str, Any], access: Access, progress: Progress) -> _Fetched:
    """Everything that takes credentials. Nothing here runs code that comes with a model."""
    progress.begin("model")
    model = fetch_model(base_model, access, lambda share: progress.at(share, "fetching the model"))
    _require_plain_weights(model, base_model["model_id"])
    named = config.preprocess.tokenizer_id or base_model.get("tokenizer_id")
    tokenizer = fetch_tokenizer(base_model, named, access) if named else model
    tell_model(base_model["model_id"], model, access)
    progress.begin("data")
    return _Fetched(model=model, tokenizer=tokenizer, sources=fetch_sources(config, access, progress))


def rows_key(
    config: DataConfig, sources: Sequence[LocalSource], tokenizer: Path, max_seq_length: int, cache: Cache
) -> str:
    """A key of everything that decides which tokens a job trains on, in which order."""
    return key_of(
        _FORM,
        {name: version(name) for name in ("transformers", "tokenizers", "jinja2", "trl")},
        max_seq_length,
        {
            **asdict(config),
            "num_workers": None,
            "sources": [
                {**asdict(source), "path": None, "type": None, "split": local.slices, "format": local.format}
                for source, local in zip(config.sources, sources, strict=True)
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
    """A key of a model's weights. To read all of them would take long: it is made of parts of each file."""
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
    """See that loading the model runs nothing and leads nowhere else."""
    if (model / ADAPTER_MARK).exists():
        # transformers would load the model that it was made for, wherever that lies.
        raise adapter_error(shown)
    if not any(model.glob("*.safetensors")):
        raise InputError(
            f"{shown} has no weights in *.safetensors, and built-in trainers load no pickles (*.bin); load it where "
            "you trust it, and write it anew with save_pretrained"
        )


class _Work:
    """Makes one entry of the cache."""

    def __init__(
        self,
        document: Mapping[str, Any],
        config: DataConfig,
        sources: Sequence[LocalSource],
        tokenizer: Path,
        max_seq_length: int,
        progress: Progress,
    ) -> None:
        self._document = document
        self._config = config
        self._sources = sources
        self._tokenizer = tokenizer
        self._max_seq_length = max_seq_length
        self._progress = progress

    def make(self, target: Path) -> None:
        """Build the datasets, and save them with what the ranks need to read them."""
        from trainmaster.training.data.dataset import build

        say("reading and tokenizing rows")
        # Worker processes are forked from this one, and rows are tokenized in one thread in each of them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false" if self._config.num_workers > 1 else "true")
        preprocess = self._config.preprocess
        trusted = bool(self._document["training_config"]["base_model"].get("trust_remote_code"))
        tokenizer = load_tokenizer(self._tokenizer, preprocess, trust_remote_code=trusted)
        scratch = emptied(target) / "scratch"
        scratch.mkdir()
        try:
            built = build(
                self._document,
                tokenizer,
                self._sources,
                max_seq_length=self._max_seq_length,
                directory=scratch,
                progress=lambda share: self._progress.at(share, "tokenizing"),
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
    """Say what the ranks will train on, and what was left out on the way."""
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
