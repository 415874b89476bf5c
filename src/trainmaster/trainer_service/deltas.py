"""Differences between two exports of the same model: bit for bit, and small where little has changed.

A delta holds, of every file that differs, the exclusive or with the same file of the base, compressed. A step of
training leaves most bits of most weights as they were, so that most of it is zeros.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

INDEX = "delta.json"
_SUFFIX = ".xor.zst"
_CHUNK = 16 << 20
_LEVEL = 3


class DeltaError(RuntimeError):
    """The delta does not belong to this base, or one of them is damaged."""


def write(whole: Path, base: Path, target: Path, *, of: dict[str, Any]) -> None:
    """Write what makes `whole` out of `base`.

    Args:
        whole: a directory of plain files.
        base: likewise; what it has not counts as empty.
        target: where the delta's files go.
        of: what the index says of the base.
    """
    files = {}
    for path in sorted(each for each in whole.rglob("*") if each.is_file()):
        name = path.relative_to(whole).as_posix()
        digest, changed = _write_file(path, base / name, target / f"{name}{_SUFFIX}")
        files[name] = {"size": path.stat().st_size, "sha256": digest, "changed": changed}
    (target / INDEX).write_text(json.dumps({"version": 1, "base": of, "files": files}, indent=1))


def base_of(delta: Path) -> dict[str, Any]:
    """What the index of a delta says of its base.

    Raises:
        DeltaError: this is no delta.
    """
    return dict(_index(delta)["base"])


def apply(delta: Path, base: Path, target: Path) -> None:
    """Make the whole again.

    Raises:
        DeltaError: what comes out is not what went in.
    """
    for name, said in _index(delta)["files"].items():
        if ".." in Path(name).parts or name.startswith("/"):
            raise DeltaError(f"{delta / INDEX}: {name!r} is no path inside a checkpoint")
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if said["changed"]:
                digest = _restore_file(delta / f"{name}{_SUFFIX}", base / name, path, size=said["size"])
            else:
                shutil.copyfile(base / name, path)
                digest = _digest(path)
        except OSError as error:
            raise DeltaError(f"{name} cannot be made from {base}: {error}") from error
        if digest != said["sha256"]:
            raise DeltaError(f"{name} is not what was saved: {base} is not the base of {delta}, or was changed")


def _write_file(path: Path, base: Path, target: Path) -> tuple[str, bool]:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, changed = hashlib.sha256(), not base.is_file() or base.stat().st_size != path.stat().st_size
    with open(target, "wb") as raw, zstandard.ZstdCompressor(level=_LEVEL).stream_writer(raw) as writer:
        for new, old in _pairs(path, base):
            digest.update(new)
            mixed = _xor(new, old)
            changed = changed or bool(mixed.any())
            writer.write(mixed.data)
    if not changed:
        target.unlink()
    return digest.hexdigest(), changed


def _restore_file(delta: Path, base: Path, target: Path, *, size: int) -> str:
    digest, written = hashlib.sha256(), 0
    with (
        open(delta, "rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw) as reader,
        open(target, "wb") as file,
    ):
        old_file = open(base, "rb") if base.is_file() else None  # noqa: SIM115 - there may be none
        try:
            # One byte more than was said is enough to know that it is another file.
            while written <= size and (mixed := reader.read(_CHUNK)):
                old = old_file.read(len(mixed)) if old_file is not None else b""
                new = _xor(mixed, old).data
                digest.update(new)
                written += file.write(new)
        except zstandard.ZstdError as error:
            raise DeltaError(f"{delta} is damaged: {error}") from error
        finally:
            if old_file is not None:
                old_file.close()
    return digest.hexdigest()


def _pairs(path: Path, base: Path) -> Iterator[tuple[bytes, bytes]]:
    with open(path, "rb") as file:
        if not base.is_file():
            while chunk := file.read(_CHUNK):
                yield chunk, b""
            return
        with open(base, "rb") as old:
            while chunk := file.read(_CHUNK):
                yield chunk, old.read(len(chunk))


def _xor(new: bytes, old: bytes) -> np.ndarray:
    mixed = np.frombuffer(new, dtype=np.uint8).copy()
    other = np.frombuffer(old, dtype=np.uint8)
    mixed[: len(other)] ^= other
    return mixed


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _index(delta: Path) -> dict[str, Any]:
    try:
        found = json.loads((delta / INDEX).read_bytes())
        if found["version"] != 1:
            raise DeltaError(f"{delta / INDEX}: of version {found['version']}, which this version does not know")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"{delta} is no delta: {error}") from error
    return dict(found)
