"""Differences between two exports of a model: of each file the exclusive or with the base's, compressed.

A step of training leaves most bits of most weights as they were, so that most of it is zeros.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trainmaster.engine.types import EngineError

DELTA_INDEX = "delta.json"
_DELTA_SUFFIX = ".xor.zst"
_CHUNK_BYTES = 16 << 20
_ZSTD_LEVEL = 3


class DeltaError(RuntimeError):
    """The delta does not belong to this base, or one of them is damaged."""


def write_delta(whole: Path, base: Path, target: Path, *, of: dict[str, Any]) -> None:
    """Write to `target` what makes `whole` out of `base`; `of` describes the base in the index."""
    files = {}
    for path in sorted(each for each in whole.rglob("*") if each.is_file()):
        name = path.relative_to(whole).as_posix()
        digest, changed = _write_file(path, base / name, target / f"{name}{_DELTA_SUFFIX}")
        files[name] = {"size": path.stat().st_size, "sha256": digest, "changed": changed}
    (target / DELTA_INDEX).write_text(json.dumps({"version": 1, "base": of, "files": files}, indent=1))


def base_of_delta(delta: Path) -> dict[str, Any]:
    """Raises DeltaError where this is no delta."""
    return dict(_delta_index(delta)["base"])


def apply_delta(delta: Path, base: Path, target: Path) -> None:
    """Make the whole again in `target`. Raises DeltaError where it is not what was saved."""
    for name, said in _delta_index(delta)["files"].items():
        if ".." in Path(name).parts or name.startswith("/"):
            raise DeltaError(f"{delta / DELTA_INDEX}: {name!r} is no path inside a checkpoint")
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if said["changed"]:
                digest = _restore_file(delta / f"{name}{_DELTA_SUFFIX}", base / name, path, size=said["size"])
            else:
                shutil.copyfile(base / name, path)
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DeltaError(f"{name} cannot be made from {base}: {error}") from error
        if digest != said["sha256"]:
            raise DeltaError(f"{name} is not what was saved: {base} is not the base of {delta}, or was changed")


def _write_file(path: Path, base: Path, target: Path) -> tuple[str, bool]:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, changed = hashlib.sha256(), not base.is_file() or base.stat().st_size != path.stat().st_size
    with (
        open(path, "rb") as file,
        _open_if_there(base) as old,
        open(target, "wb") as raw,
        zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(raw) as writer,
    ):
        while new := file.read(_CHUNK_BYTES):
            digest.update(new)
            mixed = _xor(new, old.read(len(new)))
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
        _open_if_there(base) as old,
        open(target, "wb") as file,
    ):
        try:
            # One byte more than was said is enough to know that it is another file.
            while written <= size and (mixed := reader.read(_CHUNK_BYTES)):
                new = _xor(mixed, old.read(len(mixed))).data
                digest.update(new)
                written += file.write(new)
        except zstandard.ZstdError as error:
            raise DeltaError(f"{delta} is damaged: {error}") from error
    return digest.hexdigest()


def _open_if_there(path: Path) -> BinaryIO:
    return open(path, "rb") if path.is_file() else io.BytesIO()


def _xor(new: bytes, old: bytes) -> np.ndarray:
    mixed = np.frombuffer(new, dtype=np.uint8).copy()
    other = np.frombuffer(old, dtype=np.uint8)
    mixed[: len(other)] ^= other
    return mixed


def _delta_index(delta: Path) -> dict[str, Any]:
    try:
        found = json.loads((delta / DELTA_INDEX).read_bytes())
        if found["version"] != 1:
            raise DeltaError(f"{delta / DELTA_INDEX}: of version {found['version']}, which this version does not know")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"{delta} is no delta: {error}") from error
    return dict(found)


# Encrypts files to age recipients (age-encryption.org/v1), as clients ask for it with exported weights.
#
# Only native X25519 recipients (`age1...`) are supported; SSH keys are refused.

AGE_SUFFIX = ".age"
MAX_RECIPIENTS = 10
"""As the public client documents it."""
AGE_CHUNK_BYTES = 64 << 10
_VERSION = b"age-encryption.org/v1"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_PREFIX = (3, 3, 3, 0, 1, 7, 5)
"""`age`, as the checksum counts it: the high bits of its letters, 0, and the low ones."""
_GENERATORS = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_CHECKSUM_LETTERS = 6


def read_recipients(given: object) -> tuple[bytes, ...]:
    """X25519 keys; none where nothing is given. Raises EngineError where one is no such key, or there are too many."""
    if given is None:
        return ()
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_RECIPIENTS:
        raise EngineError(f"age_encryption_recipients: 1 to {MAX_RECIPIENTS} keys are wanted")
    return tuple(_recipient(each) for each in given)


def encrypt_directory(directory: Path, recipients: Sequence[bytes]) -> None:
    """Each file is replaced by one with the suffix `.age`."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            encrypt_file(path, path.with_name(path.name + AGE_SUFFIX), recipients)
            path.unlink()


def encrypt_file(source: Path, target: Path, recipients: Sequence[bytes]) -> None:
    file_key = os.urandom(16)
    nonce = os.urandom(16)
    cipher = ChaCha20Poly1305(_derived(file_key, nonce, b"payload"))
    with source.open("rb") as plain, target.open("wb") as hidden:
        hidden.write(_header(file_key, recipients) + nonce)
        counter, chunk = 0, plain.read(AGE_CHUNK_BYTES)
        while True:
            following = plain.read(AGE_CHUNK_BYTES)
            hidden.write(cipher.encrypt(counter.to_bytes(11, "big") + bytes([not following]), chunk, None))
            if not following:
                return
            counter, chunk = counter + 1, following


def _header(file_key: bytes, recipients: Sequence[bytes]) -> bytes:
    lines = [_VERSION]
    for recipient in recipients:
        ephemeral = X25519PrivateKey.generate()
        share = ephemeral.public_key().public_bytes_raw()
        shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(recipient))
        wrapping = _derived(shared, share + recipient, _VERSION + b"/X25519")
        wrapped = ChaCha20Poly1305(wrapping).encrypt(bytes(12), file_key, None)
        lines += [b"-> X25519 " + _unpadded(share), _unpadded(wrapped)]
    covered = b"\n".join([*lines, b"---"])
    return covered + b" " + _unpadded(hmac.digest(_derived(file_key, b"", b"header"), covered, "sha256")) + b"\n"


def _derived(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key)


def _unpadded(data: bytes) -> bytes:
    return base64.b64encode(data).rstrip(b"=")


def _recipient(given: object) -> bytes:
    text = given.lower() if isinstance(given, str) else ""
    prefix, _, data = text.rpartition("1")
    values = [_BECH32.find(letter) for letter in data]
    if prefix == "age" and min(values, default=-1) >= 0 and _polymod([*_PREFIX, *values]) == 1:
        number = 0
        for value in values[:-_CHECKSUM_LETTERS]:
            number = number << 5 | value
        spare_bits = 5 * (len(values) - _CHECKSUM_LETTERS) - 256
        if 0 <= spare_bits < 5:
            return (number >> spare_bits).to_bytes(32, "big")
    raise EngineError(
        f"age_encryption_recipients: {str(given)[:100]!r} is no native age key (age1...); SSH keys are not supported"
    )


def _polymod(values: Sequence[int]) -> int:
    """The Bech32 checksum; 1 when `values` end with a correct one."""
    checksum = 1
    for value in values:
        top = checksum >> 25
        checksum = (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(_GENERATORS):
            checksum ^= generator if top >> bit & 1 else 0
    return checksum
