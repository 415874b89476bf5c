"""A gang of containers beside a step's own, its head: they are started before it, and none outlives it.

They work it out among themselves what there is to do, and the head is who speaks for them. So what is seen to here is
that nobody is left: a head whose gang cannot do its work, or a gang without a head.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from trainmaster.backends.container.container_process import KernelKills
from trainmaster.backends.container.container_spec import KEEP
from trainmaster.backends.container.engine import Engine, EngineError
from trainmaster.protocol.launch import Size
from trainmaster.protocol.reasons import Reason

_SPEAKS_S = 10.0
"""How long a head may take to say that one of its gang has failed, and why."""
_LAST_S = 5.0
"""How long a gang may take to see that its head has ended."""
_AGAIN_S = 1.0
_COUNTED_S = 0.2


def sized(document: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """A container of this size; where that says nothing, of the size that it has."""
    limits: dict[str, int] = {}
    if size.cpu_cores:
        limits["NanoCpus"] = round(size.cpu_cores * 1_000_000_000)
    if size.memory_bytes:
        limits["Memory"] = limits["MemorySwap"] = size.memory_bytes
    return {**document, "HostConfig": {**document["HostConfig"], **limits}}


class Gang:
    """The containers of a gang, for as long as its head runs."""

    def __init__(
        self,
        engine: Engine,
        head: str,
        documents: Mapping[str, Mapping[str, Any]],
        *,
        end_of: Callable[[str], int],
        tell: Callable[[Reason, str], None],
    ) -> None:
        """Describe a gang.

        Args:
            engine: where it runs.
            head: the name of the head's container.
            documents: the containers beside it, by their names.
            end_of: waits for the end of a container; its exit code.
            tell: says to the worker why the step fails.
        """
        self._engine = engine
        self._head = head
        self._documents = documents
        self._end_of = end_of
        self._tell = tell
        self._watching = [threading.Thread(target=self._watch, args=(name,), daemon=True) for name in documents]
        self._is_over = threading.Event()
        self.broke_head = False
        """Whether one failed, and the head had to be killed for it."""

    def __enter__(self) -> Self:
        """Start them all."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The head has ended: they see that by themselves, and those that do not are ended."""
        self._is_over.set()
        deadline = time.monotonic() + _LAST_S
        for thread in self._watching:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._clear()

    def _watch(self, name: str) -> None:
        kills = None
        with contextlib.suppress(EngineError):
            kills = KernelKills(self._engine.process(name))
        code, wait_s = self._end_of(name), _SPEAKS_S
        with contextlib.suppress(EngineError):
            if said := self._engine.output(name):
                sys.stderr.write(f"{said}\n")
            if code and (_counted(kills) or self._engine.ran_out_of_memory(name)):
                self._tell(Reason.OUT_OF_MEMORY, f"{name} was killed by the kernel: out of memory")
                wait_s = 0.0
        if code == 0 or self._is_over.is_set():
            return  # after the head's end it may be that it was ended here
        sys.stderr.write(f"{name} ended with exit code {code}\n")
        while not self._is_over.wait(wait_s):
            self.broke_head, wait_s = True, _AGAIN_S
            with contextlib.suppress(EngineError):
                self._engine.kill(self._head)

    def _clear(self) -> None:
        for name, document in self._documents.items():
            with contextlib.suppress(EngineError):
                if document["Labels"][KEEP] == "no":
                    self._engine.remove(name)
                else:
                    self._engine.kill(name)


def _end_when_told() -> None:
    """End if this process was told to: signals are kept for the head, and many containers take long to start."""
    if signal.SIGTERM in signal.sigpending():
        sys.exit(128 + signal.SIGTERM)


def _counted(kills: KernelKills | None) -> int:
    """How often the kernel has killed in a container that has ended."""
    if kills is None:
        return 0
    kills.join(_COUNTED_S)
    return kills.count
