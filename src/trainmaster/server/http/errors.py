"""Errors of the API itself, and the HTTP status of every error class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from trainmaster.server.core import errors as core
from trainmaster.server.settings.encryption import SealError

RETRY_AFTER_S = 1
"""For errors of the server that pass soon."""


class HttpError(core.TrainmasterError):
    """An error that only the API raises."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init_subclass__(cls, *, status: HTTPStatus | None = None, code: str | None = None) -> None:
        cls.status, cls.code = status or cls.status, code or cls.code


def wrong(field: str, message: str) -> core.SpecError:
    """The error of a request with one field that is not valid."""
    return core.SpecError([core.Problem(field=field, message=message)])


class UnauthenticatedError(HttpError, status=HTTPStatus.UNAUTHORIZED, code="AUTH_TOKEN_MISSING"):
    """Send your API key as `Authorization: Bearer ...` or `X-API-Key: ...`."""


class InvalidTokenError(UnauthenticatedError, code="AUTH_TOKEN_INVALID"):
    """This key is not valid (any more)."""


class InsufficientScopeError(HttpError, status=HTTPStatus.FORBIDDEN, code="AUTH_INSUFFICIENT_SCOPE"):
    """This key may not do that."""


class CredentialsRefusedError(HttpError, status=HTTPStatus.FORBIDDEN, code="CREDENTIALS_REFUSED"):
    """Your credential was not accepted in exchange for the tokens that the job needs."""


class UnknownRouteError(HttpError, status=HTTPStatus.NOT_FOUND, code="ROUTE_NOT_FOUND"):
    """There is nothing at this address."""


class WrongMethodError(HttpError, status=HTTPStatus.METHOD_NOT_ALLOWED, code="METHOD_NOT_ALLOWED"):
    """This address does not take that method."""


class StalledError(HttpError, status=HTTPStatus.REQUEST_TIMEOUT, code="REQUEST_TIMEOUT"):
    """The rest of the body did not come."""


class StreamGapConflictError(HttpError, status=HTTPStatus.CONFLICT, code="STREAM_GAP"):
    """Bytes were sent beyond the end of the stream."""

    def __init__(self, next_offset: int) -> None:
        problem = core.Problem(field="offset", message=str(next_offset))
        super().__init__(f"the stream ends at {next_offset}; continue there", [problem])
        self.next_offset = next_offset


class ForeignVersionError(HttpError, status=HTTPStatus.PRECONDITION_FAILED, code="FOREIGN_VERSION"):
    """There is another version of this file than the request names, or there is one at all."""


class AttemptEndedError(HttpError, status=HTTPStatus.GONE, code="ATTEMPT_ENDED"):
    """This attempt has ended: nothing more is taken for it."""


class SessionEndedError(HttpError, status=HTTPStatus.GONE, code="SESSION_ENDED"):
    """This session is finished."""


class TooLargeError(HttpError, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="PAYLOAD_TOO_LARGE"):
    """The body is too large."""


class UnsatisfiableRangeError(
    HttpError, status=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, code="RANGE_NOT_SATISFIABLE"
):
    """The file ends before that range."""


class RateLimitedError(HttpError, status=HTTPStatus.TOO_MANY_REQUESTS, code="RATE_LIMITED"):
    """Too many requests came; slow down."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(wait_s))


class InternalError(HttpError):
    """The server made a mistake; its log has the request under this id."""


class BadGatewayError(HttpError, status=HTTPStatus.BAD_GATEWAY, code="SERVICE_UNREACHABLE"):
    """The service broke the connection off."""


class UnhealthyError(HttpError, status=HTTPStatus.SERVICE_UNAVAILABLE, code="UNHEALTHY"):
    """The server answers, but cannot do its work."""


class ExchangeUnavailableError(HttpError, status=HTTPStatus.SERVICE_UNAVAILABLE, code="TOKEN_EXCHANGE_UNAVAILABLE"):
    """The token exchange does not answer; try again."""


class ServiceNotReadyError(HttpError, status=HTTPStatus.SERVICE_UNAVAILABLE, code="SERVICE_NOT_READY"):
    """The service does not answer now."""

    def __init__(self, message: str, *, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


_STATUS_OF_CORE: Mapping[type[core.TrainmasterError], HTTPStatus] = {
    core.SpecError: HTTPStatus.UNPROCESSABLE_ENTITY,
    core.RefusedError: HTTPStatus.BAD_REQUEST,
    core.ForbiddenError: HTTPStatus.FORBIDDEN,
    core.NotFoundError: HTTPStatus.NOT_FOUND,
    core.ConflictError: HTTPStatus.CONFLICT,
    core.IdempotencyMismatchError: HTTPStatus.UNPROCESSABLE_ENTITY,
    core.NotLeaderError: HTTPStatus.SERVICE_UNAVAILABLE,
    core.StoreUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    core.EngineUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    core.NewerVersionError: HTTPStatus.SERVICE_UNAVAILABLE,
    SealError: HTTPStatus.SERVICE_UNAVAILABLE,
    core.TrainmasterError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Other classes have the status of their nearest base class here."""


def status_of(error: core.TrainmasterError) -> HTTPStatus:
    if isinstance(error, HttpError):
        return error.status
    return next(_STATUS_OF_CORE[kind] for kind in type(error).__mro__ if kind in _STATUS_OF_CORE)


def retry_after_s(error: core.TrainmasterError) -> int | None:
    """When to try again; None where that does not help."""
    if isinstance(error, ServiceNotReadyError | RateLimitedError):
        return error.retry_after_s
    soon = core.NotLeaderError | core.StoreUnavailableError | core.EngineUnavailableError | ExchangeUnavailableError
    return RETRY_AFTER_S if isinstance(error, soon) else None


def error_document(error: core.TrainmasterError) -> dict[str, Any]:
    """The `error` part of the envelope."""
    document: dict[str, Any] = {"code": error.code, "message": error.message}
    if (wait_s := retry_after_s(error)) is not None:
        document["retry_after"] = wait_s
    if isinstance(error, core.InvalidTransitionError):
        document["details"] = {"status": error.status, "action": error.action, "allowed_from": list(error.allowed_from)}
    elif error.problems:
        document["details"] = [{"field": problem.field, "message": problem.message} for problem in error.problems]
    if isinstance(error, StreamGapConflictError):
        document["next_offset"] = error.next_offset
    return document
