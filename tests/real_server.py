"""A real server process for tests: started, killed, started again; cleaned up to the last process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from patience import PATIENCE_S
from trainmaster.backends.local.fork_client import ForkServer, ForkServerError
from trainmaster.protocol.processes import ProcessIdentity, send_signal
from warm_server import ForkedCommand

COMMAND = Path(sys.executable).with_name("trainmaster")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")

# One for all: making a client costs more than most requests. No connection is kept, as servers die and come back.
_http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)


class RealServer:
    """`trainmaster serve` on a data directory of its own."""

    command: tuple[str | Path, ...] = ()
    """What is run with `serve` and its options; by default `trainmaster`, forked from a warm process."""

    def __init__(self, directory: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.arguments = arguments
        self.environment = environment or {}
        self.process: subprocess.Popen[str] | ForkedCommand | None = None
        self.url = ""

    def start(self, **environment: str) -> RealServer:
        """Start it and wait for its ready line."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMASTER_")}
        with open(self._log_path, "a") as log:
            arguments = ["serve", "--port", "0", "--data-dir", str(self.directory), *self.arguments]
            env = {**inherited, **self.environment, **environment}
            # The dynamic linker reads its variables when a program is executed.
            if not self.command and not any(name.startswith("LD_") for name in env):
                self.process = ForkedCommand(arguments, env=env, stderr=log)
            else:
                self.process = subprocess.Popen(
                    [*(self.command or (COMMAND,)), *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=env,
                    start_new_session=True,
                )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"the server did not start: {self.log_text()}"
        self.url = line.split()[1]
        return self

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as an operator would."""
        self._end(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until it ends by itself."""
        assert self.process is not None
        code = self.process.wait(PATIENCE_S)
        self._close()
        return code

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.wait()

    def _close(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    def clean_up(self) -> None:
        """End everything that still runs: the server, its fork server, and every worker with what it started."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        elif self.process is not None:
            self._close()
        with contextlib.suppress(OSError, ForkServerError, KeyError):
            ForkServer(self.directory / "forkserver")._exchange({"op": "retire"})
        for claim in self.directory.glob("runs/*/*/claims/*.json"):
            with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
                send_signal(ProcessIdentity.from_json(json.loads(claim.read_text())), signal.SIGKILL)

    def log_text(self) -> str:
        """What it wrote to stderr."""
        return self._log_path.read_text()

    @property
    def _log_path(self) -> Path:
        return self.directory.parent / f"{self.directory.name}.log"

    # -- asking it --

    @property
    def key(self) -> str:
        return (self.directory / "api-key").read_text().strip()

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """One request, with the key."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return _http.request(method, f"{self.url}{path}", json=body, headers=headers, **options)

    def data(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The data of an answer that must be a success."""
        answer = self.ask(method, path, body, **options)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def submit(self, *argv: str, **document: Any) -> str:
        """Submit a command job that needs no GPU; returns its id."""
        body = {
            "name": "test",
            "workload": {"kind": "command", "argv": list(argv)},
            "resource_config": {"gpu_count": 0},
            **document,
        }
        return str(self.data("POST", "/v1/jobs", body)["job_id"])

    def job(self, job_id: str) -> Any:
        return self.data("GET", f"/v1/jobs/{job_id}")

    def until(self, job_id: str, *statuses: str, timeout_s: float = PATIENCE_S) -> Any:
        """The job, once it has one of the statuses (by default: once it has ended)."""
        wanted = statuses or ENDED

        def reached() -> Any:
            job = self.job(job_id)
            if job["status"] in wanted:
                return job
            assert job["status"] not in ENDED, (
                f"{job['status']} instead of {wanted}: {job['error'] or job['status_message']}"
            )
            return None

        try:
            return wait_for(reached, f"{job_id} to be {wanted}", timeout_s)
        except AssertionError as error:
            happened = [f"{event['type']}: {event['message']}" for event in self.events(job_id)]
            raise AssertionError("\n".join([str(error), *happened, *self.lines(job_id)[-50:]])) from error

    def lines(self, job_id: str, **query: Any) -> list[str]:
        """All lines of its log."""
        found: list[str] = []
        cursor = None
        while True:
            page = self.data(
                "GET", f"/v1/jobs/{job_id}/logs", params={**query, **({"cursor": cursor} if cursor else {})}
            )
            found += [line["message"] for line in page["lines"]]
            if not page["lines"]:
                return found
            cursor = page["next_cursor"]

    def events(self, job_id: str) -> list[Any]:
        return list(self.data("GET", f"/v1/jobs/{job_id}/events?limit=1000")["events"])


def wait_for(condition: Callable[[], Any], what: str = "it", timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of a condition that becomes true by itself."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(pause_s)
        # Asking costs the server time that it needs for what is waited for.
        pause_s = min(0.25, pause_s * 1.25)


@contextlib.contextmanager
def running(directory: Path, *arguments: str, **environment: str) -> Iterator[RealServer]:
    """A server that runs for the length of a block."""
    server = RealServer(directory, *arguments, environment=environment)
    try:
        yield server.start()
    finally:
        server.clean_up()
