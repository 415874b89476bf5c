"""The Python client of a Trainmaster server. Talks HTTP, and imports nothing of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.sdk.errors import (
    ApiError,
    ConflictError,
    FieldProblem,
    ForbiddenError,
    InvalidError,
    LocalServerError,
    NotFoundError,
    RefusedError,
    SdkError,
    ShippingError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)

if TYPE_CHECKING:
    from trainmaster.sdk.client import Client

__all__ = [
    "ApiError",
    "Client",
    "ConflictError",
    "FieldProblem",
    "ForbiddenError",
    "InvalidError",
    "LocalServerError",
    "NotFoundError",
    "RefusedError",
    "SdkError",
    "ShippingError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
]


def __getattr__(name: str) -> object:
    # The client brings an HTTP library with it, which whoever only wants the errors need not wait for.
    if name == "Client":
        from trainmaster.sdk.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
