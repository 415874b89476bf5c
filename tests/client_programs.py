"""Programs that use a public client, run with the environment of that client under `.venvs`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from patience import PATIENCE_S
from process_signals import kill_marked
from real_server import RealServer, wait_for

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "clients" / "programs"

Asked = Callable[[dict[str, Any]], Any]
"""Does what a program asks for, and returns what it is told then."""


class Client:
    """One public client against one server. Programs run in `hub`, whose directories stand for the hub's."""

    def __init__(self, name: str, server: RealServer, hub: Path) -> None:
        self.python = ROOT / ".venvs" / name / "bin" / "python"
        assert self.python.exists(), f"{self.python} is missing: run `make setup-dev`"
        self.server = server
        self.hub = hub
        self.url = server.url

    def environment(self) -> dict[str, str]:
        """What a user would set, and nothing of this process."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.hub),
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.server.key,
            "FIREWORKS_BASE_URL": self.url,
            "FIREWORKS_API_KEY": self.server.key,
            "HF_HOME": str(self.hub / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str | Path, timeout_s: float = 2 * PATIENCE_S) -> str:
        """Run Python with these arguments; returns what it printed."""
        done = subprocess.run(
            [self.python, *command],
            cwd=self.hub,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout

    def scenarios(
        self, program: str, *names: str, asked: Mapping[str, Asked] | None = None, timeout_s: float = 2 * PATIENCE_S
    ) -> dict[str, Any]:
        """Run scenarios of a program; returns what each has to say, or how it failed."""
        process = subprocess.Popen(
            [self.python, PROGRAMS / program, *names],
            cwd=self.hub,
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(errors := (self.hub / f"{program}.log").open("w+")),
            text=True,
        )
        overdue = threading.Timer(timeout_s, process.kill)
        overdue.start()
        results: dict[str, Any] = {}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                if "ask" in said:
                    answer = (asked or {})[said.pop("ask")](said)
                    print(json.dumps(answer), file=process.stdin, flush=True)
                else:
                    results[said.pop("scenario")] = said
            code = process.wait()
        finally:
            overdue.cancel()
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            errors.seek(0)
            log = errors.read()
            errors.close()
        assert code == 0, f"{program} ended with {code} after {list(results)}:\n{log[-4000:]}"
        return results


def facts(results: Mapping[str, Any], name: str) -> Any:
    """What a scenario has to say, which must not have failed."""
    assert name in results, f"{name} did not come to its end, only {list(results)}"
    assert "error" not in results[name], results[name]["error"]
    return results[name]["facts"]


def kill_trainer(server: RealServer, job_id: str) -> None:
    """kill -9 to the processes of a job's trainer, as the kernel would in need of memory."""
    killed = [pid for pid in _processes_of(job_id) if _kill(pid, f"TRAINMASTER_JOB_ID={job_id}")]
    assert killed, f"no process of {job_id} was found"
    wait_for(lambda: not _processes_of(job_id), f"the processes of {job_id} to be gone")


def resident_mb(job_id: str) -> float:
    """The memory of a job's trainer, its front included."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _processes_of(job_id))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _kill(pid: int, mark: str) -> bool:
    with contextlib.suppress(ProcessLookupError):
        kill_marked(pid, mark)
        return True
    return False


def _processes_of(job_id: str) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                ours = f"TRAINMASTER_JOB_ID={job_id}".encode() in (process / "environ").read_bytes().split(b"\0")
                if ours and b"trainmaster.trainer_service" in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
    return found
