"""The container runtime: a process that starts containers, writes their logs, and says how they end.

It serves the cluster over the socket whose number is its argument, one JSON document a line. Containers die with it,
and it ends when the other side of the socket does.

    {"op": "start", "id": ..., ...}    -> {"event": "started", "id", "pid"} or {"event": "failed", "id", "message"}
    {"op": "signal", "id", "signal"}
                                       -> {"event": "exited", "id", "code", "oom"}
"""

from __future__ import annotations

import datetime
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from typing import Any

from kubernetes_server.runtime import cgroups
from kubernetes_server.runtime.sandbox import StartError, start

LINE_LIMIT = 16384


class Container:
    def __init__(self, identity: str, pid: int, log: int, cgroup: str) -> None:
        self.identity = identity
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.log = log
        self.cgroup = cgroup
        self.pipes = 2
        self.code: int | None = None


class Runtime:
    def __init__(self, control: socket.socket, memory_folder: str) -> None:
        self._control = control
        self._memory_folder = memory_folder
        self._selector = selectors.DefaultSelector()
        self._containers: dict[str, Container] = {}
        self._unread = b""
        self._selector.register(control, selectors.EVENT_READ, self._command)

    def run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        except EOFError:
            self._end()

    def _command(self) -> None:
        data = self._control.recv(1 << 20)
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "start":
                self._start(request)
            elif container := self._containers.get(request["id"]):
                self._signal(container, request["signal"])

    def _start(self, spec: dict[str, Any]) -> None:
        identity = spec["id"]
        (out, child_out), (err, child_err) = os.pipe(), os.pipe()
        cgroup = cgroups.make(identity, spec["memory"]) if spec.get("memory") else ""
        try:
            pid = start({**spec, "cgroup": cgroup}, child_out, child_err)
        except (StartError, OSError) as error:
            os.close(out)
            os.close(err)
            cgroups.remove(cgroup)
            self._say(event="failed", id=identity, message=str(error))
            return
        finally:
            os.close(child_out)
            os.close(child_err)
        log = os.open(spec["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        container = Container(identity, pid, log, cgroup)
        self._containers[identity] = container
        for pipe, stream in ((out, b"stdout"), (err, b"stderr")):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(self, container, pipe, stream).read)
        self._selector.register(container.pidfd, selectors.EVENT_READ, lambda: self._reap(container))
        self._say(event="started", id=identity, pid=pid)

    def _signal(self, container: Container, number: int) -> None:
        if container.code is None:
            signal.pidfd_send_signal(container.pidfd, number)

    def _reap(self, container: Container) -> None:
        _, status = os.waitpid(container.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        container.code = code if code >= 0 else 128 - code
        self._selector.unregister(container.pidfd)
        os.close(container.pidfd)
        self.finish(container)

    def pipe_closed(self, pipe: int, container: Container) -> None:
        self._selector.unregister(pipe)
        os.close(pipe)
        container.pipes -= 1
        self.finish(container)

    def finish(self, container: Container) -> None:
        """Say that a container has ended, once its last line is in the log."""
        if container.code is None or container.pipes:
            return
        os.close(container.log)
        oom = cgroups.has_killed(container.cgroup)
        cgroups.remove(container.cgroup)
        del self._containers[container.identity]
        self._say(event="exited", id=container.identity, code=container.code, oom=oom)

    def _say(self, **document: Any) -> None:
        try:
            self._control.sendall(json.dumps(document).encode() + b"\n")
        except OSError:
            raise EOFError from None

    def _end(self) -> None:
        for container in self._containers.values():
            if container.code is None:
                signal.pidfd_send_signal(container.pidfd, signal.SIGKILL)
                os.waitpid(container.pid, 0)
            cgroups.remove(container.cgroup)
        shutil.rmtree(self._memory_folder, ignore_errors=True)


class _Stream:
    def __init__(self, runtime: Runtime, container: Container, pipe: int, name: bytes) -> None:
        self._runtime = runtime
        self._container = container
        self._pipe = pipe
        self._name = name
        self._rest = b""

    def read(self) -> None:
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
        out = [b"%s %s F %s\n" % (at, self._name, line) for line in lines]
        if self._rest and (not data or len(self._rest) >= LINE_LIMIT):
            out.append(b"%s %s P %s\n" % (at, self._name, self._rest))
            self._rest = b""
        if out:
            os.write(self._container.log, b"".join(out))
        if not data:
            self._runtime.pipe_closed(self._pipe, self._container)


if __name__ == "__main__":
    # Ctrl-C is for the server, which ends this process by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Runtime(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]).run()
