"""Where a server listens: its socket, its address, and whether it may listen there without TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Iterator

from trainmaster.server.core.errors import RefusedError
from trainmaster.server.settings.settings import Settings

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2, which is the oldest that is spoken. What uvicorn would take has none but CBC with SHA-1."""


def check(settings: Settings) -> None:
    """See to it that nobody else on the network can read along.

    Raises:
        RefusedError: they could, or the certificate cannot be used; the message says what to do.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise RefusedError("tls_cert and tls_key belong together: set both, or neither")
    if settings.tls_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.tls_cert, settings.tls_key, password=_no_password
            )
        except OSError as error:
            raise RefusedError(f"tls_cert {settings.tls_cert} and tls_key cannot be used: {error}") from error
    elif not settings.is_private and not settings.behind_proxy:
        raise RefusedError(
            f"on {settings.host} keys and jobs would travel in the clear; set tls_cert and tls_key, or, if a proxy in "
            "front does TLS, behind_proxy (--behind-proxy); or listen on 127.0.0.1"
        )


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """A socket on the port; where any will do, on the one before: workers and clients may still know it."""
    remembered = settings.data_dir / "port"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.port == 0 and remembered.exists():
            with contextlib.suppress(OSError, ValueError, OverflowError):
                listener.bind((settings.host, int(remembered.read_text())))
        if listener.getsockname()[1] == 0:
            listener.bind((settings.host, settings.port))
        remembered.write_text(str(listener.getsockname()[1]))
        yield listener


def url_of(settings: Settings, listener: socket.socket) -> str:
    """Where this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _no_password() -> str:
    """Called for a key that is encrypted, where the usual would be to ask whoever sits at the terminal."""
    raise OSError("the key is encrypted; a server needs one that is not")
