"""What these clients raise beside the other errors of the SDK. Each is also what Fireworks' own clients raise there.

ClientError
├── TrainingAPIError (RuntimeError)                 the server said no
│   └── ResumeRefusedError (httpx.HTTPStatusError)  to a job that was to go on
├── TrainerStoppedError (RuntimeError)              a trainer that was waited for will not become ready by itself
└── TrainerTimeoutError (TimeoutError)              it did not become ready in time
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from trainmaster.client.errors import ClientError

ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
"""The type of the detail that says in a word why something was refused."""
TEXT_SHOWN = 200
"""Of an answer that is no document."""


class TrainingAPIError(ClientError, RuntimeError):
    """The server said no."""

    def __init__(self, context: str, response: httpx.Response) -> None:
        document = _document(response)
        super().__init__(f"{context}: {_message(document, response)} (HTTP {response.status_code})")
        self.status_code = response.status_code
        info = _error_info(document)
        self.reason: str | None = info.get("reason")
        """What to branch on, where the server gives one."""
        self.metadata: Mapping[str, str] = info.get("metadata") or {}


class ResumeRefusedError(TrainingAPIError, httpx.HTTPStatusError):
    """The server does not let a job go on."""

    def __init__(self, context: str, response: httpx.Response) -> None:
        super().__init__(context, response)
        self.request = response.request
        self.response = response


class TrainerStoppedError(ClientError, RuntimeError):
    """A trainer that was waited for will not become ready by itself."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class TrainerTimeoutError(ClientError, TimeoutError):
    """A trainer did not become ready in time."""


def _document(response: httpx.Response) -> Mapping[str, Any]:
    """The part of an answer that says what went wrong: all of it, or what stands under `error`."""
    try:
        document = response.json()
    except ValueError:
        return {}
    if not isinstance(document, Mapping):
        return {}
    error = document.get("error", document)
    return error if isinstance(error, Mapping) else {"message": str(error)}


def _message(document: Mapping[str, Any], response: httpx.Response) -> str:
    return str(document.get("message") or response.text.strip()[:TEXT_SHOWN] or response.reason_phrase)


def _error_info(document: Mapping[str, Any]) -> Mapping[str, Any]:
    details = document.get("details")
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, Mapping) and detail.get("@type") == ERROR_INFO:
            return detail
    return {}
