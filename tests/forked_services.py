"""Ranks and fronts that are forked from a process that has imported what they need, as torch.

That is what takes longest of their start.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from patience import PATIENCE_S

_CONTEXT = multiprocessing.get_context("forkserver")
# Nothing that reads the environment when it is imported, as `trainmaster.jobs.report` does.
_CONTEXT.set_forkserver_preload(
    [
        "numpy",
        "torch._dynamo",
        "trainmaster.engine.engine",
        "trainmaster.engine.parallel",
        "trainmaster.engine.sampler",
        "trainmaster.jobs.trees",
        "trainmaster.trainer_service.channel",
        "trainmaster.trainer_service.configuration",
        "trainmaster.trainer_service.export_files",
        "trainmaster.trainer_service.front.routes",
        "trainmaster.trainer_service.models",
        "trainmaster.trainer_service.wire",
        "uvicorn.lifespan.on",
        "uvicorn.loops.auto",
        "uvicorn.protocols.http.auto",
    ]
)


class ForkedRank:
    """`python -m MODULE ARGUMENTS` in a session of its own; as much of `subprocess.Popen` as tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        log: Path,
        descriptors: int = 0,
        channel: socket.socket | None = None,
    ) -> None:
        """Start it.

        Args:
            module: what to run.
            arguments: of its command line.
            env: its environment.
            log: where its outputs go.
            descriptors: the soft limit of those that it may have open; 0 is this process's own.
            channel: a socket that is its own, too; its descriptor there becomes the argument `--channel`.
        """
        given = (module, list(arguments), dict(env), str(log), descriptors, channel)
        self._process = _CONTEXT.Process(target=_become, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            self._pidfd = os.pidfd_open(self.pid)
            weakref.finalize(self, os.close, self._pidfd)

    def send_signal(self, number: int) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout)
        return self._process.exitcode


def _become(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    log: str,
    descriptors: int,
    channel: socket.socket | None,
) -> None:
    gc.freeze()
    os.setsid()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, most))
    if channel is not None:
        arguments.append(f"--channel={channel.detach()}")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
