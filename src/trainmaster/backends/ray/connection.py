"""Requests to the dashboard of a Ray cluster."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from trainmaster.backends.cluster.engine import EngineAwayError
from trainmaster.backends.ray.options import RayOptions

TIMEOUT_S = 30.0
LIMIT = 10_000
"""The most entries that the state API lists."""
_READS = 3
"""Now and then, a file is shown as if it were empty."""
_ASKS = 4
"""How often a request is sent to a dashboard, or to the proxy before it, that has too many."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_TOO_MANY = 429
_FORBIDDEN = (401, 403, 407)
_REFUSALS = ("Request failed with status code 400", "already exists", "A file is not found at")
"""What says that a status of 500 is an answer, and not a failure."""


class RayRefusedError(Exception):
    """The dashboard answered that it will not do this; the message is what it said."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RayConnection:
    """Thread-safe. Raises EngineAwayError if the dashboard does not answer, or answers that something behind it does
    not, and RayRefusedError for every other answer that is no success."""

    def __init__(self, options: RayOptions) -> None:
        self.address = options.address.rstrip("/")
        headers = dict(_header(line) for line in options.headers.get_secret_value().splitlines() if line.strip())
        if token := options.token.get_secret_value():
            headers["Authorization"] = f"Bearer {token}"
        verify: ssl.SSLContext | bool = True
        if options.ca_file:
            verify = ssl.create_default_context(cafile=options.ca_file)
        self._http = httpx.Client(
            base_url=self.address, headers=headers, verify=verify, timeout=TIMEOUT_S, follow_redirects=True
        )

    def get(self, path: str, **parameters: Any) -> Any:
        return self._send("GET", path, params=parameters)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._send("POST", path, json=body)

    def put(self, path: str, data: bytes) -> None:
        self._send("PUT", path, content=data)

    def delete(self, path: str) -> None:
        self._send("DELETE", path)

    def states(self, kind: str, *, detail: bool = False, **filters: str) -> list[dict[str, Any]]:
        """A list of the state API: `nodes`, `actors`, `placement_groups`."""
        parameters: list[tuple[str, str]] = [("limit", str(LIMIT))]
        if detail:
            parameters.append(("detail", "1"))
        for key, value in filters.items():
            parameters += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        answer = self._send("GET", f"/api/v0/{kind}", params=parameters)
        if not answer.get("result"):
            raise EngineAwayError(f"{self.address}: {answer.get('msg')}")
        result = answer["data"]["result"]["result"]
        return list(result)

    def log_file(self, node_id: str, name: str) -> str | None:
        """The content of a file among Ray's logs on a node, which is not empty; None: there is none."""
        parameters = {"node_id": node_id, "filename": name, "lines": "-1"}
        for _ in range(_READS):
            try:
                if text := self._send("GET", "/api/v0/logs/file", is_text=True, params=parameters):
                    return str(text)
            except RayRefusedError:
                return None
        raise EngineAwayError(f"{self.address} does not show {name}")

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, *, is_text: bool = False, **arguments: Any) -> Any:
        try:
            response = self._answer(method, path, **arguments)
            if response.status_code in _FORBIDDEN:
                raise EngineAwayError(
                    f"{self.address} refuses us with status {response.status_code}; set the option token or headers"
                )
            # The head passes on in this way what its agent refused.
            passed_on = any(words in response.text for words in _REFUSALS)
            if response.status_code >= 500 and not passed_on:
                raise EngineAwayError(f"{self.address} answers with status {response.status_code}: {_last(response)}")
            if response.status_code == _TOO_MANY:
                raise EngineAwayError(f"{self.address} has too many requests")
            if not response.is_success:
                raise RayRefusedError(response.status_code, _last(response))
            if is_text:
                return response.text
            if response.headers.get("content-type", "").startswith("application/json"):
                return response.json()
        except httpx.HTTPError as error:
            raise EngineAwayError(f"{self.address}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise EngineAwayError(f"{self.address} answers with what is not JSON") from error
        if method == "GET":
            raise EngineAwayError(f"{self.address}{path} is no dashboard of Ray: it answers with a page")
        return None

    def _answer(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """To look at jobs takes several requests: one of them may always be one too many."""
        response = self._http.request(method, path, **arguments)
        for _ in range(1, _ASKS):
            if response.status_code != _TOO_MANY:
                break
            time.sleep(_pause_s(response))
            response = self._http.request(method, path, **arguments)
        return response


def _pause_s(response: httpx.Response) -> float:
    told = response.headers.get("retry-after", "")
    return min(float(told), _LONGEST_PAUSE_S) if told.isdigit() else _PAUSE_S


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _last(response: httpx.Response) -> str:
    """The end of an answer: Ray sends whole tracebacks."""
    lines: Sequence[str] = response.text.strip().splitlines()
    return lines[-1][-500:] if lines else response.reason_phrase
