"""A training on disk and its attempts, in processes that are forked from a warm one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_servers import quiet_port
from patience import PATIENCE_S
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import EXIT_STOPPED, StopCause


class Zygote:
    """The warm process; it starts with the first training."""

    def __init__(self) -> None:
        quiet = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        assert self._answer() == "ready"

    def start(self, variables: Mapping[str, str], log: Path, **more: Any) -> int:
        """Fork a process with these variables; returns its pid."""
        return int(self._ask({"start": dict(variables), "stdout": str(log), **more}))

    def wait(self, pid: int) -> int:
        """The exit code of a process that was started here; negative: the signal that killed it."""
        return int(self._ask({"wait": pid}))

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _ask(self, request: Mapping[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return json.loads(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        assert line, "the warm process is gone"
        return line.strip()


@dataclass
class Job:
    """A training on disk, and its attempts."""

    zygote: Zygote
    directory: Path
    document: dict[str, Any]
    prepared: dict[str, Any]
    ranks: int = 1
    attempt: int = 0
    pids: list[int] = field(default_factory=list)
    job_id: str = "job-1"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def output(self) -> Path:
        return self.directory / "output"

    @property
    def run(self) -> Path:
        """What belongs to the latest attempt."""
        return self.directory / f"attempt-{self.attempt}"

    def start(
        self, resume_from: Path | str | None = None, hook: Mapping[str, Any] | None = None, **variables: str
    ) -> None:
        """Begin another attempt; with a hook, something happens to it at a step."""
        self.attempt += 1
        for part in ("inputs", "prepared", "logs"):
            (self.run / part).mkdir(parents=True)
        (self.run / "inputs" / "training.json").write_text(json.dumps(self.document))
        (self.run / "prepared" / "prepared.json").write_text(json.dumps(self.prepared))
        self.checkpoints.mkdir(exist_ok=True)
        port = str(quiet_port())
        for rank in range(self.ranks):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                environment.JOB_ID: self.job_id,
                environment.ATTEMPT: str(self.attempt),
                environment.INPUTS_DIR: str(self.run / "inputs"),
                environment.PREPARED_DIR: str(self.run / "prepared"),
                environment.CHECKPOINT_DIR: str(self.checkpoints),
                environment.OUTPUT_DIR: str(self.output),
                environment.DATA_ROOTS: str(self.directory),
                environment.EVENTS_FILE: str(self.run / f"events-{rank}.jsonl"),
                environment.METRICS_FILE: str(self.run / f"metrics-{rank}.jsonl"),
                environment.CONTROL_FILE: str(self.run / "control.json"),
                **({environment.RESUME_FROM: str(resume_from)} if resume_from else {}),
                **variables,
            }
            self.pids.append(self.zygote.start(own, self.run / "logs" / f"{rank}.log", hook=hook))

    def finish(self) -> list[int]:
        """Wait for the attempt to end; the exit codes of its ranks."""
        codes = [self.zygote.wait(pid) for pid in self.pids]
        self.pids = []
        return codes

    def train(self, resume_from: Path | str | None = None, **variables: str) -> None:
        """One attempt, to its good end."""
        self.start(resume_from, **variables)
        codes = self.finish()
        assert codes == [0] * self.ranks, f"{codes}\n{self.log()}"

    def interrupt(
        self,
        cause: StopCause | None,
        step: int,
        *,
        resume_from: Path | str | None = None,
        save: bool = True,
        during: str = "step",
    ) -> None:
        """One attempt that is asked to stop at a step or, without a cause, killed there."""
        control = None if cause is None else {"seq": 1, "stop": cause, "save": save, "grace_s": PATIENCE_S}
        self.start(resume_from, hook={"step": step, "control": control, "during": during})
        expected = -signal.SIGKILL if cause is None else EXIT_STOPPED
        assert self.finish() == [expected] * self.ranks, self.log()

    def kill(self) -> None:
        """End the attempt as a power cut would."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        assert all(code == -signal.SIGKILL for code in self.finish()), self.log()

    def log(self, rank: int = 0) -> str:
        """What a rank of the latest attempt has printed."""
        return (self.run / "logs" / f"{rank}.log").read_text()

    def events(self) -> list[dict[str, Any]]:
        """What the first rank of the latest attempt has told the server."""
        return _records(self.run / "events-0.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        """The numbers that the first rank of the latest attempt has reported."""
        return _records(self.run / "metrics-0.jsonl")

    def series(self, name: str) -> list[float]:
        """One metric of the latest attempt."""
        return [record["values"][name] for record in self.metrics() if name in record["values"]]

    def result(self) -> str:
        """A fingerprint of the weights at the end."""
        return _digest(self.output / "model")

    def state(self) -> str:
        """A fingerprint of weights and optimizer in the newest checkpoint."""
        return _digest(self.latest())

    def latest(self) -> Path:
        """The newest committed checkpoint."""
        return max(self.committed(), key=lambda path: int(path.name.split("-")[1]))

    def committed(self) -> list[Path]:
        return [path.parent for path in self.checkpoints.glob("checkpoint-*/manifest.json")]


def refusal(job: Job, *, reason: str = "BAD_INPUT", resume_from: Path | str | None = None, **variables: str) -> str:
    """Why a new attempt refuses."""
    job.start(resume_from, **variables)
    assert job.finish() == [1] * job.ranks, job.log()
    failed = [event for event in job.events() if event["type"] == "failed"]
    assert [event["reason"] for event in failed] == [reason]
    assert "Traceback" not in job.log()
    return str(failed[0]["message"])


def _digest(directory: Path) -> str:
    """Of all arrays below a directory, but those of random-number generators."""
    files = sorted(path for path in directory.rglob("*.safetensors") if not path.name.startswith("rng-"))
    assert files
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


Make = Callable[..., Job]
"""Of the fixture `make_job`."""
