"""MPI over several nodes of a job, without a remote shell. A copy of this file is beside the function's runner.

Open MPI starts a daemon on each node by calling an agent (usually `ssh`) with the node's name and a command. Here the
agent is this file: it asks the broker, which runs beside the launcher on node 0, and the broker passes the command to
the process that waits on that node, the first rank there. All of them talk over one port of node 0, in JSON lines:

    broker  {"nonce"}
    node    {"node", "nonce", "proof"}              -> {"command", "proof"}, any number of times; null at the end
    agent   {"agent", "nonce", "command", "proof"}  -> {}, once the command was passed on

A proof is an HMAC with the token that only ranks of this attempt have, over the role, the message and both nonces:
nobody else can have a command run, and no message can be replayed. Standard library of Python 3.9 only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
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
_HANDSHAKE_S = 30.0
_PATIENCE_S = 5.0
"""For a daemon that was told to end."""
_LONGEST_LINE = 1 << 20
"""A stranger might send a line without end."""
_NONCE = re.compile("[0-9a-f]{32}")
_STRANGER = "the process that listens on the port of node 0 does not belong to this job"


class LauncherError(Exception):
    """The launcher cannot be run."""


def lead(launcher: list[str], program: list[str]) -> int:
    """On node 0: run the launcher with processes on all nodes; returns its exit code."""
    broker = _Broker()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local
    hosts = ",".join(f"{_NAME}{node}:{local}" for node in range(nodes))
    with tempfile.TemporaryDirectory(prefix="mpi-") as directory:
        # A file, because Open MPI splits the agent's command at spaces.
        agent = os.path.join(directory, "agent")
        with open(agent, "w", encoding="utf-8") as file:
            file.write(f'exec {shlex.quote(sys.executable)} {shlex.quote(os.path.abspath(__file__))} "$@"\n')
        # The names of version 5 and of earlier versions. The launcher starts every daemon itself.
        settings = {
            "PRTE_MCA_plm_ssh_agent": f"/bin/sh {agent}",
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "OMPI_MCA_plm_rsh_agent": f"/bin/sh {agent}",
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        }
        if broker.listens_at.startswith("127."):
            # All nodes are on one machine, where Open MPI would mix up their shared memory, which it names after the
            # host. Without shared memory, the processes of a node also talk over the network.
            settings |= {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_coll": "^han,sm"}
        # The launcher stops the processes on all nodes when told to stop; this process waits for that.
        signal.signal(signal.SIGTERM, lambda *_: None)
        spread = ("--host", hosts, "--map-by", f"ppr:{local}:node")
        try:
            started = subprocess.Popen([*launcher, *spread, *program], env={**os.environ, **settings})
        except OSError as error:
            raise LauncherError(error.strerror) from error
        code = started.wait()
    broker.close()
    return code if code >= 0 else 128 - code


def follow() -> None:
    """On another node: run what the launcher asks for, until it has ended; raises ConnectionError if node 0 is gone."""
    started: list[subprocess.Popen[bytes]] = []
    node = os.environ["NODE_RANK"]
    with _Peer() as broker:
        broker.send("node", {"node": node}, node)
        while True:
            order = broker.receive()
            command = order.get("command")
            if not _is_proof(order, "order", *broker.nonces, node, len(started), command):
                raise ConnectionError(_STRANGER)
            if command is None:
                break
            # It may stay, or become a daemon: the launcher notices when a daemon ends.
            started.append(subprocess.Popen(["/bin/sh", "-c", command]))
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)


def ask(host: str, command: str) -> None:
    """As the agent: have a command run on a node. On node 0, become that command."""
    node = host.rpartition("@")[2].removeprefix(_NAME)
    if node == "0":
        os.execv("/bin/sh", ["/bin/sh", "-c", command])
    with _Peer() as broker:
        broker.send("agent", {"agent": node, "command": command}, node, command)
        broker.receive()


class _Peer:
    def __init__(self) -> None:
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        while True:
            with contextlib.suppress(OSError):
                self._socket = socket.create_connection(place, timeout=_HANDSHAKE_S)
                break
            # Node 0 may still be preparing; if it never comes, the job is stopped.
            time.sleep(_PAUSE_S)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        try:
            self.nonces = (_nonce(self.receive().get("nonce")), os.urandom(16).hex())
            """The broker's, and ours."""
        except OSError as error:
            self.close()
            raise error if isinstance(error, ConnectionError) else ConnectionError(_STRANGER) from error
        self._socket.settimeout(None)

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def send(self, role: str, message: dict[str, str], *said: str) -> None:
        proof = _proof(role, *self.nonces, *said)
        _send(self._lines, {**message, "nonce": self.nonces[1], "proof": proof})

    def receive(self) -> dict[str, Any]:
        return _receive(self._lines)


class _Broker:
    """Accepts connections of nodes and agents, each in its own thread."""

    def __init__(self) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            self._listener = socket.create_server((host, port))
        except OSError:
            # Others may know this node by an address that it does not have itself.
            try:
                self._listener = socket.create_server(("", port))
            except OSError as error:
                raise ConnectionError(f"the nodes cannot meet at port {port} of node 0: {error.strerror}") from error
        self.listens_at = str(self._listener.getsockname()[0])
        self._changed = threading.Condition()
        self._nodes: dict[str, _Node] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Tell the nodes that the launcher has ended."""
        with self._changed:
            for node in self._nodes.values():
                with contextlib.suppress(OSError):
                    node.order(None)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Connections that break, or are not from this job, are closed.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_HANDSHAKE_S)
            lines = connection.makefile("rw", encoding="utf-8")
            nonce = os.urandom(16).hex()
            _send(lines, {"nonce": nonce})
            message = _receive(lines)
            nonces = (nonce, _nonce(message["nonce"]))
            if "node" in message:
                if _is_proof(message, "node", *nonces, message["node"]):
                    connection.settimeout(None)
                    with self._changed:
                        self._nodes[message["node"]] = _Node(message["node"], lines, nonces)
                        self._changed.notify_all()
                    return
            elif _is_proof(message, "agent", *nonces, message["agent"], message["command"]):
                connection.settimeout(None)
                with self._changed:
                    self._changed.wait_for(lambda: message["agent"] in self._nodes)
                    self._nodes[message["agent"]].order(message["command"])
                _send(lines, {})
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Node:
    """The broker's view of a node that waits for commands."""

    def __init__(self, name: str, lines: Any, nonces: tuple[str, str]) -> None:
        self.name = name
        self._lines = lines
        self._nonces = nonces
        self._orders = 0

    def order(self, command: str | None) -> None:
        """Have it run a command; None: end."""
        proof = _proof("order", *self._nonces, self.name, self._orders, command)
        _send(self._lines, {"command": command, "proof": proof})
        self._orders += 1


def _proof(role: str, *said: str | int | None) -> str:
    """Over a list, so that different messages never read the same."""
    with open(os.environ["TRAINMASTER_TOKEN_FILE"], "rb") as file:
        return hmac.new(file.read(), json.dumps([role, *said]).encode(), "sha256").hexdigest()


def _is_proof(message: dict[str, Any], role: str, *said: Any) -> bool:
    return hmac.compare_digest(str(message.get("proof")).encode(), _proof(role, *said).encode())


def _nonce(said: object) -> str:
    """The peer's nonce. Only random hex: a chosen text could make a proof say something else."""
    if not isinstance(said, str) or not _NONCE.fullmatch(said):
        raise ConnectionError(_STRANGER)
    return said


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _receive(lines: Any) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        line = lines.readline(_LONGEST_LINE)
        if not line:
            raise ConnectionError("node 0, which has the launcher of MPI, is gone")
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    raise ConnectionError(_STRANGER)


if __name__ == "__main__":
    ask(sys.argv[1], " ".join(sys.argv[2:]))
