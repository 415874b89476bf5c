"""Commands: their logs to the last byte, and what is said about those that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from local_servers import PYTHON, LocalServer


def test_command_runs_and_its_log_is_whole(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "echo out; echo err >&2")
    job = server.until(job_id)
    assert (job["status"], job["status_reason"], job["error"]) == ("COMPLETED", "SUCCEEDED", None)
    assert sorted(server.lines(job_id)) == ["err", "out"]
    assert server.lines(job_id, stream="stdout") == ["out"]
    assert server.lines(job_id, stream="stderr") == ["err"]
    assert [event["to"] for event in server.events_of(job_id, "status")] == [
        *("PENDING", "QUEUED", "SCHEDULING", "PREPARING", "TRAINING", "COMPLETED")
    ]


def test_unusual_bytes_are_kept_to_the_byte(server: LocalServer, scripts: Path) -> None:
    raw = b"".join(
        [
            b"tab\there, bell\x07, escape \x1b[31mred\x1b[0m, nul\0\n",
            b"not utf-8: \xff\xfe\x80\n",
            "umlaut ä, emoji \N{ROCKET}, separators \u2028\u2029\x85\x0b\x0c in one line\n".encode(),
            b"windows\r\n",
            b"progress 1\rprogress 2\n",
            b"\n",
            b"no line end",
        ]
    )
    (scripts / "raw").write_bytes(raw)
    job_id = server.submit("cat", str(scripts / "raw"))
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.raw_log(job_id) == raw
    lines = [line.decode(errors="replace") for line in raw.split(b"\n")]
    lines[3] = "windows"
    assert server.lines(job_id) == lines


def test_threads_of_ranks_follow_from_the_cores_that_the_job_books(server: LocalServer) -> None:
    show = ["sh", "-c", 'echo "threads: $OMP_NUM_THREADS"']
    cores = server.data("GET", "/v1/nodes")["nodes"][0]["cpu_cores"]["total"]
    booked = {"gpu_count": 0, "cpu_cores": cores}
    alone = server.submit_workload("command", {"argv": show}, resource_config=booked)
    chosen = {"argv": show, "environment": {"OMP_NUM_THREADS": "3"}}
    said = server.submit_workload("command", chosen, resource_config=booked)
    of_the_server = os.environ.get("OMP_NUM_THREADS")  # which its jobs inherit
    for job_id, threads in ((alone, of_the_server or cores), (said, 3)):
        server.until(job_id)
        assert server.lines(job_id) == [f"threads: {threads}"]


def test_long_line_is_whole(server: LocalServer) -> None:
    job_id = server.submit(PYTHON, "-c", "print('x' * 300_000 + 'end'); print('after')")
    server.until(job_id)
    *pieces, last = server.lines(job_id)
    assert "".join(pieces) == "x" * 300_000 + "end"
    assert last == "after"


def test_ten_thousand_lines_come_in_order_and_from_their_end(server: LocalServer) -> None:
    job_id = server.submit("seq", "10000")
    server.until(job_id)
    assert server.lines(job_id) == [str(n) for n in range(1, 10_001)]
    last = server.data("GET", f"/v1/jobs/{job_id}/logs?tail=3")
    assert [line["message"] for line in last["lines"]] == ["9998", "9999", "10000"]
    assert last["complete"]


def test_followed_log_is_whole_from_start_to_end(server: LocalServer) -> None:
    program = """if True:
        import sys, time
        for n in range(400):
            print(n, flush=n % 7 == 0)
            print(n, file=sys.stderr)
            time.sleep(0.002)
        print("no line end", end="")
    """
    job_id = server.submit(PYTHON, "-u", "-c", program)
    events = list(server.follow(f"/v1/jobs/{job_id}/logs?follow=true"))
    assert [json.loads(event["data"])["status"] for event in events if event.get("event") == "end"] == ["COMPLETED"]
    assert events[-1]["data"] == "[DONE]"
    numbers = [str(n) for n in range(400)]
    assert messages(events, "stdout") == [*numbers, "no line end"]
    assert messages(events, "stderr") == numbers
    read = [event for event in events if event.get("event") == "log"][:500]
    rest = list(server.follow(f"/v1/jobs/{job_id}/logs?follow=true", **{"Last-Event-ID": read[-1]["id"]}))
    for stream in ("stdout", "stderr"):
        assert messages(read, stream) + messages(rest, stream) == messages(events, stream)


def messages(events: list[dict[str, str]], stream: str) -> list[str]:
    lines = [json.loads(event["data"]) for event in events if event.get("event") == "log"]
    return [line["message"] for line in lines if line["stream"] == stream]


RAISES = """
def train():
    loss = {}
    return loss["nothing"]

print("before")
train()
"""


@pytest.mark.parametrize(
    ("argv", "error_type", "fault", "told"),
    [
        pytest.param(
            ["sh", "-c", "echo why >&2; exit 3"],
            *("EXITED_NONZERO", "user"),
            {"exit_code": 3, "signal": None, "last_lines": ["why"], "rank": 0, "step": "main"},
            id="exit 3",
        ),
        pytest.param(
            [PYTHON, "-c", RAISES],
            *("EXITED_NONZERO", "user"),
            {"exit_code": 1, "frame": "File \"<string>\", line 4, in train: KeyError: 'nothing'"},
            id="exception",
        ),
        pytest.param(
            ["there-is-no-such-command"], "COMMAND_NOT_FOUND", "user", {"exit_code": 127}, id="command not found"
        ),
        pytest.param(
            ["sh", "-c", "echo last; kill -9 $$"],
            *("KILLED_BY_SIGNAL", "infrastructure"),
            {"exit_code": None, "signal": "SIGKILL", "last_lines": ["last"]},
            id="kill -9",
        ),
        pytest.param(
            [PYTHON, "-c", "raise MemoryError('8 TB of weights')"],
            *("OUT_OF_MEMORY", "user"),
            {"exit_code": 1, "frame": 'File "<string>", line 1, in <module>: MemoryError: 8 TB of weights'},
            id="out of memory",
        ),
    ],
)
def test_failure_says_what_it_was_whose_it_was_and_what_to_do(
    server: LocalServer, argv: list[str], error_type: str, fault: str, told: dict[str, Any]
) -> None:
    job_id = server.submit(*argv)
    job = server.until(job_id, "FAILED")
    error = job["error"]
    assert (error["error_type"], error["fault"]) == (error_type, fault)
    assert {name: error[name] for name in told} == told
    assert error["advice"]
    assert job["error_type"] == error_type
    assert job["error_message"] == error["error_message"] != ""
    assert job["attempts"][0]["error"] == error
