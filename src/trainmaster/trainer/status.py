"""`update_trainjob_status`: what training code says of its progress, wherever Kubeflow's protocol is spoken.

Standard library only, as it runs inside of jobs. It never raises: a training must not end for want of a report.
"""

from __future__ import annotations

import atexit
import http.client
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainmaster.protocol.environment import KUBEFLOW_CA_CERT, KUBEFLOW_TOKEN, KUBEFLOW_URL

TIMEOUT_S = 5.0
"""A report holds up the training for no longer than this."""
INTERVAL_S = 5.0
"""Between two reports that arrived. One that comes sooner is held back, and dropped for the next; the last one of all
is sent when the process ends, so that a job is not left at the progress that it had seconds before."""
TOKEN_AGE_S = 300.0
"""Tokens are renewed in their file, well before they expire."""
MAX_METRICS = 256

log = logging.getLogger(__name__)


def update_trainjob_status(
    progress_percent: int | None = None,
    estimated_remaining_seconds: int | None = None,
    metrics: dict[str, float | int | str] | None = None,
) -> bool:
    """Report how far the job is, from inside of it. Call it as often as you like.

    Args:
        progress_percent: 0 to 100; what lies beyond is cut.
        estimated_remaining_seconds: Until the end; at least 0.
        metrics: The latest value of each, at most 256.

    Returns:
        Whether it arrived by now: not outside of a job, not within five seconds of the one before, not when refused.
    """
    try:
        return _reports.send(_body(progress_percent, estimated_remaining_seconds, metrics), os.environ)
    except Exception as error:
        log.warning("the progress of the job was not reported: %s", error)
        return False


def send_last_report() -> None:
    """At the end of the process: send what was held back, if anything was."""
    try:
        _reports.send_held(os.environ)
    except Exception as error:
        log.warning("the last progress of the job was not reported: %s", error)


class Reports:
    """Reports of this process: what has to be remembered between two of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived_at = -INTERVAL_S
        self._token: tuple[str, str, float] | None = None
        """Its file, what was in it, and when that was read."""
        self._held: bytes | None = None
        """The report that came too soon after another."""

    def renew(self) -> None:
        """After a fork: the thread that had the lock is not in the child, and what is held is the parent's to send."""
        self._lock = threading.Lock()
        self._held = None

    def send_held(self, environment: Mapping[str, str]) -> None:
        if self._held is not None:
            self._arrived_at = -INTERVAL_S
            self.send(self._held, environment)

    def send(self, body: bytes, environment: Mapping[str, str]) -> bool:
        """Whether it arrived."""
        url, token_file = environment.get(KUBEFLOW_URL), environment.get(KUBEFLOW_TOKEN)
        # Another thread's report that is on its way is as good as this one.
        if not url or not token_file or not self._lock.acquire(blocking=False):
            return False
        try:
            if time.monotonic() - self._arrived_at < INTERVAL_S:
                self._held = body
                return False
            status = _post(url, body, self._token_in(token_file), environment.get(KUBEFLOW_CA_CERT))
            if status == http.client.OK:
                self._arrived_at = time.monotonic()
                self._held = None
                return True
            if status == http.client.UNAUTHORIZED:
                self._token = None
            log.warning("the progress of the job was refused with status %d", status)
            return False
        finally:
            self._lock.release()

    def _token_in(self, path: str) -> str:
        now = time.monotonic()
        if self._token is None or self._token[0] != path or now - self._token[2] > TOKEN_AGE_S:
            self._token = (path, Path(path).read_text().strip(), now)
        return self._token[1]


_reports = Reports()
os.register_at_fork(after_in_child=_reports.renew)
atexit.register(send_last_report)


def _body(percent: float | None, remaining_s: float | None, metrics: Mapping[str, Any] | None) -> bytes:
    status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).isoformat()}
    if percent is not None:
        status["progressPercentage"] = min(max(percent, 0), 100)
    if remaining_s is not None:
        status["estimatedRemainingSeconds"] = max(remaining_s, 0)
    if metrics:
        given = list(metrics.items())[:MAX_METRICS]
        status["metrics"] = [{"name": str(name), "value": str(value)} for name, value in given]
    return json.dumps({"trainerStatus": status}, allow_nan=False).encode()


def _post(url: str, body: bytes, token: str, ca: str | None) -> int:
    """The status of the answer. Without proxies, as the server is near, and without following redirects."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca if ca and Path(ca).exists() else None)
        connection = http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()
