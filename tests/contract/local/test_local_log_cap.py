"""A log that reaches its cap keeps its head and its tail, over both transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local_servers import LocalServer, serving

CAP = 1 << 20
FLOOD = "echo first; yes 'a line of some length that says nothing' | head -c 200000000; echo; echo last"


@pytest.fixture(scope="module")
def shared_server(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp(f"{transport}-capped") / "data"
    with serving(directory, transport, TRAINMASTER_LOG_CAP_MB="1") as server:
        yield server


def test_job_that_prints_as_fast_as_it_can_keeps_head_and_tail(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", FLOOD)
    server.until(job_id, "COMPLETED")
    (log,) = server.directory.glob(f"runs/{job_id}/1/nodes/0/logs/main.0.out")
    assert log.stat().st_size > 200_000_000
    assert log.stat().st_blocks * 512 < 2 * CAP
    lines = server.lines(job_id, limit=10_000)
    assert (lines[0], lines[-1]) == ("first", "last")
    assert [line for line in lines if "bytes removed: the log reached its cap of 1 MiB" in line]
    assert len([line for line in lines if "bytes removed" in line]) == 1
    assert sum(len(line) + 1 for line in lines) <= CAP + 200
    assert not any("\0" in line for line in lines)
    assert server.lines(job_id, tail=1)[:1] == ["last"]


def test_log_below_the_cap_is_whole(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "seq 1 20000; seq 1 10 >&2")
    server.until(job_id, "COMPLETED")
    assert server.lines(job_id, stream="stdout", limit=10_000) == [str(n) for n in range(1, 20_001)]
    assert not list(server.directory.glob(f"runs/{job_id}/1/nodes/0/logs/*.gap.json"))


def test_both_outputs_have_a_cap_of_their_own(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "seq 1 400000 >&2; echo out")
    server.until(job_id, "COMPLETED")
    errors = server.lines(job_id, stream="stderr", limit=10_000)
    assert (errors[0], errors[-1]) == ("1", "400000")
    assert any("bytes removed" in line for line in errors)
    assert server.lines(job_id, stream="stdout") == ["out"]


def test_reason_of_a_failure_is_found_at_the_end_of_a_log_that_was_cut(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "seq 1 400000 >&2; echo it broke >&2; exit 3")
    failed = server.until(job_id, "FAILED")
    assert failed["error"]["last_lines"][-1] == "it broke"
