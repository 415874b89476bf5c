"""`trainmaster doctor`: is everything as it should be?"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trainmaster import __version__
from trainmaster.cli.exits import ExitCode
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_list, size, styled
from trainmaster.client import local
from trainmaster.client.errors import ApiError, ClientError
from trainmaster.client.server_lookup import configured_url
from trainmaster.protocol.sockets import reachable

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import Backend, Node


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine and the server, and say what to do. Exits with 1 when something is broken."""
    findings = [dataclasses.asdict(finding) for finding in examine()]
    print_list(findings, ("", "CHECK", "FOUND", "WHAT TO DO"), _row, as_json=as_json, wrap=("FOUND", "WHAT TO DO"))
    if any(finding["verdict"] == FAIL for finding in findings):
        raise typer.Exit(ExitCode.REFUSED)


def _row(finding: dict[str, str]) -> tuple[str | Text, ...]:
    verdict, remedy = finding["verdict"], finding["remedy"]
    return styled(verdict, COLOURS[verdict]), finding["check"], finding["found"], styled(remedy, "dim")


OK, WARN, FAIL = "ok", "warn", "fail"
COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}
TRAINERS = ("torch", "transformers", "trl")
"""What the built-in trainers stand on; the rest of the extra comes with it."""
LITTLE_SPACE = 5 << 30
NO_SPACE = 200 << 20
SLOW_FSYNC_S = 0.05
"""Every submission waits for one: slower, and the server feels slow."""
FORK_SERVER_TIMEOUT_S = 2.0
CLUSTER_TIMEOUT_S = 15.0
"""The server itself waits for an engine for eight seconds."""
SHOWN_NODES = 3
CGROUP_MOUNTS = (
    ("memory", Path("/sys/fs/cgroup/memory")),
    ("", Path("/sys/fs/cgroup")),
    ("", Path("/sys/fs/cgroup/unified")),
)
"""Where a process's own group may be: version 1 with its memory controller, version 2, both at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: str
    found: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Every check, in the order in which trouble usually comes."""
    yield Finding("Python", OK, f"{platform.python_version()}, trainmaster {__version__}")
    for check in (_training, _data_dir, _server, _fork_server, _cgroups, _gpus):
        yield from check()


def _training() -> Iterator[Finding]:
    """The built-in trainers run in the local server's Python, which is this one."""
    if not _uses_local_server():
        return
    absent = [package for package in TRAINERS if find_spec(package) is None]
    if absent:
        yield Finding(
            "training",
            OK,
            f"no built-in trainers: {', '.join(absent)} not installed",
            "`pip install 'trainmaster[train]'`, to fine-tune models; your own code does not need it",
        )
        return
    from importlib.metadata import version

    yield Finding("training", OK, ", ".join(f"{package} {version(package)}" for package in TRAINERS))


def _data_dir() -> Iterator[Finding]:
    directory = local.data_dir()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(place, os.W_OK):
        yield Finding(
            "data directory",
            FAIL,
            f"{directory} cannot be written",
            "set TRAINMASTER_HOME to a directory of your own",
        )
        return
    yield Finding("data directory", OK, f"{directory}{'' if directory.exists() else ' (not made yet)'}")
    free = shutil.disk_usage(place).free
    verdict = FAIL if free < NO_SPACE else WARN if free < LITTLE_SPACE else OK
    remedy = "" if verdict == OK else "free some: logs and checkpoints need it"
    yield Finding("free space", verdict, f"{size(free)} free", remedy)
    took_s = _fsync_s(place)
    slow = took_s > SLOW_FSYNC_S
    yield Finding(
        "fsync",
        WARN if slow else OK,
        f"{took_s * 1000:.1f} ms",
        "a slow or a network disk; put TRAINMASTER_HOME on a local one" if slow else "",
    )


def _uses_local_server() -> bool:
    try:
        return configured_url() is None
    except ClientError:
        return False  # the check of the server reports it


def _server() -> Iterator[Finding]:
    from trainmaster.client import Client

    try:
        url = configured_url()
        server = None if url else local.find()
    except ClientError as error:
        yield Finding("server", FAIL, str(error))
        return
    if url is None and server is None:
        yield Finding("server", OK, "no local server runs", "nothing: commands start it; or run `trainmaster up`")
        return
    address = url or (server.url if server else "")
    try:
        with Client(address, timeout=5.0) as client:
            client.health()
            process = f", process {server.process.pid}, version {server.version}" if server else ""
            yield Finding("server", OK, f"ready at {address}{process}")
            client.nodes()
            yield Finding("API key", OK, "accepted")
        with Client(address, timeout=CLUSTER_TIMEOUT_S) as client:
            yield from _clusters(client)
    except ApiError as error:
        remedy = f"look into the server's log ({local.log_file()} for the local one)"
        if error.status in (401, 403):
            remedy = "set TRAINMASTER_API_KEY to a key of that server"
        yield Finding("server", FAIL, f"{address}: {error.message}", remedy)
    except ClientError as error:
        yield Finding(
            "server",
            FAIL,
            str(error),
            "check TRAINMASTER_URL, or the login (`trainmaster login`)" if url else f"look into {local.log_file()}",
        )


def _clusters(client: Client) -> Iterator[Finding]:
    """The clusters that the server declares, as it sees them."""
    declared = [each["name"] for each in client.cluster.backends() if each["options"] is not None]
    nodes = client.nodes() if declared else []
    for name in declared:
        yield from of_cluster(client.cluster.backend(name), [node for node in nodes if node["backend"] == name])


def of_cluster(backend: Backend, nodes: Sequence[Node]) -> Iterator[Finding]:
    """What the server's facts say of a cluster of any kind: its engine, its nodes, and the way from these to it."""
    name, engine = backend["name"], backend["engine"]
    if engine is None:
        words = f"{backend['kind']}: this server does not run jobs, and knows no engine"
        yield Finding(name, WARN, words, "set TRAINMASTER_URL to a server with the role coordinator")
        return
    found = ", ".join(filter(None, (engine["name"] or f"no {backend['kind']} answers", engine["host"])))
    yield Finding(name, FAIL if engine["problem"] else OK, found, engine["problem"] or "")
    usable = [node for node in nodes if node["state"] == "READY"]
    gpus = sum(len(node["gpus"]) for node in usable)
    counted = f"{len(usable)} of {len(nodes)} usable, with {gpus} GPUs" if nodes else "none is known"
    if usable or engine["problem"]:
        yield Finding(f"{name}: nodes", OK if usable else WARN, counted)
    else:
        yield Finding(f"{name}: nodes", WARN, counted, _why_unusable(nodes))
    if backend["server_url"]:
        problem, way = backend["unreachable"] or "", f"reach the server at {backend['server_url']}"
        yield Finding(f"{name}: workers", FAIL if problem else OK, f"cannot {way}" if problem else way, problem)


def _why_unusable(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "jobs wait until the engine has a node for them; see its own list of nodes"
    reasons = (f"{node['hostname']} is {node['state']} {node['drain_reason'] or ''}".strip() for node in nodes)
    return f"bring nodes back with the engine's own tools: {', '.join(itertools.islice(reasons, SHOWN_NODES))}"


def _fork_server() -> Iterator[Finding]:
    if not _uses_local_server() or local.running() is None:
        return
    path = local.data_dir() / "forkserver" / "socket"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(FORK_SERVER_TIMEOUT_S)
            with reachable(path) as short:
                connection.connect(short)
            connection.sendall(b'{"op": "hello"}\n')
            with connection.makefile() as answers:
                answer = json.loads(answers.readline())
        yield Finding("fork server", OK, f"process {answer['pid']}, version {answer['version']}")
    except (OSError, ValueError, KeyError) as error:
        yield Finding(
            "fork server",
            WARN,
            f"does not answer: {error}",
            "the server starts it with the next job; see its log if jobs stay SCHEDULING",
        )


def _cgroups() -> Iterator[Finding]:
    memberships = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for controller, mount in CGROUP_MOUNTS:
        if controller in memberships:
            group = mount / memberships[controller].lstrip("/")
            if os.access(group / "cgroup.procs", os.W_OK):
                held = "memory and core limits are enforced" if _has_limits(group) else "core limits are not enforced"
                yield Finding("cgroups", OK, f"usable at {group}; {held}")
                return
    yield Finding(
        "cgroups",
        WARN,
        "not writable for this user",
        "memory and core limits of jobs are not enforced, and an out-of-memory kill may appear as SIGKILL; "
        "delegate a cgroup to this user",
    )


def _has_limits(group: Path) -> bool:
    """Whether groups below can have limits: in version 2 only beside a group that was delegated with its parent."""
    if (group / "memory.limit_in_bytes").exists():
        return True
    for mark in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group.parent, mark) == b"1":
                return True
    return False


def _gpus() -> Iterator[Finding]:
    simulated = os.environ.get("TRAINMASTER_SIMULATED_GPUS")
    if simulated:
        yield Finding("GPUs", OK, f"simulated: {simulated}")
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
        yield Finding("GPUs", OK, ", ".join(names) or "none")
    except pynvml.NVMLError as error:
        if Path("/dev/nvidiactl").exists():
            yield Finding("GPUs", FAIL, str(error), "the driver is there but NVML does not answer; try nvidia-smi")
        else:
            yield Finding("GPUs", OK, "none: jobs run on the CPU")


def _fsync_s(directory: Path) -> float:
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.monotonic()
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
        return time.monotonic() - began
