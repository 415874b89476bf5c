"""A front process as a job has it, with an engine of the caller's at the other end of its channel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx
from stub_engine import StubEngine

from forked_services import ForkedRank
from patience import PATIENCE_S
from trainmaster.protocol import environment
from trainmaster.trainer_service import channel

MODULE = "trainmaster.trainer_service.front"


class RunningFront:
    """Starts when it is entered; ends, with its engine, when it is left. It must not complain of anything."""

    def __init__(
        self,
        *,
        attempt: int = 1,
        ready: bool = True,
        checkpoints=(),
        delays=None,
        token_file="",
        engine=StubEngine,
        descriptors: int = 0,
        executed: bool = False,
        **settings: float,
    ) -> None:
        """It is forked from a process that has imported it, or, as a job has it, `executed`.

        That is for tests of its memory, and of `descriptors`: of how many it may have open at most.
        """
        self._attempt = attempt
        self._token_file = token_file
        self._ready = ready
        self._checkpoints = checkpoints
        self._delays = delays or {}
        self._make_engine = engine
        self._limited = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(descriptors)] if descriptors else []
        self._executed = executed or descriptors > 0
        self._settings = {"last_answers_s": 0.1, **settings}

    def __enter__(self) -> RunningFront:
        near, far = channel.pair()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log = tempfile.NamedTemporaryFile()
        flags = [f"--port={port}"]
        flags += [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        env = {
            **os.environ,
            environment.JOB_ID: "job-1",
            environment.ATTEMPT: str(self._attempt),
            environment.TOKEN_FILE: str(self._token_file),
        }
        self.process: subprocess.Popen[bytes] | ForkedRank
        if self._executed:
            argv = [*self._limited, sys.executable, "-P", "-m", MODULE, *flags, f"--channel={far.fileno()}"]
            self.process = subprocess.Popen(argv, pass_fds=[far.fileno()], stderr=self._log, env=env)
        else:
            self.process = ForkedRank(MODULE, flags, env=env, log=Path(self._log.name), channel=far)
        far.close()
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", verify=False, timeout=PATIENCE_S)
        self.engine = self._make_engine(channel.EngineChannel(near), **self._delays)
        self.engine.start(ready=self._ready, checkpoints=self._checkpoints)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.http.get("healthz").status_code == 200 or not self._ready:
                    return self
            except httpx.TransportError:
                assert self.process.poll() is None, "the front process ended at once"
                assert time.monotonic() < deadline
            time.sleep(0.02)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.http.close()
        self.engine.die()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            said = self.said()
            self._log.close()
        assert kind is not None or not said, said

    def said(self) -> str:
        """What the front wrote to its standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode()
