"""A real server, with what tests of jobs ask of it: submitting, steering, following, looking into run directories."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from patience import PATIENCE_S
from real_server import ENDED, RealServer, wait_for
from trainmaster.protocol.run_directory import RunDirectory, log_stream

NO_GPU = {"gpu_count": 0}


class JobServer(RealServer):
    """A server that runs jobs, whatever its backend."""

    def submit_workload(self, kind: str, workload: dict[str, Any], **document: Any) -> str:
        """Submit a job of any kind that needs no GPU; its id."""
        body = {"name": "test", "workload": {"kind": kind, **workload}, "resource_config": NO_GPU, **document}
        return str(self.data("POST", "/v1/jobs", body)["job_id"])

    def submit_source(self, source: str, *arguments: object, workload: Any = None, **document: Any) -> str:
        """Submit a Python program, which is shipped with the job; its id."""
        files = [{"path": "main.py", "sha256": self.upload_files(source.encode())}, *(workload or {}).pop("files", [])]
        shipped = {"path": "main.py", "args": [str(argument) for argument in arguments], "files": files}
        return self.submit_workload("script", {**shipped, **(workload or {})}, **document)

    def upload_files(self, content: bytes) -> str:
        """Upload a file by its content; its digest."""
        digest = hashlib.sha256(content).hexdigest()
        assert self.ask("PUT", f"/v1/blobs/{digest}", content=content).is_success
        return digest

    def control(self, job_id: str, action: str, **body: Any) -> Any:
        """Give a command that must succeed."""
        return self.data("POST", f"/v1/jobs/{job_id}/{action}", body)

    def wait_until_deleted(self, job_id: str) -> None:
        """Wait until nobody is shown the job any more."""
        wait_for(lambda: self.ask("GET", f"/v1/jobs/{job_id}").status_code == 404, f"the deletion of {job_id}")

    def follow(self, path: str, **headers: str) -> Iterator[dict[str, str]]:
        """The server-sent events of a stream, from its start to its end, each with its fields."""

        headers = {"Authorization": f"Bearer {self.key}", **headers}
        with httpx.stream("GET", f"{self.url}{path}", headers=headers, verify=False, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if not line and fields:
                    yield fields
                    fields = {}
                elif line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value

    def run_directory(self, job_id: str, attempt: int = 1) -> RunDirectory:
        """An attempt's run directory on the server's side."""
        return RunDirectory(self.directory / "runs" / job_id / str(attempt))

    def raw_log(self, job_id: str, channel: str = "out") -> bytes:
        """What rank 0 wrote, to the byte."""
        return (self.run_directory(job_id).path / log_stream(0, "main", 0, channel)).read_bytes()

    def artifact(self, job_id: str, path: str) -> bytes:
        """A file that the job left, as users get it."""
        answer = self.ask("GET", f"/v1/jobs/{job_id}/artifacts/{path}")
        assert answer.is_success, answer.text
        return answer.content

    def events_of(self, job_id: str, kind: str) -> list[Any]:
        """The events of one type."""
        return [event for event in self.events(job_id) if event["type"] == kind]

    def statuses(self, job_id: str) -> list[str]:
        """All that it has been, in order."""
        return [event["to"] for event in self.events_of(job_id, "status")]

    def wait_for_event(self, job_id: str, kind: str) -> Any:
        """The first event of a type."""
        return self._wait_for(lambda: self.events_of(job_id, kind), job_id, f"the event '{kind}'")[0]

    def wait_for_line(self, job_id: str, text: str, **query: Any) -> str:
        """The first line of its log that holds a text."""
        lines = self._wait_for(
            lambda: [line for line in self.lines(job_id, **query) if text in line], job_id, f"the line '{text}'"
        )
        return str(lines[0])

    def _wait_for(self, condition: Callable[[], list[Any]], job_id: str, what: str) -> list[Any]:
        """What a job brings about; not for ever, where it has ended without."""

        def found() -> list[Any]:
            job = self.job(job_id)
            there = condition()
            assert there or job["status"] not in ENDED, f"{job['status']} without {what}: {job['error']}"
            return there

        there: list[Any] = wait_for(found, f"{what} of {job_id}")
        return there


def processes_marked(mark: str) -> set[int]:
    """Every process of this machine, in whatever container, that has a text in its arguments or its variables."""
    return {pid for pid in pids() if mark.encode() in shown_of(pid, "cmdline") + shown_of(pid, "environ")}


def pids() -> set[int]:
    """Every process but this one."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}


def shown_of(pid: int, name: str) -> bytes:
    """What a file of a process's in /proc holds; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def json_lines(lines: list[str]) -> list[Any]:
    """The lines of a log that are JSON objects."""
    return [json.loads(line) for line in lines if line.startswith("{")]
