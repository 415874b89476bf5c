"""An engine that takes connections and never answers: whoever does not need it notices nothing, and the server ends."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from job_server import JobServer
from patience import PATIENCE_S
from real_server import wait_for


@pytest.fixture
def hanging_host() -> Iterator[str]:
    # Short, because a socket's path must be.
    with tempfile.TemporaryDirectory(prefix="tm-hangs-", dir="/tmp") as place, socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(f"{place}/engine.sock")
        hangs.listen(256)
        yield f"unix://{place}/engine.sock"


def test_an_engine_that_hangs_takes_neither_the_api_nor_local_jobs_nor_the_end_of_the_server(
    hanging_host: str, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(f'container_host = "{hanging_host}"\n')
    server = JobServer(tmp_path)
    try:
        server.start()
        workload = {"kind": "container", "image": "localhost/any:1"}
        contained = [server.submit_workload("container", workload, backend="container") for _ in range(6)]
        with ThreadPoolExecutor(60) as many:
            looks = [many.submit(server.data, "GET", "/v1/backends/container") for _ in range(60)]
            assert server.until(server.submit("true"))["status"] == "COMPLETED"
            for look in looks:
                assert "answer" in look.result(PATIENCE_S)["engine"]["problem"]
        wait_for(lambda: "timed out" in (server.job(contained[0])["pending_reason"] or ""), "the reason why it waits")
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 100
    finally:
        server.clean_up()
