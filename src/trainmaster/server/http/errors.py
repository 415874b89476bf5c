"""Errors of the API itself, and the HTTP status of every error class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from trainmaster.server.core.errors import (
    ConflictError,
    ForbiddenError,
    IdempotencyMismatchError,
    InvalidTransitionError,
    NewerVersionError,
    NotFoundError,
    NotLeaderError,
    Problem,
    RefusedError,
    SpecError,
    StoreUnavailableError,
    TrainmasterError,
)
from trainmaster.server.http.token_exchange import CredentialsRefusedError, ExchangeUnavailableError
from trainmaster.server.settings.encryption import SealError

RETRY_AFTER_S = 1
"""For errors of the server that pass soon."""


class UnauthenticatedError(TrainmasterError):
    """Send your API key as `Authorization: Bearer ...` or `X-API-Key: ...`."""

    code = "AUTH_TOKEN_MISSING"


class InvalidTokenError(UnauthenticatedError):
    """This key is not valid (any more)."""

    code = "AUTH_TOKEN_INVALID"


class InsufficientScopeError(TrainmasterError):
    """This key may not do that."""

    code = "AUTH_INSUFFICIENT_SCOPE"


class UnknownRouteError(TrainmasterError):
    """There is nothing at this address."""

    code = "ROUTE_NOT_FOUND"


class WrongMethodError(TrainmasterError):
    """This address does not take that method."""

    code = "METHOD_NOT_ALLOWED"


class StalledError(TrainmasterError):
    """The rest of the body did not come."""

    code = "REQUEST_TIMEOUT"


class StreamGapConflictError(TrainmasterError):
    """Bytes were sent beyond the end of the stream."""

    code = "STREAM_GAP"

    def __init__(self, next_offset: int) -> None:
        super().__init__(
            f"the stream ends at {next_offset}; go on from there",
            [Problem(field="offset", message=str(next_offset))],
        )
        self.next_offset = next_offset


class AttemptEndedError(TrainmasterError):
    """This attempt has ended: nothing more is taken for it."""

    code = "ATTEMPT_ENDED"


class SessionEndedError(TrainmasterError):
    """This session is finished."""

    code = "SESSION_ENDED"


class TooLargeError(TrainmasterError):
    """The body is too large."""

    code = "PAYLOAD_TOO_LARGE"


class UnsatisfiableRangeError(TrainmasterError):
    """The file ends before that range."""

    code = "RANGE_NOT_SATISFIABLE"


class RateLimitedError(TrainmasterError):
    """Too many requests came; slow down."""

    code = "RATE_LIMITED"

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(wait_s))


class InternalError(TrainmasterError):
    """The server made a mistake; its log has the request under this id."""


class BadGatewayError(TrainmasterError):
    """The service broke the connection off."""

    code = "SERVICE_UNREACHABLE"


class UnhealthyError(TrainmasterError):
    """The server answers, but cannot do its work."""

    code = "UNHEALTHY"


class ServiceNotReadyError(TrainmasterError):
    """The service does not answer now."""

    code = "SERVICE_NOT_READY"

    def __init__(self, message: str, *, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


STATUS_OF_ERROR: Mapping[type[TrainmasterError], HTTPStatus] = MappingProxyType(
    {
        SpecError: HTTPStatus.UNPROCESSABLE_ENTITY,
        RefusedError: HTTPStatus.BAD_REQUEST,
        ForbiddenError: HTTPStatus.FORBIDDEN,
        NotFoundError: HTTPStatus.NOT_FOUND,
        ConflictError: HTTPStatus.CONFLICT,
        IdempotencyMismatchError: HTTPStatus.UNPROCESSABLE_ENTITY,
        NotLeaderError: HTTPStatus.SERVICE_UNAVAILABLE,
        StoreUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
        NewerVersionError: HTTPStatus.SERVICE_UNAVAILABLE,
        UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
        InsufficientScopeError: HTTPStatus.FORBIDDEN,
        CredentialsRefusedError: HTTPStatus.FORBIDDEN,
        UnknownRouteError: HTTPStatus.NOT_FOUND,
        WrongMethodError: HTTPStatus.METHOD_NOT_ALLOWED,
        StalledError: HTTPStatus.REQUEST_TIMEOUT,
        StreamGapConflictError: HTTPStatus.CONFLICT,
        AttemptEndedError: HTTPStatus.GONE,
        SessionEndedError: HTTPStatus.GONE,
        TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        UnsatisfiableRangeError: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        RateLimitedError: HTTPStatus.TOO_MANY_REQUESTS,
        BadGatewayError: HTTPStatus.BAD_GATEWAY,
        UnhealthyError: HTTPStatus.SERVICE_UNAVAILABLE,
        ExchangeUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
        SealError: HTTPStatus.SERVICE_UNAVAILABLE,
        ServiceNotReadyError: HTTPStatus.SERVICE_UNAVAILABLE,
        TrainmasterError: HTTPStatus.INTERNAL_SERVER_ERROR,
    }
)
"""Other classes have the status of their nearest base class here."""


def status_of(error: TrainmasterError) -> HTTPStatus:
    return next(STATUS_OF_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_OF_ERROR)


def retry_after_s(error: TrainmasterError) -> int | None:
    """When to try again; None where that does not help."""
    if isinstance(error, ServiceNotReadyError | RateLimitedError):
        return error.retry_after_s
    soon = NotLeaderError | StoreUnavailableError | ExchangeUnavailableError
    return RETRY_AFTER_S if isinstance(error, soon) else None


def error_document(error: TrainmasterError) -> dict[str, Any]:
    """The `error` part of the envelope."""
    document: dict[str, Any] = {"code": error.code, "message": error.message}
    if (wait_s := retry_after_s(error)) is not None:
        document["retry_after"] = wait_s
    if isinstance(error, InvalidTransitionError):
        document["details"] = {
            "status": error.status,
            "action": error.action,
            "allowed_from": list(error.allowed_from),
        }
    elif error.problems:
        document["details"] = [{"field": problem.field, "message": problem.message} for problem in error.problems]
    if isinstance(error, StreamGapConflictError):
        document["next_offset"] = error.next_offset
    return document
