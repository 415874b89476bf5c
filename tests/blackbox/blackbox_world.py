"""One client and the jobs that the cases share. Knows the public names of the client and nothing else of it."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trained_functions

RUNTIME = "torch-distributed"
PATIENCE_S = 300.0  # the cases run in other environments, without the modules of tests/


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the jobs of a client run, as far as the cases have to know it."""

    make_client: Callable[[], Any]
    installs: bool = True
    """Whether jobs can reach the package index."""
    inside: str | None = None
    """Where jobs find the files that they wait for; None: where they lie."""
    outside: Callable[[str], Path] | None = None
    """Where these lie, of a job of that name; None: where the case wants them."""
    options: tuple[Any, ...] = ()
    """That every job needs."""


class World:
    """A client under test.

    `api` is the module with the names of `kubeflow.trainer`, `options` the one with the names of its options. Jobs find
    the files that they wait for in `directory`.
    """

    def __init__(self, api: Any, options: Any, place: Place, directory: Path, index_url: str) -> None:
        self.api = api
        self.options = options
        self.client = place.make_client()
        self.place = place
        self.directory = directory
        self.index_url = index_url
        self.home = Path.cwd()
        """Where the program was started."""
        self.chosen_name = f"{directory.name}-tell"
        self.names: dict[str, str] = {}
        """Of the shared jobs, by their functions."""

    def start_jobs(self) -> None:
        """Start every job that the cases look at, side by side: each may have to make an environment."""
        self._start(trained_functions.tell, self.options.Name(self.chosen_name), env={"BLACKBOX_GIVEN": "yes"})
        self._start(trained_functions.fail, num_nodes=2)
        self._start(trained_functions.hide, env={"BLACKBOX_HIDDEN": str(self.directory)})

    def _start(self, func: Callable[..., Any], *options: Any, **fields: Any) -> None:
        gate = self.directory / func.__name__
        # Without a package, kubeflow's local backend runs nothing.
        packages = {"packages_to_install": ["greeting"], "pip_index_urls": [self.index_url]}
        trainer = self.api.CustomTrainer(
            func=func,
            func_args={"gate": self.place.inside or str(gate), "number": 3},
            **(packages if self.place.installs else {}),
            **fields,
        )
        if self.place.outside is None:
            gate.mkdir()
        name = self.client.train(runtime=RUNTIME, trainer=trainer, options=[*options, *self.place.options])
        if self.place.outside is not None:
            gate.symlink_to(self.place.outside(name))
        self.names[func.__name__] = name

    def begin(self) -> str:
        """Wait until the telling job is inside its function; returns its name."""
        name = self.names["tell"]

        def begun() -> bool:
            job = self.client.get_job(name)
            assert job.status in ("Created", "Running"), f"it is {job}: {self.lines(name)}"
            return (self.directory / "tell" / "begun").exists()

        self.wait_for(begun, "the first job to begin")
        return name

    def finish(self) -> str:
        """Let the telling job end well, and wait until it has; returns its name."""
        (self.directory / "tell" / "open").touch()
        return self.ended("tell", "Complete")

    def ended(self, which: str, status: str) -> str:
        """Wait until a shared job has this last status; returns its name."""
        name = self.names[which]
        self.wait_for(lambda: self.client.get_job(name).status in ("Complete", "Failed"), f"{which} to end")
        job = self.client.get_job(name)
        assert job.status == status, f"{which} is {job}: {self.lines(name)}"
        return name

    def hidden_processes(self) -> list[int]:
        """The processes of the hiding job: that of its function, those around it and those that it started."""
        mark = f"BLACKBOX_HIDDEN={self.directory}".encode()
        return [int(found.name) for found in Path("/proc").iterdir() if found.name.isdigit() and _has(found, mark)]

    def lines(self, name: str, **asked: str) -> list[str]:
        """The log of a job. Some clients give several lines at once."""
        return [line for piece in self.client.get_job_logs(name, **asked) for line in str(piece).splitlines()]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for something that happens by itself."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
            time.sleep(0.05)

    def clear(self) -> None:
        """End what the client left running."""
        with contextlib.suppress(OSError):
            (self.directory / "tell" / "open").touch()
        for pid in self.hidden_processes():
            # A pidfd is opened before the process is checked: pids are reused. This runs without Trainmaster, too.
            with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid)) as process:
                if pid in self.hidden_processes():
                    signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)


def _has(process: Path, variable: bytes) -> bool:
    """Whether a process was started with a variable. One that only waits to be noticed as ended has none."""
    try:
        return variable in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def outcome_of(call: Callable[[], Any], well: Callable[[Any], str] = lambda _: "accepted") -> str:
    """What comes of a call: `well` of what it returns, or the built-in errors that what it raises is."""
    try:
        result = call()
    except Exception as error:
        return " and ".join(_builtin_errors(type(error)))
    return well(result)


def _builtin_errors(kind: type[BaseException]) -> Iterator[str]:
    if getattr(builtins, kind.__name__, None) is kind:
        yield kind.__name__
        return
    found = [name for base in kind.__bases__ if issubclass(base, BaseException) for name in _builtin_errors(base)]
    if len(found) > 1:  # a base that says less than another one adds nothing
        found = [name for name in found if name != "Exception"]
    yield from dict.fromkeys(found)
