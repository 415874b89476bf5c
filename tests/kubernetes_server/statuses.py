"""Errors as the API server reports them: each is a `Status` body with the reason and the code of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes_server.resources import Resource


class StatusError(Exception):
    """A request that fails."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    @property
    def headers(self) -> dict[str, str]:
        seconds = (self.details or {}).get("retryAfterSeconds")
        return {"Retry-After": str(seconds)} if seconds else {}

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details is not None:
            body["details"] = self.details
        return {**body, "code": self.code}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why one field is invalid."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


def required(field: str, message: str = "") -> Cause:
    text = f"Required value: {message}" if message else "Required value"
    return Cause(field=field, message=text, reason="FieldValueRequired")


def invalid_value(field: str, value: Any, message: str) -> Cause:
    shown = f'"{value}"' if isinstance(value, str) else _literal(value)
    return Cause(field=field, message=f"Invalid value: {shown}: {message}")


def unsupported(field: str, value: Any, supported: Sequence[str]) -> Cause:
    choices = ", ".join(f'"{item}"' for item in supported)
    message = f'Unsupported value: "{value}": supported values: {choices}'
    return Cause(field=field, message=message, reason="FieldValueNotSupported")


def forbidden_field(field: str, message: str) -> Cause:
    return Cause(field=field, message=f"Forbidden: {message}", reason="FieldValueForbidden")


def not_found_cause(field: str, value: str) -> Cause:
    return Cause(field=field, message=f'Not found: "{value}"', reason="FieldValueNotFound")


def duplicate(field: str, value: Any) -> Cause:
    return Cause(field=field, message=f'Duplicate value: "{value}"', reason="FieldValueDuplicate")


def not_found(resource: Resource, name: str) -> StatusError:
    return StatusError(404, "NotFound", f'{resource.qualified} "{name}" not found', _details(resource, name))


def no_such_resource() -> StatusError:
    return StatusError(404, "NotFound", "the server could not find the requested resource", {})


def already_exists(resource: Resource, name: str) -> StatusError:
    message = f'{resource.qualified} "{name}" already exists'
    return StatusError(409, "AlreadyExists", message, _details(resource, name))


def conflict(resource: Resource, name: str, why: str = "") -> StatusError:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return StatusError(409, "Conflict", message, _details(resource, name))


def invalid(resource: Resource, name: str, causes: Sequence[Cause]) -> StatusError:
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    texts = [f"{cause.field}: {cause.message}" for cause in causes]
    text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details = {
        "name": name,
        **({"group": resource.group} if resource.group else {}),
        "kind": resource.kind,
        "causes": [{"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes],
    }
    return StatusError(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details)


def forbidden(resource: Resource, name: str, why: str) -> StatusError:
    details = _details(resource, name) if name else _details(resource)
    quoted = f' "{name}"' if name else ""
    return StatusError(403, "Forbidden", f"{resource.qualified}{quoted} is forbidden: {why}", details)


def bad_request(message: str) -> StatusError:
    return StatusError(400, "BadRequest", message)


def unauthorized() -> StatusError:
    return StatusError(401, "Unauthorized", "Unauthorized")


def method_not_allowed() -> StatusError:
    message = "the server does not allow this method on the requested resource"
    return StatusError(405, "MethodNotAllowed", message, {})


def unsupported_media_type(content_type: str, accepted: Sequence[str]) -> StatusError:
    message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    return StatusError(415, "UnsupportedMediaType", message)


def expired(message: str) -> StatusError:
    return StatusError(410, "Expired", message)


def too_many_requests(retry_after_s: int) -> StatusError:
    message = "too many requests, please try again later"
    return StatusError(429, "TooManyRequests", message, {"retryAfterSeconds": retry_after_s})


def unavailable() -> StatusError:
    message = "the server is currently unable to handle the request"
    return StatusError(503, "ServiceUnavailable", message, {"retryAfterSeconds": 1})


def internal_error(message: str) -> StatusError:
    return StatusError(500, "InternalError", f"Internal error occurred: {message}", {"causes": [{"message": message}]})


def success(resource: Resource, name: str, uid: str) -> dict[str, Any]:
    details = {**_details(resource, name), "uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _details(resource: Resource, name: str = "") -> dict[str, Any]:
    group = {"group": resource.group} if resource.group else {}
    return {**({"name": name} if name else {}), **group, "kind": resource.plural}


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
