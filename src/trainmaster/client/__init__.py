"""The Python client of a Trainmaster server. It talks HTTP and shares the types of the answers with the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    FieldProblem,
    ForbiddenError,
    InvalidError,
    LocalServerError,
    NotFoundError,
    RateLimitedError,
    RefusedError,
    SignatureError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
    UntrustedError,
    UploadError,
)

if TYPE_CHECKING:
    from trainmaster.client.client import Client
    from trainmaster.client.route_groups import verify_webhook

__all__ = [
    "ApiError",
    "Client",
    "ClientError",
    "ConflictError",
    "FieldProblem",
    "ForbiddenError",
    "InvalidError",
    "LocalServerError",
    "NotFoundError",
    "RateLimitedError",
    "RefusedError",
    "SignatureError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "UntrustedError",
    "UploadError",
    "verify_webhook",
]


def __getattr__(name: str) -> object:
    # Importing the errors does not load the HTTP library.
    if name in ("Client", "verify_webhook"):
        from trainmaster.client import client, route_groups

        return client.Client if name == "Client" else route_groups.verify_webhook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
