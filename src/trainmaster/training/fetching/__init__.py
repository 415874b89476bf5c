"""Brings what a job names to this machine: base model, tokenizer, and the files of its data sources.

What was fetched stays in the account's cache, and is fetched again only when it changed.
"""

from __future__ import annotations

from pathlib import Path

from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataConfig
from trainmaster.training.document import LocalSource
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.models import fetch_config, fetch_model, fetch_tokenizer
from trainmaster.training.fetching.sources import fetch_source
from trainmaster.training.steps import Progress, note, size_text

__all__ = [
    "Access",
    "fetch_config",
    "fetch_model",
    "fetch_named_model",
    "fetch_named_tokenizer",
    "fetch_source",
    "fetch_sources",
    "fetch_tokenizer",
]


def fetch_named_model(base_model: BaseModelConfig, access: Access, progress: Progress) -> Path:
    model = fetch_model(base_model, access, lambda share: progress.at(share, "fetching the model"))
    if model.is_relative_to(access.cache):  # one that was on this machine already is no news
        files = [path for path in model.rglob("*") if path.is_file()]
        note(f"{base_model.model_id}: {len(files)} files, {size_text(sum(file.stat().st_size for file in files))}")
    return model


def fetch_named_tokenizer(data: DataConfig, base_model: BaseModelConfig, access: Access) -> Path | None:
    """The tokenizer that a job names beside its base model; None where it names none."""
    name = data.preprocess.tokenizer_id or base_model.tokenizer_id
    return fetch_tokenizer(name, base_model, access) if name else None


def fetch_sources(data: DataConfig, access: Access, progress: Progress) -> list[LocalSource]:
    """Raises PreparingError where a source cannot be fetched."""
    found = []
    for number, source in enumerate(data.sources):

        def tell(share: float, number: int = number, path: str = source.path) -> None:
            progress.at((number + share) / len(data.sources), f"fetching {path}")

        local = fetch_source(source, access, tell)
        size = size_text(sum(file.stat().st_size for file in local.files))
        count = f"{len(local.files)} files" if len(local.files) > 1 else "1 file"
        note(f"{local.path}: {count} of {local.format}, {size}")
        found.append(local)
    progress.at(1.0)
    return found
