"""Files that a job names and the server does not have: sent by content, before the job is submitted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.sdk.client import Client
from trainmaster.sdk.errors import ApiError, ShippingError
from trainmaster.sdk.local import running
from trainmaster.sdk.training_files import TRAINER, Named, named_files, names_training, with_paths

LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"})
"""Directories that nobody means when they ship the one around them."""
MAX_FILES = 8192
"""What a server takes with one job."""
_REMEDY = "put it where the server finds it, and give its absolute path there, or an s3:// or http(s):// URL"


def ship(
    client: Client,
    document: Mapping[str, Any],
    base: Path,
    *,
    weights: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Upload what the job names and the server does not have; returns the document with digests in the place of that.

    - `workload.files[].source`: a local file or a directory, relative to `base`; `path` is where it goes (by default
      the same relative path).
    - `workload.path` of a script that exists relative to `base` and is not among the files: sent along.
    - the modules of a job class that lie in `base`, as files or as packages: likewise.

    - what a training names relative to `base` (data, models, tokenizers, its own script): made absolute for the local
      server, and sent to any other.

    `tell` is called with a line about what is sent of a training. With `weights` false, those of its model stay here:
    who looks at data needs the tokenizer alone.

    Raises:
        ShippingError: a file is not there, or cannot be read or sent.
    """
    if names_training(document):
        document = _with_training(client, document, base, tell, weights=weights)
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
    modules = [file for name in _local_modules(workload, files) for file in _module(client, base, name)]
    if modules:
        changed |= {"files": [*files, *modules]}
    return {**document, "workload": changed}


def _with_training(
    client: Client, document: Mapping[str, Any], base: Path, tell: Callable[[str], None], *, weights: bool
) -> dict[str, Any]:
    here = running()
    on_this_machine = here is not None and here.url == client.url
    workload = document.get("workload") or {"kind": TRAINER}
    declared = {str(entry.get("path", entry.get("source"))).rstrip("/") for entry in _mappings(_entries(workload))}
    paths: dict[tuple[str | int, ...], str] = {}
    files: dict[str, dict[str, Any]] = {}
    for each in named_files(document, base):
        named = each if weights else each.without_weights()
        if any(named.target == path or named.target.startswith(f"{path}/") for path in declared):
            continue
        # The local server lets jobs read what lies in the user's home, unless it was told otherwise.
        if on_this_machine and named.path.is_relative_to(Path.home()):
            paths[named.place] = str(named.path)
            continue
        if len(named.files) > MAX_FILES:
            raise ShippingError(f"{named.field}: has {len(named.files)} files, at most {MAX_FILES} go along; {_REMEDY}")
        tell(_announcement(named))
        paths[named.place] = named.target
        files |= {target: _upload(client, path, target) for path, target in named.files}
    changed = with_paths(document, paths)
    if files:
        changed["workload"] = {**workload, "files": [*_entries(workload), *files.values()]}
    return changed


def _announcement(named: Named) -> str:
    count = f"{len(named.files)} files, " if len(named.files) > 1 else ""
    total = sum(path.stat().st_size for path, _ in named.files)
    return f"Sends {named.target} ({count}{_size(total)})"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _mappings(entries: list[Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if isinstance(entry, Mapping)]


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


def _local_modules(workload: Mapping[str, Any], files: list[Any]) -> list[str]:
    """The modules, or the packages around them, that a job class is imported from and that lie here."""
    if workload.get("kind") != "job_class" or workload.get("working_directory") is not None:
        return []
    named = (str(workload.get("target", "")).rpartition(":")[0], str(workload.get("module") or ""))
    shipped = {str(file.get("path")).partition("/")[0] for file in files if isinstance(file, Mapping)}
    tops = dict.fromkeys(name.partition(".")[0] for name in named if name)
    return [top for top in tops if top and not {top, f"{top}.py"} & shipped]


def _module(client: Client, base: Path, name: str) -> Iterator[dict[str, Any]]:
    if (base / f"{name}.py").is_file():
        yield _upload(client, base / f"{name}.py", f"{name}.py")
    elif (base / name).is_dir():
        for file in _files_below(base / name):
            yield _upload(client, file, file.relative_to(base).as_posix())


def _upload(client: Client, path: Path, target: str) -> dict[str, Any]:
    try:
        digest = client.upload_blob(path)
        executable = os.access(path, os.X_OK)
    except OSError as error:
        raise ShippingError(f"cannot send {path}: {error.strerror}") from error
    except ApiError as error:
        if error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise
        raise ShippingError(f"cannot send {path}: {error.message}; {_REMEDY}") from error
    return {"path": target, "sha256": digest} | ({"executable": True} if executable else {})
