"""The server that `trainmaster login` saved, in a file that only this user can read."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainmaster.client import local
from trainmaster.client.errors import ClientError


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A server and a key to it."""

    url: str
    api_key: str = field(repr=False)
    ca: str | None = None
    """A file with the certificates of the authorities to trust; None means the system's."""


def path() -> Path:
    """Where the login is saved."""
    return local.data_dir() / "login.json"


def load() -> Login | None:
    """The saved login, if there is one.

    Raises:
        ClientError: the file cannot be read.
    """
    try:
        return Login(**json.loads(path().read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ClientError(f"cannot read the login in {path()} ({error}); run `trainmaster logout`") from error


def save(login: Login) -> None:
    """Save a login, instead of any other.

    Raises:
        ClientError: the file cannot be written.
    """
    draft = path().with_name(".login.json")
    try:
        path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(login), file)
        os.replace(draft, path())
    except OSError as error:
        raise ClientError(f"cannot write {path()}: {error.strerror}") from error


def remove() -> None:
    """Forget the saved login.

    Raises:
        ClientError: the file cannot be removed.
    """
    try:
        path().unlink(missing_ok=True)
    except OSError as error:
        raise ClientError(f"cannot remove {path()}: {error.strerror}") from error
