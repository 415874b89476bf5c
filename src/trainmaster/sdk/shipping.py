"""Files that a job names and the server does not have: sent by content, before the job is submitted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.sdk.client import Client
from trainmaster.sdk.errors import ShippingError

LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"})
"""Directories that nobody means when they ship the one around them."""


def ship(client: Client, document: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Upload what the job's workload names; returns the document with digests in the place of local names.

    - `workload.files[].source`: a local file or a directory, relative to `base`; `path` is where it goes (by default
      the same relative path).
    - `workload.path` of a script that exists relative to `base` and is not among the files: sent along.

    Raises:
        ShippingError: a file is not there, or cannot be read.
    """
    workload = document.get("workload")
    if not isinstance(workload, Mapping):
        return dict(document)
    files: list[Any] = []
    for index, entry in enumerate(_entries(workload)):
        if isinstance(entry, Mapping) and "source" in entry:
            files += _shipped(client, entry, base, f"workload.files[{index}]")
        else:
            files.append(entry)
    changed = {**workload, "files": files} if files else {**workload}
    script = _local_script(workload, base, files)
    if script is not None:
        # The server takes plain paths inside the working directory; what lies elsewhere here goes by its name.
        target = script.name if ".." in script.parts else script.as_posix()
        changed |= {"path": target, "files": [*files, _upload(client, base / script, target)]}
    return {**document, "workload": changed}


def _entries(workload: Mapping[str, Any]) -> list[Any]:
    files = workload.get("files", [])
    return files if isinstance(files, list) else []


def _shipped(client: Client, entry: Mapping[str, Any], base: Path, field: str) -> Iterator[dict[str, Any]]:
    source = str(entry["source"])
    local = base / Path(source).expanduser()
    if "sha256" in entry:
        raise ShippingError(f"{field}: give a source or a sha256, not both")
    if "path" not in entry and (os.path.isabs(source) or ".." in Path(source).parts):
        raise ShippingError(f"{field}: say with `path` where {source} goes in the working directory")
    target = PurePosixPath(str(entry.get("path", source)))
    rest = {key: value for key, value in entry.items() if key not in ("source", "path")}
    if not local.is_dir():
        yield _upload(client, local, str(target)) | rest
        return
    for file in _files_below(local):
        yield _upload(client, file, str(target / file.relative_to(local).as_posix())) | rest


def _files_below(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(set(directories) - LEFT_OUT)
        for path in (Path(parent, name) for name in sorted(names)):
            # A link that leads nowhere is an error; a socket or a pipe is nothing to ship.
            if path.is_file() or path.is_symlink():
                yield path


def _local_script(workload: Mapping[str, Any], base: Path, files: list[Any]) -> Path | None:
    path = workload.get("path")
    if workload.get("kind") != "script" or not isinstance(path, str) or os.path.isabs(path):
        return None
    if workload.get("working_directory") is not None or not (base / path).is_file():
        return None
    return None if any(isinstance(file, Mapping) and file.get("path") == path for file in files) else Path(path)


def _upload(client: Client, local: Path, target: str) -> dict[str, Any]:
    try:
        digest = client.upload_blob(local)
        executable = os.access(local, os.X_OK)
    except OSError as error:
        raise ShippingError(f"cannot send {local}: {error.strerror}") from error
    return {"path": target, "sha256": digest} | ({"executable": True} if executable else {})
