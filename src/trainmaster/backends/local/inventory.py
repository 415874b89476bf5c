"""What this machine has: cores, memory, disk, and the driver's GPUs; or simulated GPUs in their place."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from trainmaster.backends.local.gpus import Driver
from trainmaster.server.core.resources import Gpu, Node

_SIZES_MB = {"H100": 81920, "H200": 144384, "A100": 81920, "B200": 196608, "L40S": 49152, "L4": 24576}
"""Memory of a simulated GPU whose name does not say it."""

_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9. _-]*")


class LocalInventory:
    """The nodes of this machine."""

    def __init__(self, *, storage: Path, simulated_gpus: str = "", slots: int = 0) -> None:
        self._storage = storage
        self._simulated = parse_simulated(simulated_gpus) if simulated_gpus else None
        self._driver = Driver()
        self._slots = slots or max(16, 4 * (os.cpu_count() or 1))

    def nodes(self) -> Sequence[Node]:
        """The nodes there are now."""
        hostname = socket.gethostname()
        if self._simulated is None:
            return [self._node(hostname, hostname, self._driver.gpus())]
        if len(self._simulated) == 1:
            return [self._node(hostname, hostname, self._simulated[0])]
        return [self._node(f"{hostname}-{n}", hostname, gpus) for n, gpus in enumerate(self._simulated)]

    def _node(self, node_id: str, hostname: str, gpus: tuple[Gpu, ...]) -> Node:
        # Free space changes all the time; whole GiB keep the record quiet.
        free_mb = shutil.disk_usage(self._storage).free >> 30 << 10
        return Node(
            node_id=node_id,
            backend="local",
            hostname=hostname,
            cpu_cores=os.cpu_count() or 1,
            ram_mb=(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20,
            storage_mb=free_mb,
            gpus=gpus,
            slots=self._slots,
            last_seen_at=time.time(),
        )


def parse_simulated(text: str) -> list[tuple[Gpu, ...]]:
    """The GPUs that a setting names, per node.

    >>> [[(gpu.type, gpu.memory_mb) for gpu in node] for node in parse_simulated("A100-40GB:1,L4:1;H100-80GB:1")]
    [[('A100-40GB', 40960), ('L4', 24576)], [('H100-80GB', 81920)]]
    """
    nodes = []
    for node in text.split(";"):
        gpus: list[Gpu] = []
        for entry in filter(None, (part.strip() for part in node.split(","))):
            kind, _, count = (part.strip() for part in entry.partition(":"))
            if not _TYPE.fullmatch(kind) or not (count or "1").isdecimal():
                raise ValueError(f"simulated_gpus: {entry!r} is not TYPE:COUNT, such as H100-80GB:8")
            for _ in range(int(count or 1)):
                index = len(gpus)
                gpus.append(Gpu(index=index, device=str(index), type=kind, memory_mb=_memory_mb(kind)))
        nodes.append(tuple(gpus))
    return nodes


def _memory_mb(kind: str) -> int:
    name, _, size = kind.upper().partition("-")
    if size.endswith("GB") and size[:-2].isdigit():
        return int(size[:-2]) * 1024
    return _SIZES_MB.get(name, 16384)
