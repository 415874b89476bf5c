"""Ranks that are forked from a process that has imported torch: that is what takes longest of a rank's start."""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from patience import PATIENCE_S

_CONTEXT = multiprocessing.get_context("forkserver")
# Nothing that reads the environment when it is imported, as `trainmaster.jobs.report` does.
_CONTEXT.set_forkserver_preload(
    [
        "numpy",
        "trainmaster.engine.engine",
        "trainmaster.engine.parallel",
        "trainmaster.engine.sampler",
        "trainmaster.jobs.trees",
        "trainmaster.trainer_service.channel",
        "trainmaster.trainer_service.configuration",
        "trainmaster.trainer_service.export_files",
        "trainmaster.trainer_service.models",
        "trainmaster.trainer_service.wire",
    ]
)


class ForkedRank:
    """`python -m MODULE ARGUMENTS` in a session of its own; as much of `subprocess.Popen` as tests use."""

    def __init__(
        self, module: str, arguments: Sequence[str] = (), *, env: Mapping[str, str], log: Path, descriptors: int = 0
    ) -> None:
        """`descriptors` is the soft limit of those that it may have open; 0 is this process's own."""
        given = (module, list(arguments), dict(env), str(log), descriptors)
        self._process = _CONTEXT.Process(target=_become, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout)
        return self._process.exitcode


def _become(module: str, arguments: list[str], environment: dict[str, str], log: str, descriptors: int) -> None:
    os.setsid()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, most))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
