"""`trainmaster doctor`: is everything as it should be?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import typer

from trainmaster import __version__
from trainmaster.cli.exits import ExitCode
from trainmaster.cli.human_units import size
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, styled, table
from trainmaster.client import local
from trainmaster.client.errors import ApiError, ClientError
from trainmaster.protocol.sockets import reachable


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine and the server, and say what to do. Exits with 1 when something is broken."""
    findings = list(examine())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        colours = {CheckVerdict.OK: "green", CheckVerdict.WARN: "yellow", CheckVerdict.FAIL: "bold red"}
        rows = [
            (
                styled(finding.verdict, colours[finding.verdict]),
                finding.check,
                finding.found,
                styled(finding.remedy, "dim"),
            )
            for finding in findings
        ]
        draw(table(("", "CHECK", "FOUND", "WHAT TO DO"), rows, wrap=("FOUND", "WHAT TO DO")))
    if any(finding.verdict is CheckVerdict.FAIL for finding in findings):
        raise typer.Exit(ExitCode.REFUSED)


TRAINERS = ("torch", "transformers", "trl")
"""What the built-in trainers stand on; the rest of the extra comes with it."""
LITTLE_SPACE = 5 << 30
NO_SPACE = 200 << 20
SLOW_FSYNC_S = 0.05
"""Every submission waits for one: slower, and the server feels slow."""
FORK_SERVER_TIMEOUT_S = 2.0
CGROUP_MOUNTS = (
    ("memory", Path("/sys/fs/cgroup/memory")),
    ("", Path("/sys/fs/cgroup")),
    ("", Path("/sys/fs/cgroup/unified")),
)
"""Where a process's own group may be: version 1 with its memory controller, version 2, both at once."""


class CheckVerdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: CheckVerdict
    found: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Every check, in the order in which trouble usually comes."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _training,
        _data_dir,
        _server,
        _fork_server,
        _cgroups,
        _gpus,
    )
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding(check="Python", verdict=CheckVerdict.OK, found=f"{python}, trainmaster {__version__}")


def _training() -> Iterator[Finding]:
    """The built-in trainers run in the local server's Python, which is this one."""
    if not _uses_local_server():
        return
    absent = [package for package in TRAINERS if find_spec(package) is None]
    if absent:
        yield Finding(
            check="training",
            verdict=CheckVerdict.OK,
            found=f"no built-in trainers: {', '.join(absent)} not installed",
            remedy="`pip install 'trainmaster[train]'`, to fine-tune models; your own code does not need it",
        )
        return
    found = ", ".join(f"{package} {version(package)}" for package in TRAINERS)
    yield Finding(check="training", verdict=CheckVerdict.OK, found=found)


def _data_dir() -> Iterator[Finding]:
    directory = local.data_dir()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(place, os.W_OK):
        yield Finding(
            check="data directory",
            verdict=CheckVerdict.FAIL,
            found=f"{directory} cannot be written",
            remedy="set TRAINMASTER_HOME to a directory of your own",
        )
        return
    made = "" if directory.exists() else " (not made yet)"
    yield Finding(check="data directory", verdict=CheckVerdict.OK, found=f"{directory}{made}")
    free = shutil.disk_usage(place).free
    verdict = CheckVerdict.FAIL if free < NO_SPACE else CheckVerdict.WARN if free < LITTLE_SPACE else CheckVerdict.OK
    remedy = "" if verdict is CheckVerdict.OK else "free some: logs and checkpoints need it"
    yield Finding(check="free space", verdict=verdict, found=f"{size(free)} free", remedy=remedy)
    took_s = _fsync_s(place)
    slow = took_s > SLOW_FSYNC_S
    yield Finding(
        check="fsync",
        verdict=CheckVerdict.WARN if slow else CheckVerdict.OK,
        found=f"{took_s * 1000:.1f} ms",
        remedy="a slow or a network disk; put TRAINMASTER_HOME on a local one" if slow else "",
    )


def _uses_local_server() -> bool:
    from trainmaster.client.server_lookup import configured_url

    try:
        return configured_url() is None
    except ClientError:
        return False  # the check of the server reports it


def _server() -> Iterator[Finding]:
    from trainmaster.client import Client
    from trainmaster.client.server_lookup import configured_url

    try:
        url = configured_url()
        server = None if url else local.find()
    except ClientError as error:
        yield Finding(check="server", verdict=CheckVerdict.FAIL, found=str(error))
        return
    if url is None and server is None:
        yield Finding(
            check="server",
            verdict=CheckVerdict.OK,
            found="no local server runs",
            remedy="nothing: commands start it; or run `trainmaster up`",
        )
        return
    address = url or (server.url if server else "")
    try:
        with Client(address, timeout=5.0) as client:
            client.health()
            process = f", process {server.process.pid}, version {server.version}" if server else ""
            yield Finding(check="server", verdict=CheckVerdict.OK, found=f"ready at {address}{process}")
            client.nodes()
            yield Finding(check="API key", verdict=CheckVerdict.OK, found="accepted")
    except ApiError as error:
        yield Finding(
            check="server", verdict=CheckVerdict.FAIL, found=f"{address}: {error.message}", remedy=_remedy(error)
        )
    except ClientError as error:
        yield Finding(
            check="server",
            verdict=CheckVerdict.FAIL,
            found=str(error),
            remedy="check TRAINMASTER_URL, or the login (`trainmaster login`)"
            if url
            else f"look into {local.log_file()}",
        )


def _remedy(error: ApiError) -> str:
    if error.status in (401, 403):
        return "set TRAINMASTER_API_KEY to a key of that server"
    return f"look into the server's log ({local.log_file()} for the local one)"


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
        yield Finding(
            check="fork server", verdict=CheckVerdict.OK, found=f"process {answer['pid']}, version {answer['version']}"
        )
    except (OSError, ValueError, KeyError) as error:
        yield Finding(
            check="fork server",
            verdict=CheckVerdict.WARN,
            found=f"does not answer: {error}",
            remedy="the server starts it with the next job; see its log if jobs stay SCHEDULING",
        )


def _cgroups() -> Iterator[Finding]:
    memberships = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for controller, mount in CGROUP_MOUNTS:
        if controller in memberships:
            group = mount / memberships[controller].lstrip("/")
            if os.access(group / "cgroup.procs", os.W_OK):
                held = "memory and cores are held to" if _has_limits(group) else "cores are not held to"
                found = f"usable at {group}; {held} what jobs book"
                yield Finding(check="cgroups", verdict=CheckVerdict.OK, found=found)
                return
    yield Finding(
        check="cgroups",
        verdict=CheckVerdict.WARN,
        found="not writable for this user",
        remedy="jobs run without; a kill for want of memory may then show as a mere signal, and cores are not held to "
        "what jobs book",
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
        yield Finding(check="GPUs", verdict=CheckVerdict.OK, found=f"simulated: {simulated}")
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
        yield Finding(check="GPUs", verdict=CheckVerdict.OK, found=", ".join(names) or "none")
    except pynvml.NVMLError as error:
        if Path("/dev/nvidiactl").exists():
            remedy = "the driver is there but NVML does not answer; try nvidia-smi"
            yield Finding(check="GPUs", verdict=CheckVerdict.FAIL, found=str(error), remedy=remedy)
        else:
            yield Finding(check="GPUs", verdict=CheckVerdict.OK, found="none: jobs run on the CPU")


def _fsync_s(directory: Path) -> float:
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.monotonic()
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
        return time.monotonic() - began
