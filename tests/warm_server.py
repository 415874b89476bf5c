"""Servers that are forked from a warm process: what takes longest of a server's start is importing it.

Run as a program, this file is the warm process. It forks a `trainmaster` command for each request on its socket; the
command is a process of its own with the arguments, the environment and the files that it was given.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any

from patience import PATIENCE_S


class WarmProcess:
    """The warm process of this test process; started with the first command."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._socket = ours
        self._answers = ours.makefile("r")
        self._turn = threading.Lock()

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._turn:
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], list(descriptors))
            return json.loads(self._answers.readline())


_warm: WarmProcess | None = None
_warming = threading.Lock()


class ForkedCommand:
    """A `trainmaster` command in a session of its own; as much of `subprocess.Popen` as tests use."""

    def __init__(self, arguments: Sequence[str], *, env: Mapping[str, str], stderr: IO[str]) -> None:
        global _warm
        with _warming:
            _warm = _warm or WarmProcess()
        read, write = os.pipe()
        self.stdout = os.fdopen(read)
        self.returncode: int | None = None
        request = {"arguments": list(arguments), "environment": dict(env), "directory": os.getcwd()}
        self.pid = int(_warm.ask(request, [write, stderr.fileno()]))
        os.close(write)
        self._pidfd = os.pidfd_open(self.pid)  # its pid is its own until the warm process has waited for it

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("trainmaster", timeout)
        return code

    def _ended(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            assert _warm is not None
            self.returncode = int(_warm.ask({"wait": self.pid}))
            os.close(self._pidfd)
        return self.returncode


def main(descriptor: int) -> None:
    import trainmaster.cli
    import trainmaster.server.process  # noqa: F401

    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            if not data:
                return
            request = json.loads(data)
            if "wait" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            else:
                answer = os.fork()
                if answer == 0:
                    connection.detach()
                    os.close(descriptor)
                    become(request, *descriptors)
                for each in descriptors:
                    os.close(each)
            connection.sendall(json.dumps(answer).encode() + b"\n")


def become(request: Mapping[str, Any], stdout: int, stderr: int) -> None:
    import trainmaster.cli

    os.setsid()
    os.chdir(request["directory"])
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.argv = ["trainmaster", *request["arguments"]]
    code: object = 1
    try:
        trainmaster.cli.main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
