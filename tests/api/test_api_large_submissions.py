"""Requests at the size limits are read in threads, few at a time; everybody else is answered meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_world import COMMAND, Api, wait_for

from patience import PATIENCE_S
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.http.routes import submissions

LARGE = {**COMMAND, "workload": {"kind": "command", "argv": ["x" * 1000] * 100}}


class SlowParser:
    """Reads requests as usual, but only when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.most = 0
        self._under_way: set[int] = set()
        self.threads: set[int] = set()

    def __call__(self, document: object, *, seed: int | None = None) -> SubmitJobRequest:
        self.threads.add(threading.get_ident())
        self._under_way.add(threading.get_ident())
        self.most = max(self.most, len(self._under_way))
        assert self.go.wait(PATIENCE_S)
        self._under_way.discard(threading.get_ident())
        return parse_submit(document, seed=seed)


def submit(api: Api, job_id: str) -> Any:
    return api.call("POST", "/v1/jobs", 201, json=LARGE, timeout=PATIENCE_S)


def validate(api: Api, job_id: str) -> Any:
    return api.call("POST", "/v1/jobs/validate", json=LARGE, timeout=PATIENCE_S)


def clone(api: Api, job_id: str) -> Any:
    return api.call("POST", f"/v1/jobs/{job_id}/clone", 201, timeout=PATIENCE_S)


@pytest.mark.parametrize("ask", [submit, validate, clone])
def test_others_are_answered_while_large_requests_are_read(
    api: Api, ask: Callable[[Api, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = str(submit(api, "")["job_id"])
    parser = SlowParser()
    for module in ("submissions", "controls"):
        monkeypatch.setattr(f"trainmaster.server.http.routes.{module}.parse_submit", parser)
    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask, api, job_id) for _ in range(6)]
        try:
            wait_for(lambda: len(parser.threads) == submissions.AT_ONCE)
            for _ in range(20):
                api.call("GET", "/v1/jobs", timeout=PATIENCE_S / 2)
            assert not any(each.done() for each in asking)
        finally:
            parser.go.set()
        for each in asking:
            each.result(PATIENCE_S)
    assert parser.most == submissions.AT_ONCE
