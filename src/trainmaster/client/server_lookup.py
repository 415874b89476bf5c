"""Which server is meant: that of arguments, variables or `trainmaster login`, in this order, else the local one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainmaster.client import local
from trainmaster.client.errors import ClientError
from trainmaster.protocol.environment import CA

URL_VARIABLE = "TRAINMASTER_URL"
KEY_VARIABLE = "TRAINMASTER_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is, and the key to it."""

    url: str
    api_key: str = field(repr=False)
    ca: str | None = None
    """A file with the certificates of the authorities that vouch for it; None means the system's."""


LookAgain = Callable[[], Address | None]
"""Finds the server once more; a local one may have another port after a restart."""


def configured_url() -> str | None:
    """The URL of the server that a variable or a login names; None means the local server."""
    saved = load_login()
    return os.environ.get(URL_VARIABLE) or (saved.url if saved else None)


def find_server(
    url: str | None = None, api_key: str | None = None, *, ca: str | Path | None = None
) -> tuple[Address, LookAgain | None]:
    """The server that is meant, and how to find it again if it can move. The local one is started when none runs.

    Raises LocalServerError if the local server is meant, and cannot be used.
    """
    trusted = str(ca) if ca else os.environ.get(CA) or None
    key = api_key or os.environ.get(KEY_VARIABLE)
    url = url or configured_url()
    if url:
        saved = load_login()
        if saved is not None and saved.url == url.rstrip("/"):
            return Address(url=url, api_key=key or saved.api_key, ca=trusted or saved.ca), None
        server = local.running()
        own = server.api_key if server is not None and server.url == url.rstrip("/") else ""
        return Address(url=url, api_key=key or own, ca=trusted), None

    def address_of(server: local.LocalServer) -> Address:
        return Address(url=server.url, api_key=key or server.api_key, ca=trusted)

    def look_again() -> Address | None:
        server = local.find()
        return address_of(server) if server else None

    return address_of(local.start()), look_again


def login_file() -> Path:
    return local.data_dir() / "login.json"


def load_login() -> Address | None:
    """The saved login, if there is one."""
    try:
        return Address(**json.loads(login_file().read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ClientError(f"cannot read the login in {login_file()} ({error}); run `trainmaster logout`") from error


def save_login(login: Address) -> None:
    """Save a login in the place of any other."""
    file = login_file()
    draft = file.with_name(".login.json")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            json.dump(asdict(login), opened)
        os.replace(draft, file)
    except OSError as error:
        raise ClientError(f"cannot write {file}: {error.strerror}") from error


def remove_login() -> None:
    try:
        login_file().unlink(missing_ok=True)
    except OSError as error:
        raise ClientError(f"cannot remove {login_file()}: {error.strerror}") from error
