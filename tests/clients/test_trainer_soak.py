"""One trainer, many clients, minutes on end. Too long for CI: `make test-long`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from client_programs import PROGRAMS, Client, resident_mb
from real_server import RealServer

CLIENTS = 8
SOAK_S = 600.0
SETTLED_AFTER_ROUNDS = 3
"""What is cached once is cached then."""
GROWTH = 1.1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_results_are_neither_lost_nor_swapped_and_memory_stays(
    service_server: RealServer, client: Callable[[str], Client]
) -> None:
    tinker = client("tinker")

    def run(number: int) -> Any:
        return json.loads(tinker.run(PROGRAMS / "soak.py", str(number)).splitlines()[-1])

    alone = [run(number) for number in range(CLIENTS)]
    assert all(each["losses"][-1] < each["losses"][0] for each in alone)
    assert len({json.dumps(each["losses"]) for each in alone}) == CLIENTS
    until, rounds, settled_mb = time.monotonic() + SOAK_S, 0, 0.0
    job_id = next(job["job_id"] for job in service_server.data("GET", "/v1/jobs")["jobs"])
    with ThreadPoolExecutor(CLIENTS) as pool:
        while time.monotonic() < until:
            # To the bit: whoever trains beside it changes nothing.
            assert list(pool.map(run, range(CLIENTS))) == alone
            rounds += 1
            if rounds == SETTLED_AFTER_ROUNDS:
                settled_mb = resident_mb(job_id)
    assert rounds > SETTLED_AFTER_ROUNDS
    assert resident_mb(job_id) < GROWTH * settled_mb
