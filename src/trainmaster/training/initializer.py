"""The step of an initializer: `python -m trainmaster.training.initializer dataset`, or `model`.

Fills the directory that DATASET_PATH or MODEL_PATH names to the ranks with links into the account's cache.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.jobs import inputs
from trainmaster.protocol import environment
from trainmaster.training import steps
from trainmaster.training.fetching import hub, s3
from trainmaster.training.fetching.access import Access, initializer_access
from trainmaster.training.fetching.cache import Cache, emptied
from trainmaster.training.steps import InputError, OnProgress, PreparingError, PreparingProgress

_EXTRAS = {"huggingface": "hub", "s3": "s3", "cache": "cache"}

Files = Mapping[str, Path]
"""What was fetched: paths below the directory of the ranks, and where the files lie."""


def main(part: str) -> None:
    document = inputs.initializers()
    spec = document[part]
    uri = spec["storage_uri"]
    try:
        access = initializer_access(part, spec, document)
        progress = PreparingProgress({part: 1.0})
        progress.begin(part)
        began = time.monotonic()
        steps.doing(f"fetching {uri}")
        files = _fetch(part, spec, access, lambda share: progress.at(share, f"fetching {uri}"))
        _place(files, Path(os.environ[environment.PREPARED_DIR], part))
    except PreparingError as error:
        error.args = (f"{part}-initializer: {error}",)
        raise
    steps.note(f"{part}-initializer: {uri}: {steps.files_text(files.values())}, in {time.monotonic() - began:.1f} s")
    Cache(access.cache).forget_unused()
    progress.finish()


def _fetch(part: str, spec: Mapping[str, Any], access: Access, on_progress: OnProgress) -> Files:
    uri, ignored = spec["storage_uri"], spec.get("ignore_patterns") or ()
    if spec["type"] == "huggingface":
        return steps.try_again_while_unavailable(
            lambda: hub.repository(uri, part, access, on_progress, ignored=ignored)
        )
    if spec["type"] == "s3":
        return steps.try_again_while_unavailable(
            lambda: _files_below(
                s3.directory(uri, s3.in_role(spec.get("role_arn"), access), on_progress, ignored=ignored)
            )
        )
    from trainmaster.training.tables.shard_writer import ShardGang, sharded

    gang = ShardGang.of_environment()
    with gang.leading() if gang else contextlib.nullcontext():
        return steps.try_again_while_unavailable(
            lambda: _files_below(sharded(spec, s3.in_role(spec.get("iam_role"), access), on_progress, gang))
        )


def _place(files: Files, target: Path) -> None:
    """Fill a directory with links to files. An existing directory is emptied and kept: it may be a mount."""
    target.mkdir(parents=True, exist_ok=True)
    emptied(target)
    for name, path in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"the file {name!r} would lie outside of its directory")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(path)


def _files_below(directory: Path) -> Files:
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}


if __name__ == "__main__":
    chosen = sys.argv[1]
    kind = inputs.initializers()[chosen]["type"]
    steps.end_at_sigterm()
    steps.run(lambda: main(chosen), f"pip install 'trainmaster[{_EXTRAS[kind]}]'")
