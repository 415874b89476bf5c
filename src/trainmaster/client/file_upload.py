"""Uploads of the files that a job names and the server lacks, by content, once the server would accept the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from trainmaster.client.client import Client
from trainmaster.client.directories import files_below, kept_files
from trainmaster.client.errors import ApiError, UploadError
from trainmaster.client.local import running
from trainmaster.client.results import digest_of
from trainmaster.client.training_files import TRAINER, named_files, names_training, nothing_at, with_paths
from trainmaster.client.types import Submitted

MAX_FILES = 8192
"""What a server takes with one job."""
_REMEDY = "put it where the server finds it, and give its absolute path there, or an s3:// or http(s):// URL"


@dataclass(slots=True)
class JobUpload:
    """A job and the files that go along with it."""

    document: dict[str, Any]
    """With digests in the place of what it names here."""
    files: dict[str, Path] = field(default_factory=dict)
    """By their digests."""
    announcements: list[str] = field(default_factory=list)
    """Lines about what is sent of a training."""

    def add(self, path: Path, target: str) -> dict[str, Any]:
        try:
            digest, executable = digest_of(path), os.access(path, os.X_OK)
        except OSError as error:
            raise UploadError(f"cannot send {path}: {error.strerror}") from error
        self.files[digest] = path
        return {"path": target, "sha256": digest} | ({"executable": True} if executable else {})

    def send(self, client: Client, tell: Callable[[str], None]) -> None:
        for line in self.announcements:
            tell(line)
        for digest, path in self.files.items():
            try:
                client.upload_blob(path, sha256=digest)
            except OSError as error:
                raise UploadError(f"cannot send {path}: {error.strerror}") from error
            except ApiError as error:
                if error.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    raise
                raise UploadError(f"cannot send {path}: {error.message}; {_REMEDY}") from error


def upload_files(
    client: Client,
    document: Mapping[str, Any],
    base: Path,
    *,
    weights: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Upload the files that a job names; returns its document with digests in their place. Otherwise as `submit`."""
    upload = pack(client, document, base, weights=weights)
    upload.send(client, tell)
    return upload.document


def submit(
    client: Client, document: Mapping[str, Any], base: Path, *, tell: Callable[[str], None] = lambda _: None
) -> Submitted:
    """Submit a job with the files that it names: `pack` says which. What the server would refuse is not uploaded.

    `tell` is called with a line about what is sent of a training. Raises ShippingError if a file cannot be sent.
    """
    upload = pack(client, document, base)
    # Where others are missing, which the document names by their digests, the submission says so.
    if upload.files and upload.files.keys() >= set(client.validate(upload.document)["missing_blobs"]):
        upload.send(client, tell)
    return client.submit(upload.document)


def pack(client: Client, document: Mapping[str, Any], base: Path, *, weights: bool = True) -> JobUpload:
    """Find what the job names and the server does not have.

    - `workload.files[].source`: a local file, or a directory of which goes what git would keep, relative to `base`;
      `path` is where it goes (by default the same relative path).
    - `workload.path` of a script that exists relative to `base` and is not among the files: sent along.
    - the modules of a job class that lie in `base`, as files or as packages: likewise.
    - what a training names relative to `base` (data, models, tokenizers, its own script): made absolute where the
      local server reads it, and sent otherwise.

    With `weights` false, those of a training's model stay here: who looks at data needs the tokenizer alone.
    Raises ShippingError if a file is not there, or cannot be read.
    """
    upload = JobUpload(dict(document))
    if names_training(document):
        _pack_training(upload, client, base, weights=weights)
    workload = upload.document.get("workload")
    if not isinstance(workload, Mapping):
        return upload
    files: list[Any] = []
    for index, entry in enumerate(_entries(workload)):
        named = isinstance(entry, Mapping) and "source" in entry
        files += _packed(upload, entry, base, f"workload.files[{index}]") if named else [entry]
    changed = {**workload, "files": files} if files else {**workload}
    if (script := _local_script(workload, base, files)) is not None:
        # The server takes plain paths inside the working directory; what lies elsewhere here goes by its name.
        target = script.name if ".." in script.parts else script.as_posix()
        changed |= {"path": target, "files": [*files, upload.add(base / script, target)]}
    if modules := list(_modules(upload, workload, base, files)):
        changed |= {"files": [*files, *modules]}
    upload.document["workload"] = changed
    return upload


def _pack_training(upload: JobUpload, client: Client, base: Path, *, weights: bool) -> None:
    document = upload.document
    here = running()
    readable = here.data_roots if here is not None and here.url == client.url else ()
    if readable and not _runs_here(client, document):
        readable = ()
    workload = document.get("workload") or {"kind": TRAINER}
    declared = {
        str(entry.get("path", entry.get("source"))).rstrip("/")
        for entry in _entries(workload)
        if isinstance(entry, Mapping)
    }
    paths: dict[tuple[str | int, ...], str] = {}
    files: dict[str, dict[str, Any]] = {}
    for each in named_files(document, base):
        named = each if weights else each.without_weights()
        if any(named.target == path or named.target.startswith(f"{path}/") for path in declared):
            continue
        if any(Path(os.path.realpath(named.path)).is_relative_to(os.path.realpath(root)) for root in readable):
            paths[named.place] = str(named.path)
            continue
        if len(named.files) > MAX_FILES:
            raise UploadError(f"{named.field}: has {len(named.files)} files, at most {MAX_FILES} go along; {_REMEDY}")
        count = f"{len(named.files)} files, " if len(named.files) > 1 else ""
        total = sum(path.stat().st_size for path, _ in named.files)
        upload.announcements.append(f"Sends {named.target} ({count}{_size(total)})")
        paths[named.place] = named.target
        files |= {target: upload.add(path, target) for path, target in named.files}
    upload.document = with_paths(document, paths)
    if files:
        upload.document["workload"] = {**workload, "files": [*_entries(workload), *files.values()]}


def _runs_here(client: Client, document: Mapping[str, Any]) -> bool:
    """Whether the job's backend sees the files of its server; also if there is no such backend, which is refused."""
    name = document.get("backend")
    backends = client.cluster.backends()
    return next((each["here"] for each in backends if each["name"] == name or (name is None and each["default"])), True)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _entries(workload: Mapping[str, Any]) -> list[Any]:
    files = workload.get("files", [])
    return files if isinstance(files, list) else []


def _packed(upload: JobUpload, entry: Mapping[str, Any], base: Path, field: str) -> Iterator[dict[str, Any]]:
    source = str(entry["source"])
    local = base / Path(source).expanduser()
    if "sha256" in entry:
        raise UploadError(f"{field}: give a source or a sha256, not both")
    if "path" not in entry and (os.path.isabs(source) or ".." in Path(source).parts):
        raise UploadError(f"{field}: say with `path` where {source} goes in the working directory")
    target = PurePosixPath(str(entry.get("path", source)))
    rest = {key: value for key, value in entry.items() if key not in ("source", "path")}
    if not local.is_dir():
        yield upload.add(local, str(target)) | rest
        return
    try:
        names = kept_files(local)
    except ValueError as error:
        raise UploadError(f"{field}: {error}") from error
    for name in names:
        yield upload.add(local / name, str(target / name)) | rest


def _local_script(workload: Mapping[str, Any], base: Path, files: list[Any]) -> Path | None:
    path = workload.get("path")
    if workload.get("kind") != "script" or not isinstance(path, str) or os.path.isabs(path):
        return None
    if workload.get("working_directory") is not None:
        return None
    if any(isinstance(file, Mapping) and file.get("path") == path for file in files):
        return None
    if not (base / path).is_file():
        raise UploadError(nothing_at("workload.path", path, base) + " and among workload.files" * bool(files))
    return Path(path)


def _modules(upload: JobUpload, workload: Mapping[str, Any], base: Path, files: list[Any]) -> Iterator[dict[str, Any]]:
    """The modules, or the packages around them, that a job class is imported from and that lie here."""
    if workload.get("kind") != "job_class" or workload.get("working_directory") is not None:
        return
    named = (str(workload.get("target", "")).rpartition(":")[0], str(workload.get("module") or ""))
    shipped = {str(file.get("path")).partition("/")[0] for file in files if isinstance(file, Mapping)}
    for top in dict.fromkeys(name.partition(".")[0] for name in named):
        if not top or {top, f"{top}.py"} & shipped:
            continue
        if (base / f"{top}.py").is_file():
            yield upload.add(base / f"{top}.py", f"{top}.py")
        elif (base / top).is_dir():
            for file in files_below(base / top):
                yield upload.add(file, file.relative_to(base).as_posix())
