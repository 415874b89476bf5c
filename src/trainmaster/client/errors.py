"""The client's errors: an `ApiError` is the server's answer (`ERROR_OF_STATUS`), all others are found here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ClientError(Exception):
    """Something went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One thing that is wrong with a request, and where."""

    field: str
    message: str


class ApiError(ClientError):
    """The server answered with an error."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: Sequence[FieldProblem] | Mapping[str, Any] = (),
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """What to branch on, such as JOB_NOT_FOUND."""
        self.message = message
        self.details = details
        """The fields that are to blame; or, when a state forbids an action, what would allow it."""
        self.request_id = request_id
        """Finds the request in the server's log."""
        self.retry_after_s = retry_after_s
        """When to try again, if the server said so."""

    @property
    def problems(self) -> Sequence[FieldProblem]:
        return () if isinstance(self.details, Mapping) else self.details


class RefusedError(ApiError):
    """The request is well-formed, but the server will not do it."""


class UnauthorizedError(ApiError):
    """There is no API key, or it is wrong."""


class ForbiddenError(ApiError):
    """The API key may not do that."""


class NotFoundError(ApiError):
    """Not found, or not visible to this key."""


class ConflictError(ApiError):
    """The request conflicts with the current state."""


class InvalidError(ApiError):
    """The request has a wrong shape or value."""


class RateLimitedError(ApiError):
    """There were too many requests with this key."""


class UnavailableError(ApiError):
    """The server cannot answer now."""


class UnreachableError(ClientError):
    """No server answers at that address."""


class UntrustedError(ClientError):
    """The server's certificate is not signed by a trusted authority."""


class LocalServerError(ClientError):
    """The local server cannot be started, stopped or used."""


class UploadError(ClientError):
    """A file that a job names cannot be sent."""


class DownloadError(ClientError):
    """A file of a job cannot be fetched, or is not what it should be."""


class SignatureError(ClientError):
    """A webhook's delivery has a wrong signature, or is too old."""


ERROR_OF_STATUS: Mapping[int, type[ApiError]] = {
    400: RefusedError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    422: InvalidError,
    429: RateLimitedError,
    **dict.fromkeys((502, 503, 504), UnavailableError),
}
"""Every other status is a plain ApiError."""


def error_from_answer(status: int, document: Mapping[str, Any], request_id: str | None = None) -> ApiError:
    """The error for an answer, whether or not it has our envelope."""
    error, meta = document.get("error"), document.get("meta")
    error = error if isinstance(error, Mapping) else {}
    details = error.get("details") or ()
    if not isinstance(details, Mapping):
        details = tuple(
            FieldProblem(field=str(detail.get("field", "")), message=str(detail.get("message", "")))
            for detail in details
            if isinstance(detail, Mapping)
        )
    return ERROR_OF_STATUS.get(status, ApiError)(
        status,
        str(error.get("code") or f"HTTP_{status}"),
        str(error.get("message") or f"the server answered with status {status}"),
        details,
        (meta.get("request_id") if isinstance(meta, Mapping) else None) or request_id,
        error.get("retry_after"),
    )
