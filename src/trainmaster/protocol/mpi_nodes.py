"""MPI over several nodes of a job, without a remote shell. A copy of this file lies beside the function's runner.

Open MPI starts a daemon of its own on each node: it calls an agent, `ssh` as a rule, with the node's name and a
command. Here the agent is this file. It asks the broker, which runs beside the launcher on node 0, and the broker hands
the command on to the process that waits on that node: the first rank there.

All of them talk over one port of node 0, in lines of JSON:

    broker  {"nonce"}
    node    {"node", "nonce", "proof"}              -> {"command", "proof"}, any number of times; at last {"done"}
    agent   {"agent", "command", "proof"}           -> {}, once the command was handed on

A proof is made with the token that only ranks of this attempt have, over what the other one has just thought of: nobody
else can have a command run, and no command can be had run twice. Standard library of Python 3.9, and nothing else.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

_NAME = "node-"
_PAUSE_S = 0.1
_HANDSHAKE_S = 10.0
_PATIENCE_S = 5.0
"""With a daemon that has been told to end."""


def lead(launcher: list[str], program: list[str]) -> int:
    """On node 0: run the launcher with processes on all nodes; its exit code."""
    broker = _Broker()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local
    hosts = ",".join(f"{_NAME}{node}:{local}" for node in range(nodes))
    with tempfile.TemporaryDirectory(prefix="mpi-") as directory:
        # A file of its own, because Open MPI takes an agent apart at its spaces.
        agent = os.path.join(directory, "agent")
        with open(agent, "w", encoding="utf-8") as file:
            file.write(f'exec {shlex.quote(sys.executable)} {shlex.quote(os.path.abspath(__file__))} "$@"\n')
        # The names of version 5, and those of versions before it. Every daemon is asked for from here.
        settings = {
            "PRTE_MCA_plm_ssh_agent": f"/bin/sh {agent}",
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "OMPI_MCA_plm_rsh_agent": f"/bin/sh {agent}",
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        }
        if broker.listens_at.startswith("127."):
            # All nodes are on one machine, where Open MPI would mix up their shared memory, which goes by the host's
            # name. Without it processes of one node talk over the network too, and no node has a faster way of its own.
            settings |= {
                "OMPI_MCA_btl": "self,tcp",
                "OMPI_MCA_btl_tcp_if_include": "lo",
                "OMPI_MCA_coll": "^han,sm",
            }
        # It stops the processes everywhere when it is told to stop, and this one waits for that.
        signal.signal(signal.SIGTERM, lambda *_: None)
        spread = ("--host", hosts, "--map-by", f"ppr:{local}:node")
        started = subprocess.Popen([*launcher, *spread, *program], env={**os.environ, **settings})
        code = started.wait()
    broker.close()
    return code if code >= 0 else 128 - code


def follow() -> None:
    """On another node: run what the launcher asks for, until it has ended.

    Raises:
        ConnectionError: node 0 is gone.
    """
    started = []
    with _Peer() as broker:
        nonce = secrets.token_hex(16)
        broker.send({"node": os.environ["NODE_RANK"], "nonce": nonce}, over="node")
        while True:
            told = broker.receive()
            if "done" in told:
                break
            if not hmac.compare_digest(told["proof"], _proof(nonce, told["command"])):
                raise ConnectionError("whoever listens where the nodes meet is none of this job")
            # It may stay, or become a daemon: the launcher notices when that ends, and this process need not.
            started.append(subprocess.Popen(["/bin/sh", "-c", told["command"]]))
            nonce += "."
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)


def ask(host: str, command: str) -> None:
    """As the agent: have a command run on a node. On node 0 it becomes that command itself."""
    node = host.rpartition("@")[2].removeprefix(_NAME)
    if node == "0":
        os.execv("/bin/sh", ["/bin/sh", "-c", command])
    with _Peer() as broker:
        broker.send({"agent": node, "command": command}, over=command)
        broker.receive()


class _Peer:
    """A connection to the broker."""

    def __init__(self) -> None:
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        while True:
            with contextlib.suppress(OSError):
                self._socket = socket.create_connection(place, timeout=_HANDSHAKE_S)
                break
            # Node 0 may still prepare itself; if it never comes, the job is stopped.
            time.sleep(_PAUSE_S)
        self._socket.settimeout(None)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self._nonce = str(self.receive()["nonce"])

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, message: dict[str, str], *, over: str) -> None:
        """Send a message with a proof over some part of it."""
        _send(self._lines, {**message, "proof": _proof(self._nonce, over)})

    def receive(self) -> dict[str, Any]:
        """The next message."""
        return _receive(self._lines)


class _Broker:
    """Takes connections of nodes and agents, each in a thread of its own."""

    def __init__(self) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            self._listener = socket.create_server((host, port))
        except OSError:
            # Where others know this node by an address that it does not have itself.
            self._listener = socket.create_server(("", port))
        self.listens_at = str(self._listener.getsockname()[0])
        self._changed = threading.Condition()
        self._nodes: dict[str, tuple[Any, str]] = {}
        """By its number: how to reach a node, and over what it wants the next proof."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Tell the nodes that all is done."""
        with self._changed:
            for lines, _ in self._nodes.values():
                with contextlib.suppress(OSError):
                    _send(lines, {"done": True})
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Who breaks off, or is none of ours, is hung up on, and that is all.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_HANDSHAKE_S)
            lines = connection.makefile("rw", encoding="utf-8")
            nonce = secrets.token_hex(16)
            _send(lines, {"nonce": nonce})
            message = _receive(lines)
            over = "node" if "node" in message else str(message["command"])
            if hmac.compare_digest(str(message["proof"]), _proof(nonce, over)):
                connection.settimeout(None)
                if "node" in message:
                    self._welcome(str(message["node"]), lines, str(message["nonce"]))
                    return
                self._hand_on(str(message["agent"]), over)
                _send(lines, {})
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _welcome(self, node: str, lines: Any, nonce: str) -> None:
        with self._changed:
            self._nodes[node] = (lines, nonce)
            self._changed.notify_all()

    def _hand_on(self, node: str, command: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: node in self._nodes)
            lines, nonce = self._nodes[node]
            _send(lines, {"command": command, "proof": _proof(nonce, command)})
            self._nodes[node] = (lines, f"{nonce}.")


def _proof(nonce: str, text: str) -> str:
    with open(os.environ["TRAINMASTER_TOKEN_FILE"], "rb") as file:
        return hmac.new(file.read(), f"{nonce} {text}".encode(), "sha256").hexdigest()


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _receive(lines: Any) -> dict[str, Any]:
    line = lines.readline()
    if not line:
        raise ConnectionError("node 0, which has the launcher of MPI, is gone")
    message: dict[str, Any] = json.loads(line)
    return message


if __name__ == "__main__":
    ask(sys.argv[1], " ".join(sys.argv[2:]))
