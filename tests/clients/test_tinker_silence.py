"""A client that sleeps longer than the server waits: its unsaved model is saved for it, and goes on from there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from client_model import HUB_NAME
from client_programs import PROGRAMS, Client, facts

from process_signals import kill_marked
from real_server import RealServer, running, wait_for

PROGRAM = str(PROGRAMS / "tinker_silence.py")
WEEK_S = 7 * 86400


@pytest.fixture(scope="module")
def service_server(ground: Path) -> Iterator[RealServer]:
    """A server that takes clients for dead as soon as one may."""
    flags = ["--model-alias", f"{HUB_NAME}={ground / 'model'}"]
    with running(ground / "data", *flags, TRAINMASTER_TINKER_SILENT_S="20") as started:
        yield started
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]


def test_client_that_slept_goes_on_to_the_bit(client: Callable[[str], Client], service_server: RealServer) -> None:
    def sleep(said: dict[str, Any]) -> Any:
        """Until what it has not saved is on record."""
        stem = said["model_id"].replace(":", "-")
        kill_marked(said["pid"], PROGRAM, signal.SIGSTOP)
        try:
            return wait_for(lambda: saved(stem), f"a checkpoint of {said['model_id']}")
        finally:
            kill_marked(said["pid"], PROGRAM, signal.SIGCONT)

    def saved(stem: str) -> Any:
        [job] = service_server.data("GET", "/v1/jobs")["jobs"]
        listed = service_server.data("GET", f"/v1/jobs/{job['job_id']}/checkpoints")["checkpoints"]
        return next((each for each in listed if each["name"].startswith(stem)), None)

    results = client("tinker").scenarios("tinker_silence.py", asked={"put me to sleep until it is saved": sleep})
    found = facts(results, "slept")
    assert found["saved"]["name"].endswith("-step-2")
    assert found["saved"]["name"] in found["woken"]["message"]
    assert found["woken"]["category"].lower().endswith("server")
    expires_at = datetime.fromisoformat(found["saved"]["expires_at"]).timestamp()
    assert expires_at == pytest.approx(time.time() + WEEK_S, abs=300)
    assert found["interrupted"] == found["uninterrupted"]
    assert len(set(found["uninterrupted"])) == 5
