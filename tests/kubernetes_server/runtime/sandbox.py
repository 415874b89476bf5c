"""Starts one container: a process that is the first of its pid namespace, with its own mounts and host name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Any

from kubernetes_server.runtime.mounts import check, enter

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x4000000, 0x10000000, 0x20000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """The program could not be executed."""


def start(spec: dict[str, Any], stdout: int, stderr: int) -> int:
    """Start the program of a container; returns its pid.

    Raises:
        StartError: there is no such program, or a mount failed.
    """
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    told, tell = os.pipe()
    try:
        if os.geteuid():
            raise StartError("only root can make the namespaces of a container")
        check(_libc.unshare(CLONE_NEWPID), "unshare")
        pid = os.fork()
        if pid == 0:
            _become(spec, stdout, stderr, tell)
        check(_libc.setns(own_pids, CLONE_NEWPID), "setns")
    finally:
        os.close(tell)
        os.close(own_pids)
    with os.fdopen(told, "rb") as file:
        error = file.read()
    if error:
        os.waitpid(pid, 0)
        raise StartError(error.decode())
    return pid


def _become(spec: dict[str, Any], stdout: int, stderr: int, tell: int) -> None:
    """In the child: does not return."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if cgroup := spec.get("cgroup"):
            with open(f"{cgroup}/cgroup.procs", "w") as file:
                file.write("0")
        check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "unshare")
        hostname = spec["hostname"].encode()
        check(_libc.sethostname(hostname, len(hostname)), "sethostname")
        os.umask(0o022)
        enter(spec["mounts"], spec["hidden"], [spec["cwd"]], spec["scratch"])
        os.chdir(spec["cwd"])
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        for number in range(1, signal.NSIG):
            _reset(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if spec.get("gid") is not None:
            os.setgroups(spec["groups"])
            os.setgid(spec["gid"])
        if spec.get("uid") is not None:
            os.setuid(spec["uid"])
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        environment = spec["env"]
        os.execvpe(spec["argv"][0], spec["argv"], environment)
    except FileNotFoundError as error:
        program = spec["argv"][0]
        where = "no such file or directory" if "/" in program else "executable file not found in $PATH"
        text = f'exec: "{program}": {where}: unknown' if _is_program(error, program) else str(error)
        os.write(
            tell,
            f"failed to create containerd task: failed to create shim task: OCI runtime create failed: "
            f"runc create failed: unable to start container process: {text}".encode(),
        )
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def _is_program(error: FileNotFoundError, program: str) -> bool:
    """Whether the program is missing, and not a file that is mounted."""
    return isinstance(error.filename, bytes | None) or error.filename == program


def _reset(number: int) -> None:
    """SIGKILL, SIGSTOP and those of the C library keep what they do."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
