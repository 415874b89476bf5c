"""A real Ray cluster for tests: a head and a second node on addresses of this machine, with GPUs that are not there.

Every process of it has a variable by which it is found again, also after the process that started it was killed: Ray's
processes do not end with one another. `ray stop` would end those of every cluster on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from patience import PATIENCE_S
from process_signals import kill_marked, pids

RAY = Path(__file__).parents[1] / ".venvs" / "ray" / "bin"
REQUIRED = "REQUIRE_RAY"
"""The variable with which CI says that nothing may be skipped for want of Ray."""
HEAD, SECOND = "127.0.0.2", "127.0.0.3"
"""Not 127.0.0.1, for which Ray takes the address of another interface."""
GPUS = 4
CPUS = 4
REGION = "north"
"""Of the second node."""
TRIES = 3
_VARIABLE = "TRAINMASTER_TEST_RAY"
_AGENT_PORT = "dashboard-agent-listen-port"
_NODE_PORTS = (_AGENT_PORT, "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port")
_HEAD_PORTS = ("port", "dashboard-port", "ray-client-server-port")

_REMOVE = """
import sys, ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)
remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(sys.argv[2]))))
"""


def missing() -> str | None:
    """Why there is no Ray here; None where there is.

    Raises:
        AssertionError: there is none where it is required.
    """
    reason = None if (RAY / "ray").exists() else "Ray is not installed; scripts/ray.sh does that"
    assert reason is None or not os.environ.get(REQUIRED), reason
    return reason


@dataclass(slots=True, kw_only=True)
class RayCluster:
    directory: Path
    mark: str
    ports: Mapping[str, int]
    """Of the head; it keeps them when it is started again."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False)
    )
    agents: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Address -> Ray's id of its node, and the port of its agent."""

    @property
    def address(self) -> str:
        return f"http://{HEAD}:{self.ports['dashboard-port']}"

    @property
    def python(self) -> str:
        """That has Ray."""
        return str(RAY / "python")

    def start_head(self) -> bool:
        """False when it ended, as it does when somebody else took one of its ports."""
        self._start(
            HEAD,
            *("--head", f"--dashboard-host={HEAD}", f"--temp-dir={self.directory}/t"),
            *(f"--{name}={port}" for name, port in self.ports.items()),
            resources={"head-node": 1, "accelerator_type:A100": 1},
        )
        return self._wait_for(HEAD)

    def start_second(self) -> bool:
        for _ in range(TRIES):
            self._start(
                SECOND,
                f"--address={HEAD}:{self.ports['port']}",
                f"--labels=ray.io/availability-region={REGION},pool=b",
                resources={"second_node": 1, "accelerator_type:H100": 1},
            )
            if self._wait_for(SECOND):
                return True
        return False

    def kill(self, address: str) -> None:
        """All of a node, as if its power had failed."""
        kill_until_gone(self._variable(address))
        self.processes.pop(address).wait()
        if address == HEAD:
            # Otherwise Ray takes the processes of other nodes on this machine for a head that still runs.
            (self.directory / "t" / "ray_current_cluster").unlink(missing_ok=True)

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.client.get(f"{self.address}{path}", params=parameters)
        return answer.raise_for_status().json()

    def remove_group(self, name: str) -> None:
        """Remove a placement group, with all that runs in it, by Ray's own API."""
        listed = self.get("/api/v0/placement_groups", limit=10_000)["data"]["result"]["result"]
        (group,) = [
            each["placement_group_id"] for each in listed if each["name"] == name and each["state"] != "REMOVED"
        ]
        gcs = f"{HEAD}:{self.ports['port']}"
        subprocess.run([self.python, "-c", _REMOVE, gcs, group], check=True, cwd="/", env={"PATH": os.environ["PATH"]})

    def is_alive(self, address: str) -> bool:
        """Whether Ray believes so of the node that was last started there; not while the head does not answer."""
        try:
            nodes = self.get("/api/v0/nodes")["data"]["result"]["result"]
        except (httpx.HTTPError, TypeError, KeyError):
            return False
        return (self.agents[address][0], "ALIVE") in {(node["node_id"], node["state"]) for node in nodes}

    def has_agent(self, address: str) -> bool:
        """Whether the dashboard knows the agent of a node: it starts jobs and shows logs."""
        with contextlib.suppress(httpx.HTTPError):
            return bool(self.get("/api/v0/logs", node_id=self.agents[address][0])["result"])
        return False

    def log(self, address: str) -> str:
        return (self.directory / f"{address}.log").read_text()[-5000:]

    def _variable(self, address: str) -> str:
        return f"{_VARIABLE}={self.mark}-{address}"

    def _start(self, address: str, *arguments: str, resources: Mapping[str, float]) -> None:
        name, _, value = self._variable(address).partition("=")
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        ports = dict(zip(_NODE_PORTS, free_ports(len(_NODE_PORTS)), strict=True))
        self.agents[address] = (secrets.token_hex(28), ports[_AGENT_PORT])
        command = [
            *(str(RAY / "ray"), "start", "--block", "--disable-usage-stats", f"--node-ip-address={address}"),
            *(f"--num-cpus={CPUS}", f"--num-gpus={GPUS}", "--memory=4000000000", "--object-store-memory=80000000"),
            *("--min-worker-port=0", "--max-worker-port=0", f"--resources={json.dumps(resources)}"),
            *(f"--{port}={number}" for port, number in ports.items()),
            *arguments,
        ]
        with open(self.directory / f"{address}.log", "a") as log:
            self.processes[address] = subprocess.Popen(
                command,
                env={
                    **environment,
                    name: value,
                    "RAY_TMPDIR": f"{self.directory}/t",
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": self.agents[address][0],
                    "RAY_memory_monitor_refresh_ms": "0",  # this machine's memory is not the cluster's
                    "SPT_NOENV": "1",  # else the titles that Ray gives its processes overwrite their variables
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )

    def _wait_for(self, address: str) -> bool:
        process = self.processes[address]
        deadline = time.monotonic() + PATIENCE_S
        while not (self.is_alive(address) and self.has_agent(address)):
            if process.poll() is not None:
                self.kill(address)
                return False
            assert time.monotonic() < deadline, self.log(address)
            self._announce_agent(address)
            time.sleep(0.2)
        return True

    def _announce_agent(self, address: str) -> None:
        """Write down where the agent of a node will listen. A node ends when its agent has not done so 15 s after it
        was started, and starting takes an agent longer on a busy machine."""
        node_id, port = self.agents[address]
        with contextlib.suppress(OSError):  # the directory is not there yet
            (self.directory / "t" / "session_latest" / f"dashboard_agent_listen_port_{node_id}").write_text(str(port))


@contextlib.contextmanager
def running_ray() -> Iterator[RayCluster]:
    """A cluster of two nodes for the length of a block, and never longer than this process."""
    mark = uuid.uuid4().hex
    # Short: the names of Unix sockets below it have at most 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="r-", dir="/tmp"))
    cluster = RayCluster(directory=directory, mark=mark, ports={})
    guard = _guard(mark, directory)
    try:
        for _ in range(TRIES):
            cluster.ports = dict(zip(_HEAD_PORTS, free_ports(len(_HEAD_PORTS)), strict=True))
            if cluster.start_head() and cluster.start_second():
                yield cluster
                return
        raise RuntimeError(f"Ray did not start: {cluster.log(HEAD)}")
    finally:
        cluster.client.close()
        guard.communicate()
        for process in cluster.processes.values():
            process.wait()


def _guard(mark: str, directory: Path) -> subprocess.Popen[bytes]:
    """A process that ends everything when this one closes its standard input, or dies."""
    code = f"import ray_cluster; ray_cluster.guard({mark!r}, {str(directory)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, start_new_session=True
    )


def guard(mark: str, directory: str) -> None:
    sys.stdin.buffer.read()
    for address in (SECOND, HEAD):
        kill_until_gone(f"{_VARIABLE}={mark}-{address}")
    shutil.rmtree(directory, ignore_errors=True)


def kill_until_gone(variable: str) -> None:
    """At once, so that none tells of the end of another. Those that are killed may have started others meanwhile."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        _signal(variable, number)
    while _signal(variable, signal.SIGKILL):
        time.sleep(0.02)


def _signal(variable: str, number: signal.Signals) -> bool:
    """Whether there was a process with this variable."""
    found = marked(variable)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            kill_marked(pid, variable, number)
    return bool(found)


def marked(variable: str) -> list[int]:
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("0.0.0.0", 0))  # as Ray does
        return [one.getsockname()[1] for one in sockets]
