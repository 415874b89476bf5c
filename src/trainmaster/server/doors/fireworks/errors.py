"""Errors of the Fireworks door: a gRPC status as JSON, which its public clients read."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from http import HTTPStatus

from starlette.responses import Response

from trainmaster.server.core.errors import (
    ConflictError,
    HandleTakenError,
    IdempotencyMismatchError,
    InvalidTransitionError,
    TrainmasterError,
)
from trainmaster.server.http.envelope import error_response
from trainmaster.server.http.errors import status_of

ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
DOMAIN = "trainmaster"
MAX_NAMED = 5
"""Fields that the message of an error names; the details have all of them."""


class Code(IntEnum):
    """The codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_BY_CLASS: Mapping[type[TrainmasterError], tuple[Code, HTTPStatus]] = {
    HandleTakenError: (Code.ALREADY_EXISTS, HTTPStatus.CONFLICT),
    # Clients try a 409 again, and will be told the same.
    InvalidTransitionError: (Code.FAILED_PRECONDITION, HTTPStatus.BAD_REQUEST),
    IdempotencyMismatchError: (Code.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
    ConflictError: (Code.ABORTED, HTTPStatus.CONFLICT),
}
_BY_STATUS: Mapping[int, tuple[Code, HTTPStatus]] = {
    HTTPStatus.BAD_REQUEST: (Code.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
    HTTPStatus.UNPROCESSABLE_ENTITY: (Code.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
    HTTPStatus.UNAUTHORIZED: (Code.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED),
    HTTPStatus.FORBIDDEN: (Code.PERMISSION_DENIED, HTTPStatus.FORBIDDEN),
    HTTPStatus.NOT_FOUND: (Code.NOT_FOUND, HTTPStatus.NOT_FOUND),
    HTTPStatus.METHOD_NOT_ALLOWED: (Code.UNIMPLEMENTED, HTTPStatus.METHOD_NOT_ALLOWED),
    HTTPStatus.REQUEST_TIMEOUT: (Code.DEADLINE_EXCEEDED, HTTPStatus.REQUEST_TIMEOUT),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (Code.INVALID_ARGUMENT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    HTTPStatus.TOO_MANY_REQUESTS: (Code.RESOURCE_EXHAUSTED, HTTPStatus.TOO_MANY_REQUESTS),
    HTTPStatus.BAD_GATEWAY: (Code.UNAVAILABLE, HTTPStatus.BAD_GATEWAY),
    HTTPStatus.SERVICE_UNAVAILABLE: (Code.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE),
}


def grpc_failure(error: TrainmasterError, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a request that led to `error`."""
    code, status = _codes_of(error)
    return error_response(status_document(error, code), error, status, headers)


def status_document(error: TrainmasterError, code: Code) -> dict[str, object]:
    """An error as a status."""
    said = [f"{problem.field}: {problem.message}" for problem in error.problems]
    about = {
        "@type": ERROR_INFO,
        "reason": error.code,
        "domain": DOMAIN,
        "metadata": {problem.field: problem.message for problem in error.problems},
    }
    return {"code": int(code), "message": "; ".join(said[:MAX_NAMED]) or error.message, "details": [about]}


def _codes_of(error: TrainmasterError) -> tuple[Code, HTTPStatus]:
    for kind in type(error).__mro__:
        if kind in _BY_CLASS:
            return _BY_CLASS[kind]
    return _BY_STATUS.get(status_of(error), (Code.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR))
