"""Encryption of stored secrets, each bound to the row that holds it.

An encrypted value is `v1.<key id>.<base64 of nonce and ciphertext>`: AES-256-GCM, with the row's identity as associated
data, so that a value that is copied into another row cannot be decrypted there. One key encrypts new values; old keys
only decrypt, so that a key can be replaced.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import hmac
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.settings.settings import Settings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_FILE = "secret-key"
"""Beside the database, so that servers which share an SQLite file share the key."""
KEY_BYTES = 32
HOW_TO_MAKE_A_KEY = "make one with `openssl rand -base64 32`"

_FORMAT = "v1"
_NONCE_BYTES = 12


class SealError(TrainmasterError):
    """A secret cannot be encrypted or decrypted with the keys that this server has."""

    code = "SECRET_KEY"


def keys_of(settings: Settings) -> tuple[bytes | None, list[bytes]]:
    """The key in the settings, or None where a file holds it, and the old keys."""
    old = [parse_key(text, "old_secret_keys") for text in settings.old_secret_keys]
    if settings.secret_key:
        return parse_key(settings.secret_key, "secret_key"), old
    if not settings.database.startswith("sqlite"):
        raise SealError(
            "a server on PostgreSQL needs the setting secret_key, the same on every server of the database; "
            f"{HOW_TO_MAKE_A_KEY} and set it in the settings file or as TRAINMASTER_SECRET_KEY"
        )
    return None, old


class Sealer:
    """Encrypts and decrypts with the keys of one server. Thread-safe."""

    def __init__(self, key: bytes, old_keys: Sequence[bytes] = ()) -> None:
        self.key_id = key_id_of(key)
        self._keys = {key_id_of(each): each for each in (*old_keys, key)}
        self._signing_keys, self._fingerprint_keys = (
            [hmac.digest(each, purpose, "sha256") for each in (key, *old_keys)]
            for purpose in (b"trainmaster signature", b"trainmaster fingerprint")
        )

    @classmethod
    def load(cls, settings: Settings, *, may_make_key: Callable[[], bool]) -> Sealer:
        """The sealer with the key of the settings, or of a file, made if `may_make_key`: nothing is encrypted yet."""
        key, old = keys_of(settings)
        if key is not None:
            return cls(key, old)
        path = key_file(settings)
        if not path.exists() and not may_make_key():
            raise SealError(
                f"{path} is missing, and the database holds secrets that are encrypted with it; put it back. "
                f"If it is lost, so are they: {HOW_TO_MAKE_A_KEY}, write it there, and submit the jobs anew"
            )
        text = private_text(path, lambda: base64.b64encode(os.urandom(KEY_BYTES)).decode())
        return cls(parse_key(text, str(path)), old)

    def seal(self, value: str, *, about: str) -> str:
        """Encrypt a value for the row that `about` names."""
        nonce = os.urandom(_NONCE_BYTES)
        hidden = _cipher(self._keys[self.key_id]).encrypt(nonce, value.encode("utf-8", "surrogatepass"), about.encode())
        return f"{_FORMAT}.{self.key_id}.{base64.b64encode(nonce + hidden).decode()}"

    def open(self, sealed: str, *, about: str) -> str:
        """Decrypt the value of the row that `about` names."""
        form, _, rest = sealed.partition(".")
        key_id, _, body = rest.partition(".")
        if form != _FORMAT:
            raise SealError(f"the secret of {about} has an unknown form; was it written by a newer version?")
        if (key := self._keys.get(key_id)) is None:
            raise SealError(
                f"the secret of {about} was encrypted with the key {key_id}, which this server does not have; "
                f"add that key to old_secret_keys, or put the {KEY_FILE} file back that lay beside the database"
            )
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(body, validate=True)
            value = _cipher(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], about.encode())
        except (InvalidTag, ValueError):
            message = f"the secret of {about} cannot be decrypted: it belongs to another row, or was changed"
            raise SealError(message) from None
        return value.decode("utf-8", "surrogatepass")

    def sign(self, text: str) -> str:
        return hmac.digest(self._signing_keys[0], text.encode(), "sha256").hex()

    def signed(self, text: str, signature: str) -> bool:
        """Whether the present key or an old one made the signature of a text."""
        own = [hmac.digest(key, text.encode(), "sha256").hex().encode() for key in self._signing_keys]
        return any(hmac.compare_digest(each, signature.encode()) for each in own)

    def fingerprints(self, data: bytes) -> tuple[str, ...]:
        """Keyed hashes of data, by the present key first, then by old ones; without a key nobody can guess the data."""
        return tuple(hmac.digest(key, data, "sha256").hex() for key in self._fingerprint_keys)


@functools.lru_cache(maxsize=64)
def _cipher(key: bytes) -> AESGCM:
    # Imported with the first secret: a server without secrets does not load the library.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def key_id_of(key: bytes) -> str:
    """A name for a key that reveals nothing of it."""
    return hashlib.sha256(b"trainmaster key id:" + key).hexdigest()[:8]


def parse_key(text: str, where: str) -> bytes:
    """The key from its text form: 32 bytes in base64. Errors name the place, never the text."""
    with contextlib.suppress(ValueError, binascii.Error):
        key = base64.b64decode(text.strip(), validate=True)
        if len(key) == KEY_BYTES:
            return key
    raise SealError(f"{where} holds no key: {KEY_BYTES} random bytes in base64; {HOW_TO_MAKE_A_KEY}")


def key_file(settings: Settings) -> Path:
    """The file of the key, if the settings name none."""
    beside = settings.database_file
    return (beside.parent if beside else settings.data_dir) / KEY_FILE


def private_text(path: Path, make: Callable[[], str]) -> str:
    """The text of a file that only the server's user can read; a missing file is created with what `make` returns."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 600
    try:
        with open(descriptor, "w") as file:
            file.write(make() + "\n")
            file.flush()
            os.fsync(file.fileno())
        # Under its name only when it is whole, and once: of two servers that start together, one creates the file.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    return path.read_text()
