"""Reads checkpoints that theseus wrote: an Orbax tree, with metadata, identity and configuration as files beside it.

    PATH/checkpoint/    the tree; Orbax renames it to this name when it is complete
    PATH/config.json    the metadata
    PATH/job.json       name, project, group and the tracker's id
    PATH/config.yaml    the whole configuration

Its `rng.npy` is a pickle and is not read: random-number generators are left as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainmaster.jobs.objects import S3_SCHEME
from trainmaster.jobs.roots import Root

_TREE = "checkpoint"
METADATA = "config.json"


def directory_of(root: Root, path: str) -> Path | None:
    """The directory of a complete checkpoint of this kind; None where there is none."""
    if root.uri.startswith(S3_SCHEME):
        return None
    directory = Path(root.locate(path))
    complete = (directory / _TREE).is_dir() and (directory / METADATA).is_file()
    return directory if complete else None


def metadata(directory: Path) -> dict[str, Any]:
    """What the caller gave beside the tree."""
    found: dict[str, Any] = json.loads((directory / METADATA).read_text())
    return found


def tree(directory: Path, template: Any, *, partial: bool) -> Any:
    """The tree, in arrays like those of the template, on its devices. Collective where there are several processes.

    Raises:
        ValueError: the tree does not fit the template.
    """
    from trainmaster.jobs.trees import jax_arrays

    return jax_arrays.read_tree(directory / _TREE, template, partial=partial)
