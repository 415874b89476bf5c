"""A running container as a process: its output, its signals, its exit code, and whether it ran out of memory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from trainmaster.backends.container.container_spec import KEEP
from trainmaster.backends.container.engine import ContainerEngine, ContainerEngineError, RefusedByEngineError
from trainmaster.protocol.processes import KILL_LED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, KILL_LED)
"""Passed on to the container; block them before any thread is started."""
REMOVED = -1
"""Instead of an exit code: the container was removed, and how it ended is unknown."""
AWAY_S = 0.5
"""Pause before another try if the engine is away or the disk is full."""
_LOOK_S = 0.2
_LAST_OUTPUT_S = 10.0
_GOING_ON = ("running", "paused")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HEARD = re.compile(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)


def followed(engine: ContainerEngine, name: str, *, process: int | None, copies: bool, at_once: bool = False) -> int:
    """Pass signals on to a running container until it ends; returns its exit code.

    `process` is its first process, if known. With `copies`, its output is copied to this process's. With `at_once`,
    SIGTERM kills it: images that fetch have nothing to save.
    """
    channels = (("stdout", 1), ("stderr", 2)) if copies else ()
    copying = [threading.Thread(target=_copy, args=(engine, name, *channel), daemon=True) for channel in channels]
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(end_of(engine, name)), daemon=True)
    for thread in (*copying, waiting):
        thread.start()
    asked: list[int] = []
    while waiting.is_alive():
        found = signal.sigtimedwait(SIGNALS, _LOOK_S)
        if found is not None:
            asked.append(found.si_signo)
        with contextlib.suppress(ContainerEngineError):
            while asked:
                kills = asked[0] == KILL_LED or (at_once and asked[0] == signal.SIGTERM)
                kills = kills or (process is not None and _is_deaf_to(process, asked[0]))
                engine.kill(name, "SIGKILL" if kills else signal.Signals(asked[0]).name)
                del asked[0]
    deadline = time.monotonic() + _LAST_OUTPUT_S
    for thread in copying:
        thread.join(max(0.0, deadline - time.monotonic()))
    return ended[0] if ended else REMOVED


def end_of(engine: ContainerEngine, name: str) -> int:
    while True:
        try:
            return engine.wait(name)
        except ContainerEngineError:
            if _is_removed(engine, name):
                return REMOVED
            time.sleep(AWAY_S)


def process_of(engine: ContainerEngine, name: str) -> int | None:
    try:
        return engine.process(name)
    except ContainerEngineError:
        return None


def _is_deaf_to(process: int, number: int) -> bool:
    """Whether a signal would end the first process of a container, and does not because it is the first.

    The kernel ignores signals for it that it neither handles nor ignores.
    """
    try:
        heard = _HEARD.findall(Path(f"/proc/{process}/status").read_text())
    except OSError:
        return False
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in heard)


def _copy(engine: ContainerEngine, name: str, channel: str, descriptor: int) -> None:
    """Copy a container's output to its end. After an outage, the engine sends it from the beginning again."""
    copied = 0
    while True:
        try:
            told = 0
            for piece in engine.follow(name, channel):
                rest = piece[max(copied - told, 0) :]
                told += len(piece)
                _write(descriptor, rest)
                copied += len(rest)
            if engine.state(name) not in _GOING_ON:
                return
        except RefusedByEngineError:
            if _is_removed(engine, name):
                return
            time.sleep(AWAY_S)
        except ContainerEngineError:
            time.sleep(AWAY_S)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno not in _FULL:
                raise
            time.sleep(AWAY_S)


def _is_removed(engine: ContainerEngine, name: str) -> bool:
    try:
        return engine.state(name) is None
    except ContainerEngineError:
        return False


_GROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_COUNTED_S = 2.0
_REMOVED_S = 0.5
"""How long the kernel may take to say that it has removed a group."""
_EVENTS = "cgroup.event_control"


class KernelKills:
    """Counts the processes of a container that the kernel killed for lack of memory, for engines that do not tell.

    The kernel counts in the container's cgroup, which disappears just after the container. So a thread waits for the
    container's first process and reads the count when that process ends. In version 1 of cgroups, it also has the
    kernel report: once each time that memory lacks, and once when the group is removed. On a busy machine, that may
    have happened before the thread reads the count.
    """

    def __init__(self, pid: int | None) -> None:
        self.count = 0
        """The number of killed processes, once the container has ended."""
        self._thread: threading.Thread | None = None
        # It may have ended already.
        with contextlib.suppress(OSError):
            if pid is not None and (counter := _counter(pid)) is not None:
                given = (os.pidfd_open(pid), counter, _reports_of(counter))
                self._thread = threading.Thread(target=self._run, args=given, daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, process: int, counter: Path, reported: int | None) -> None:
        try:
            # `poll`, as `select` takes no descriptor beyond 1023.
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll()
        finally:
            os.close(process)
        try:
            found = _COUNT.search(counter.read_bytes())
            self.count = int(found[1]) if found else 0
        except OSError:
            self.count = _lacks_of_removed(reported) if reported is not None else 0
        finally:
            if reported is not None:
                os.close(reported)


def _reports_of(counter: Path) -> int | None:
    """A descriptor that counts the reports of the kernel about a group; None where it makes none."""
    reported = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        with counter.open("rb") as of_group:
            (counter.parent / _EVENTS).write_text(f"{reported} {of_group.fileno()}")
    except OSError:
        os.close(reported)
        return None
    return reported


def _lacks_of_removed(reported: int) -> int:
    """How often memory lacked in a group that has been removed: its last report is about that."""
    count, until = 0, time.monotonic() + _REMOVED_S
    reports = select.poll()
    reports.register(reported, select.POLLIN)
    while count < 2 and (left_s := until - time.monotonic()) > 0:
        reports.poll(left_s * 1000)
        with contextlib.suppress(BlockingIOError):
            count += os.eventfd_read(reported)
    return max(count - 1, 0)


def _counter(pid: int) -> Path | None:
    """The kernel's counter for the group of a process; None if it is not visible."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        if not controllers and (found := _GROUPS / path.lstrip("/") / "memory.events").exists():
            return found
    return None


def ran_out_of_memory(engine: ContainerEngine, name: str, kills: KernelKills) -> bool:
    """Whether the kernel killed a process of an ended container for lack of memory, by the count or the engine."""
    kills.join(_COUNTED_S)
    if kills.count:
        return True
    try:
        return engine.ran_out_of_memory(name)
    except ContainerEngineError:
        return False


_SPEAKS_S = 10.0
"""How long the head may take to report that a member has failed."""
_LAST_S = 5.0
"""How long members may take to notice that the head has ended."""
_AGAIN_S = 1.0


class GangContainers:
    """Containers beside a step's own, the head: they start before it, and none outlives it.

    They coordinate among themselves, and the head reports for them. This class makes sure that nobody is left: a head
    whose members cannot do their work, or members without a head.
    """

    def __init__(self, engine: ContainerEngine, head: str, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """`head` is the name of its container; `documents` has the members' containers, by name."""
        self._engine = engine
        self._head = head
        self._documents = documents
        self._watching = [threading.Thread(target=self._watch, args=(name,), daemon=True) for name in documents]
        self._is_over = threading.Event()
        self.broke_head = False
        """Whether a member failed, and the head was killed because of it."""
        self.out_of_memory: list[str] = []
        """Members that the kernel killed for lack of memory."""

    def __enter__(self) -> Self:
        try:
            for name, document in self._documents.items():
                _end_when_told()
                self._engine.create(name, document)
            for name in self._documents:
                _end_when_told()
                self._engine.start(name)
        except BaseException:
            self._clear()
            raise
        for thread in self._watching:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Members notice the head's end by themselves; those that do not are ended."""
        self._is_over.set()
        deadline = time.monotonic() + _LAST_S
        for thread in self._watching:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._clear()

    def _watch(self, name: str) -> None:
        kills = KernelKills(process_of(self._engine, name))
        code, wait_s = end_of(self._engine, name), _SPEAKS_S
        with contextlib.suppress(ContainerEngineError):
            if said := self._engine.output(name):
                sys.stderr.write(f"{said}\n")
        if code and ran_out_of_memory(self._engine, name, kills):
            self.out_of_memory.append(name)
            wait_s = 0.0
        if code == 0 or self._is_over.is_set():
            return  # after the head's end it may be that it was ended here
        sys.stderr.write(f"{name} ended with exit code {code}\n")
        while not self._is_over.wait(wait_s):
            self.broke_head, wait_s = True, _AGAIN_S
            with contextlib.suppress(ContainerEngineError):
                self._engine.kill(self._head)

    def _clear(self) -> None:
        for name, document in self._documents.items():
            with contextlib.suppress(ContainerEngineError):
                if document["Labels"][KEEP] == "no":
                    self._engine.remove(name)
                else:
                    self._engine.kill(name)


def _end_when_told() -> None:
    """Exit if SIGTERM is pending: signals are kept for the head, and many containers take long to start."""
    if signal.SIGTERM in signal.sigpending():
        sys.exit(128 + signal.SIGTERM)
