"""What tests ask of the real engine of a cluster, and what administrators and accidents do to it."""

from __future__ import annotations

import abc
import contextlib
from pathlib import Path
from typing import Any

from real_server import wait_for


class EngineUnderTest(abc.ABC):
    """An engine with two nodes, and a cluster's options that lead to it."""

    kind: str
    gpus: int
    """Of each node."""
    cores: int
    """Of each node."""
    address = "127.0.0.1"
    """Where its nodes reach this machine."""
    lost_with_controller = False
    """Whether jobs are lost when the controller is killed."""

    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """What a server's settings say of the cluster, beside its kind."""

    def environment(self) -> dict[str, str]:
        """Variables that the server needs."""
        return {}

    def counting(self, directory: Path) -> dict[str, Any]:
        """Options with which requests to the engine are counted in a directory."""
        return {}

    @abc.abstractmethod
    def check_load(self, directory: Path, attempts: int) -> None:
        """See that the engine was asked no more for these attempts than it has to be."""

    @abc.abstractmethod
    def slow(self, directory: Path) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Options with which the engine answers late, and refuses every third request for the time being."""

    @abc.abstractmethod
    def left(self, mark: str = "") -> list[str]:
        """The names of all attempts with a text in their name of which anything waits or runs on the engine."""

    @abc.abstractmethod
    def remove(self, job_id: str) -> None:
        """End a running job, as an administrator would who knows nothing of Trainmaster."""

    @abc.abstractmethod
    def kill_controller(self) -> None:
        """kill -9 what the engine is asked through."""

    @abc.abstractmethod
    def start_controller(self) -> None:
        """Start it again, at the same address."""

    @abc.abstractmethod
    def kill_node(self) -> None:
        """kill -9 all that runs on the second node."""

    @abc.abstractmethod
    def start_node(self) -> None:
        """Have the second node take jobs again."""


def wait_until_nothing_is_left(engine: EngineUnderTest, mark: str = "") -> None:
    wait_for(lambda: not engine.left(mark), f"the end of {mark or 'all jobs'} on {engine.kind}")
