"""The base model and its tokenizer as directories on this machine; archives are unpacked safely."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlencode

from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.training.sources import ModelSource, model_source, scheme_of
from trainmaster.training.fetching import http, hub, s3
from trainmaster.training.fetching.access import Access, left_directory, local_path
from trainmaster.training.fetching.cache import Cache, emptied, key_of
from trainmaster.training.steps import InputError, OnProgress, PreparingError, ignore_progress

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
_TIMES_UNPACKED = 8
"""What an archive may unpack to for a check, in times of what of it is fetched at most."""
ADAPTER_MARK = "adapter_config.json"
_TOKENIZER_MARKS = ("tokenizer_config.json", "tokenizer.json")


def fetch_model(base_model: BaseModelConfig, access: Access, on_progress: OnProgress = ignore_progress) -> Path:
    name = base_model.model_id
    source = model_source(name, base_model.source)
    if source is ModelSource.HUGGINGFACE:
        with _named_on_the_hub(name, access):
            return hub.model(name.removeprefix("hf://"), base_model.revision, access, on_progress)
    return _directory(name, source, base_model.revision, access, on_progress, MARK)


def fetch_tokenizer(name: str, base_model: BaseModelConfig | None, access: Access) -> Path:
    """The directory of a tokenizer; where it has the base model's name, of that model without its weights."""
    same = base_model is not None and name == base_model.model_id
    revision = base_model.revision if base_model and same else None
    source = model_source(name, base_model.source if base_model and same else None)
    if source is ModelSource.HUGGINGFACE:
        with _named_on_the_hub(name, access):
            directory = hub.tokenizer(name.removeprefix("hf://"), revision, access)
    else:
        directory = _directory(name, source, revision, access, ignore_progress, None)
    if not any((directory / mark).is_file() for mark in _TOKENIZER_MARKS):
        raise InputError(f"{name} holds no tokenizer ({' or '.join(_TOKENIZER_MARKS)}); name one with tokenizer_id")
    return directory


def fetch_config(base_model: BaseModelConfig, access: Access) -> Path | None:
    """The directory with a base model's configuration, without its weights; None where it cannot be fetched alone."""
    try:
        # The configuration comes with the tokenizer.
        return fetch_tokenizer(base_model.model_id, base_model, access)
    except PreparingError:
        return None


def adapter_error(shown: str) -> InputError:
    return InputError(
        f"{shown} is an adapter; name the model that it belongs to, or merge it into that one before: a LORA with "
        "output_config.merge_lora leaves the whole model"
    )


def left_to_the_script(base_model: BaseModelConfig) -> bool:
    """Whether a CUSTOM script loads the model itself: its id is a mere name, and no source is given."""
    name = base_model.model_id
    return not base_model.source and scheme_of(name) is None and model_source(name) is ModelSource.HUGGINGFACE


@contextlib.contextmanager
def _named_on_the_hub(name: str, access: Access) -> Iterator[None]:
    """Tell a mistyped path from a name on the Hub: both are written `models/tiny`. Errors say where it was sought."""
    first, slash, _ = name.partition("/")
    if scheme_of(name) is not None or not slash:
        yield
        return
    if (access.working_directory / first).is_dir():
        place = access.working_directory / name
        if place.is_dir():
            raise InputError(f"{name} is a directory of this job, and a name on the Hub; write ./{name} or hf://{name}")
        raise InputError(
            f"{name}: there is no such file or directory; looked in {access.working_directory}. If a model of the Hub "
            f"is meant, write hf://{name}"
        )
    try:
        yield
    except InputError as error:
        below = [root / name for root in access.data_roots or () if (root / name).is_dir()]
        if below:
            raise InputError(f"{error}; but there is {below[0]}: name it by its whole path") from error
        looked = ", ".join(map(str, (access.working_directory, *(access.data_roots or ()))))
        raise InputError(f"{error}; nor is there such a directory in {looked}") from error


def _directory(
    name: str, source: ModelSource, revision: str | None, access: Access, on_progress: OnProgress, mark: str | None
) -> Path:
    match source:
        case ModelSource.LOCAL:
            directory = local_path(name, access)
            if not directory.is_dir():
                raise InputError(f"{name} is not a directory; expected one of a model, as save_pretrained writes it")
        case ModelSource.ARTIFACTS:
            directory = left_directory(name, access)
        case ModelSource.S3 if not name.endswith(_ARCHIVES):
            directory = s3.directory(name if scheme_of(name) else f"s3://{name}", access, on_progress)
        case _:
            return _unpacked(name, source, revision, access, on_progress, mark)
    if mark is not None and not (directory / mark).is_file():
        if (directory / ADAPTER_MARK).is_file():
            raise adapter_error(name)
        raise InputError(f"{name} holds no {mark}; expected the directory of a model, as save_pretrained writes it")
    return directory


def _unpacked(
    name: str, source: ModelSource, revision: str | None, access: Access, on_progress: OnProgress, mark: str | None
) -> Path:
    match source:
        case ModelSource.S3:
            uri = name if scheme_of(name) else f"s3://{name}"
            shown, fetched = name, s3.fetch(uri, s3.find(uri, access), access, on_progress)[0]
        case ModelSource.SCAIATLAS:
            path = name if scheme_of(name) else f"scaiatlas://{name}"
            query = f"?{urlencode({'revision': revision})}" if revision else ""
            target = http.service_target("scaiatlas", path, access, query)
            shown, fetched = path, http.download(target, access, on_progress)
        case _:
            target = http.target_of(name if scheme_of(name) else f"https://{name}")
            shown, fetched = target.shown, http.download(target, access, on_progress)
    if not fetched.whole:
        raise InputError(f"{shown} is too large to be unpacked for a check; name the tokenizer with tokenizer_id")
    cache = Cache(access.cache)
    key = key_of("archive", cache.digest(fetched.path))
    most_bytes = None if access.beginning_bytes is None else _TIMES_UNPACKED * access.beginning_bytes
    directory = cache.entry(
        "models", key, lambda draft: unpack(fetched.path, emptied(draft), shown, most_bytes=most_bytes)
    )
    return checkpoint_in(directory, shown, mark or MARK)


# Archives: nothing is unpacked outside the directory, and no link inside leads out of it.

MAX_FILES = 100_000
MARK = "config.json"


def unpack(archive: Path, directory: Path, shown: str, *, most_bytes: int | None = None) -> None:
    """Unpack a tar (compressed or not) or zip archive. Raises InputError where it is broken, or unpacks to too much."""
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, directory, _Allowance(directory, shown, most_bytes))
        elif tarfile.is_tarfile(archive):
            _untar(archive, directory, _Allowance(directory, shown, most_bytes))
        else:
            raise InputError(f"{shown} is not an archive; expected .tar, .tar.gz or .zip of a model's directory")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{shown}: the archive cannot be read: {error}") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"{shown}: the archive names {Path(error.filename).name} twice") from error


def checkpoint_in(directory: Path, shown: str, mark: str = MARK) -> Path:
    """The checkpoint in an unpacked archive: at its top, or in its only directory. Raises InputError."""
    found = sorted(path.parent for path in directory.rglob(mark))
    if not found:
        raise InputError(f"{shown} holds no {mark}; expected the directory of a model, as save_pretrained writes it")
    top = min(found, key=lambda path: len(path.parts))
    if sum(len(path.parts) == len(top.parts) for path in found) > 1:
        raise InputError(f"{shown} holds several models; pack one alone")
    return top


def _untar(archive: Path, directory: Path, allowance: _Allowance) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            allowance.take(member.name, member.size, plain=member.isfile() or member.isdir())
            if member.isdir():
                continue
            source = opened.extractfile(member)
            if source is not None:
                with source:
                    _write(directory / member.name, source)


def _unzip(archive: Path, directory: Path, allowance: _Allowance) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            allowance.take(member.filename, member.file_size, plain=member.is_dir() or kind in (0, stat.S_IFREG))
            if member.is_dir():
                continue
            with opened.open(member) as source:
                _write(directory / member.filename, source)


class _Allowance:
    """Limits of an archive. It cannot unpack to more than the sizes that it declares: both readers stop there."""

    def __init__(self, directory: Path, shown: str, most_bytes: int | None) -> None:
        self._directory = directory
        self._shown = shown
        self._most_bytes = most_bytes
        self._files = self._bytes = 0

    def take(self, name: str, size: int, *, plain: bool) -> None:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise InputError(f"{self._shown}: {name!r} would be unpacked outside of its directory")
        if not plain:
            raise InputError(f"{self._shown}: {name} is not a plain file; links and devices are not unpacked")
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES:
            raise InputError(f"{self._shown} holds more than {MAX_FILES} files")
        if self._most_bytes is not None and self._bytes > self._most_bytes:
            raise InputError(
                f"{self._shown} is too large to be unpacked for a check ({self._most_bytes >> 20} MiB); name the "
                "tokenizer with tokenizer_id"
            )
        free = shutil.disk_usage(self._directory).free
        if size > free:
            raise OSError(
                errno.ENOSPC, f"No space left on device: {name} of {self._shown} has {size} bytes, and {free} are free"
            )


def _write(path: Path, source: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644)) as file:
        shutil.copyfileobj(source, file, 1 << 20)
