"""Encrypts files to age recipients (age-encryption.org/v1), as clients ask for it with exported weights.

Only native X25519 recipients (`age1...`) are supported; SSH keys are refused.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trainmaster.engine.types import EngineError

SUFFIX = ".age"
MAX_RECIPIENTS = 10
"""As the public client documents it."""
CHUNK_BYTES = 64 << 10
_VERSION = b"age-encryption.org/v1"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATORS = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_CHECKSUM_LETTERS = 6


def read_recipients(given: object) -> tuple[bytes, ...]:
    """The X25519 keys of `age_encryption_recipients`; none where nothing is given.

    Raises:
        EngineError: one is no such key, or there are too many.
    """
    if given is None:
        return ()
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_RECIPIENTS:
        raise EngineError(f"age_encryption_recipients: 1 to {MAX_RECIPIENTS} keys are wanted")
    return tuple(_recipient(each) for each in given)


def encrypt_directory(directory: Path, recipients: Sequence[bytes]) -> None:
    """Encrypt every file of a directory; each is replaced by one with the suffix `.age`."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            encrypt_file(path, path.with_name(path.name + SUFFIX), recipients)
            path.unlink()


def encrypt_file(source: Path, target: Path, recipients: Sequence[bytes]) -> None:
    """Write a file encrypted to some recipients, a chunk at a time."""
    file_key = os.urandom(16)
    nonce = os.urandom(16)
    cipher = ChaCha20Poly1305(_derived(file_key, nonce, b"payload"))
    with source.open("rb") as plain, target.open("wb") as hidden:
        hidden.write(_header(file_key, recipients) + nonce)
        counter, chunk = 0, plain.read(CHUNK_BYTES)
        while True:
            following = plain.read(CHUNK_BYTES)
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
    """The key that a Bech32 text with the prefix `age` holds."""
    text = given.lower() if isinstance(given, str) else ""
    prefix, _, data = text.rpartition("1")
    values = [_BECH32.find(letter) for letter in data]
    if prefix == "age" and min(values, default=-1) >= 0 and _polymod([*_expanded(prefix), *values]) == 1:
        number = 0
        for value in values[:-_CHECKSUM_LETTERS]:
            number = number << 5 | value
        spare_bits = 5 * (len(values) - _CHECKSUM_LETTERS) - 256
        if 0 <= spare_bits < 5:
            return (number >> spare_bits).to_bytes(32, "big")
    raise EngineError(
        f"age_encryption_recipients: {str(given)[:100]!r} is no native age key (age1...); SSH keys are not supported"
    )


def _expanded(prefix: str) -> list[int]:
    codes = prefix.encode()
    return [*(code >> 5 for code in codes), 0, *(code & 31 for code in codes)]


def _polymod(values: Sequence[int]) -> int:
    """The Bech32 checksum of some values: 1 when they include a right one."""
    checksum = 1
    for value in values:
        top = checksum >> 25
        checksum = (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(_GENERATORS):
            checksum ^= generator if top >> bit & 1 else 0
    return checksum
