"""What runs sees what it was given, and what it writes is kept to the byte; what fails is explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer, json_lines, pids, shown_of
from trainmaster.protocol.launch import Lifetime

RAW = b"".join(
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

TALKS = """
import sys, time
for n in range(200):
    print(n, flush=n % 7 == 0)
    print(n, file=sys.stderr)
    time.sleep(0.002)
print("\\n".join(map(str, range(200, 10_000))))
print("x" * 300_000 + "end")
print("no line end", end="")
"""

LOOKS = """
import json, os, pathlib, subprocess, sys
large = sum(len(value) for name, value in os.environ.items() if name.startswith("LARGE_"))
tool = subprocess.run(["./bin/tool"], capture_output=True, text=True, check=True).stdout
files = sorted(str(path) for path in pathlib.Path().rglob("*") if path.is_file() and "__pycache__" not in path.parts)
told = {"args": sys.argv[1:], "colour": os.environ["COLOUR"], "large": large, "tool": tool, "files": files}
print(json.dumps(told), flush=True)
pathlib.Path("left-behind").write_text("by the job")
pathlib.Path(os.environ["TRAINMASTER_OUTPUT_DIR"], "below").mkdir()
pathlib.Path(os.environ["TRAINMASTER_OUTPUT_DIR"], "below", "made.bin").write_bytes(bytes(range(256)))
"""

RAISES = """
def train():
    loss = {}
    return loss["nothing"]

print("before")
train()
"""

FAILURES: list[tuple[list[str], str, str, dict[str, Any]]] = [
    (
        ["sh", "-c", "echo why >&2; exit 3"],
        *("EXITED_NONZERO", "user"),
        {"exit_code": 3, "signal": None, "last_lines": ["why"], "rank": 0, "step": "main"},
    ),
    (
        ["python3", "-c", RAISES],
        *("EXITED_NONZERO", "user"),
        {"exit_code": 1, "frame": "File \"<string>\", line 4, in train: KeyError: 'nothing'"},
    ),
    (["there-is-no-such-command"], "COMMAND_NOT_FOUND", "user", {"exit_code": 127}),
    (
        ["sh", "-c", "echo last; kill -9 $$"],
        *("KILLED_BY_SIGNAL", "infrastructure"),
        {"exit_code": None, "signal": "SIGKILL", "last_lines": ["last"]},
    ),
    (
        ["python3", "-c", "raise MemoryError('8 TB of weights')"],
        *("OUT_OF_MEMORY", "user"),
        {"exit_code": 1, "frame": 'File "<string>", line 1, in <module>: MemoryError: 8 TB of weights'},
    ),
]


@long_on("local-files")
def test_output_is_kept_to_the_byte_and_shown_by_lines(server: JobServer) -> None:
    workload = {
        "argv": ["sh", "-c", "cat raw; echo wrong >&2"],
        "files": [{"path": "raw", "sha256": server.upload_files(RAW)}],
    }
    job_id = server.submit_workload("command", workload)
    job = server.until(job_id)
    assert (job["status"], job["status_reason"], job["error"]) == ("COMPLETED", "SUCCEEDED", None)
    assert (server.raw_log(job_id), server.raw_log(job_id, "err")) == (RAW, b"wrong\n")
    lines = [line.decode(errors="replace") for line in RAW.split(b"\n")]
    lines[3:5] = ["windows", "progress 2"]  # of a line that was written again and again, its last state
    assert server.lines(job_id, stream="stdout") == lines
    assert server.lines(job_id, stream="stderr") == ["wrong"]
    assert sorted(server.lines(job_id)) == sorted([*lines, "wrong"])
    assert server.statuses(job_id) == ["PENDING", "QUEUED", "SCHEDULING", "PREPARING", "TRAINING", "COMPLETED"]


@long_on("local-files", "container")
def test_followed_log_is_whole_and_in_order_from_its_start_to_its_end(server: JobServer) -> None:
    job_id = server.submit_source(TALKS)
    events = list(server.follow(f"/v1/jobs/{job_id}/logs?follow=true"))
    assert [json.loads(event["data"])["status"] for event in events if event.get("event") == "end"] == ["COMPLETED"]
    assert events[-1]["data"] == "[DONE]"
    numbers = [str(n) for n in range(10_000)]
    *pieces, last = messages(events, "stdout")
    assert (pieces[:10_000], last) == (numbers, "no line end")
    assert "".join(pieces[10_000:]) == "x" * 300_000 + "end"
    assert messages(events, "stderr") == numbers[:200]
    # Whoever was cut off goes on behind the last line that it had.
    read = [event for event in events if event.get("event") == "log"][:5_000]
    rest = list(server.follow(f"/v1/jobs/{job_id}/logs?follow=true", **{"Last-Event-ID": read[-1]["id"]}))
    for stream in ("stdout", "stderr"):
        assert messages(read, stream) + messages(rest, stream) == messages(events, stream)
    tail = server.data("GET", f"/v1/jobs/{job_id}/logs?tail=1&stream=stdout")  # streams are merged to within 0.2 s
    assert ([line["message"] for line in tail["lines"]], tail["complete"]) == (["no line end"], True)


def messages(events: list[dict[str, str]], stream: str) -> list[str]:
    lines = [json.loads(event["data"]) for event in events if event.get("event") == "log"]
    return [line["message"] for line in lines if line["stream"] == stream]


@long_on("local-http", "container")  # tests/contract/container/test_container_jobs.py has failures of containers
def test_failure_says_what_it_was_whose_it_was_and_what_to_do(server: JobServer) -> None:
    jobs = [server.submit(*argv) for argv, _, _, _ in FAILURES]
    for job_id, (_, error_type, fault, told) in zip(jobs, FAILURES, strict=True):
        job = server.until(job_id, "FAILED")
        error = job["error"]
        assert (error["error_type"], error["fault"]) == (error_type, fault)
        assert {name: error[name] for name in told} == told
        assert error["advice"]
        assert job["error_type"] == error_type
        assert job["error_message"] == error["error_message"] != ""
        assert job["attempts"][0]["error"] == error


@long_on("local-files")
def test_job_has_its_files_and_variables_where_it_works_and_what_it_leaves_is_kept(
    backend: BackendUnderTest, server: JobServer
) -> None:
    environment = {"COLOUR": "blue", **{f"LARGE_{number}": chr(0xE9) * 50_000 for number in range(8)}}
    files = [
        {"path": "data/names.txt", "sha256": server.upload_files(b"ada\n")},
        {"path": "bin/tool", "sha256": server.upload_files(b"#!/bin/sh\necho ran $0\n"), "executable": True},
    ]
    # The directory is the job's own: what another one leaves there is not seen by the next.
    for word in ("first", "second"):
        job_id = server.submit_source(LOOKS, word, "ä b", workload={"environment": environment, "files": [*files]})
        assert server.until(job_id)["status"] == "COMPLETED", server.lines(job_id)
        assert json_lines(server.lines(job_id)) == [
            {
                "args": [word, "ä b"],
                "colour": "blue",
                "large": 400_000,
                "tool": "ran ./bin/tool\n",
                "files": ["bin/tool", "data/names.txt", "main.py"],
            }
        ]
    listed = server.data("GET", f"/v1/jobs/{job_id}/artifacts?kind=output")["artifacts"]
    assert [(each["path"], each["size_bytes"]) for each in listed] == [("output/below/made.bin", 256)]
    assert server.artifact(job_id, "output/below/made.bin") == bytes(range(256))
    backend.wait_until_nothing_is_left(job_id)


@long_on("local-files")
def test_secrets_reach_every_rank_and_lie_nowhere(backend: BackendUnderTest, server: JobServer) -> None:
    secret = "canary-environment-8d1f\nwith 'quotes' and ☃"
    program = 'test "${#PASSWORD}" -gt 20 && echo "rank $RANK has it"; exec sleep 600'
    workload = {"argv": ["bash", "-c", program], "environment": {"PASSWORD": secret}, "ranks_per_node": 2}
    nodes = 2
    job_id = server.submit_workload("command", workload, resource_config={"gpu_count": 0, "node_count": nodes})
    for rank in range(2 * nodes):
        server.wait_for_line(job_id, f"rank {rank} has it")
    needle = secret.splitlines()[0]
    files = {path: content(path) for path in (*server.directory.rglob("*"), server._log_path)}
    assert any(b"has it" in written for written in files.values())
    assert not [path for path, written in files.items() if needle.encode() in written]
    assert not [pid for pid in pids() if needle.encode() in shown_of(pid, "cmdline")]
    assert needle not in backend.shown_by_the_engine(job_id)
    shown = [server.ask("GET", f"/v1/jobs/{job_id}{what}").text for what in ("", "/events", "/logs", "/artifacts")]
    assert not any(needle in text for text in shown)
    server.control(job_id, "cancel")
    assert server.until(job_id, "CANCELLED")["placement"] is None
    backend.wait_until_nothing_is_left(job_id)


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # a directory, or it went in the meantime


def test_what_a_backend_lacks_is_refused_at_submission(backend: BackendUnderTest, server: JobServer) -> None:
    wishes: list[tuple[bool, str, dict[str, Any]]] = [
        (backend.capabilities.images, "workload.image", {"kind": "command", "argv": ["true"], "image": "no/such:1"}),
        (Lifetime.SERVICE in backend.capabilities.lifetimes, "backend", {"kind": "service", "argv": ["true"]}),
    ]
    for is_there, field, workload in wishes:
        answer = server.ask("POST", "/v1/jobs", {"name": "n", "workload": workload})
        if is_there:
            assert answer.is_success
            server.ask("POST", f"/v1/jobs/{answer.json()['data']['job_id']}/cancel")  # it may have failed already
        else:
            assert (answer.status_code, answer.json()["error"]["details"][0]["field"]) == (400, field)
