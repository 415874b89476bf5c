"""Makes everything that a job names local: its base model, its tokenizer and the files of its data sources.

What was fetched is kept in the account's cache on this machine, and fetched again only when it changed.
"""

from __future__ import annotations

from pathlib import Path

from trainmaster.training.data.config import DataConfig, LocalSource
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.models import fetch_config, fetch_model, fetch_tokenizer, left_to_the_script
from trainmaster.training.fetching.sources import fetch_source
from trainmaster.training.steps import Progress, note, size_text

__all__ = [
    "Access",
    "fetch_config",
    "fetch_model",
    "fetch_source",
    "fetch_sources",
    "fetch_tokenizer",
    "left_to_the_script",
    "tell_model",
]


def fetch_sources(config: DataConfig, access: Access, progress: Progress) -> list[LocalSource]:
    """Bring all sources of a job here, one after another.

    Raises:
        PreparingError: one of them cannot be had.
    """
    found = []
    for number, source in enumerate(config.sources):

        def tell(share: float, number: int = number, path: str = source.path) -> None:
            progress.at((number + share) / len(config.sources), f"fetching {path}")

        local = fetch_source(source, access, tell)
        size = size_text(sum(file.stat().st_size for file in local.files))
        count = f"{len(local.files)} files" if len(local.files) > 1 else "1 file"
        note(f"{local.path}: {count} of {local.format}, {size}")
        found.append(local)
    progress.at(1.0)
    return found


def tell_model(model_id: str, directory: Path, access: Access) -> None:
    """Say which model was fetched; one that was on this machine already is no news."""
    if directory.is_relative_to(access.cache):
        files = [path for path in directory.rglob("*") if path.is_file()]
        size = size_text(sum(file.stat().st_size for file in files))
        note(f"{model_id}: {len(files)} files, {size}")
