"""The inventory of this machine: cores, memory, disk, and the GPUs that NVML reports, or simulated ones."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.server.core.resources import Gpu, Node

HARMLESS_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors that a program causes for itself (a bad address, a kill): the GPU is still usable."""


class Driver:
    """Reads the GPUs through NVML, in one session, which also collects the errors between reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._errors: Any = None
        """The NVML event set."""
        self._xids: dict[str, int] = {}
        """GPU UUID -> the last error that makes it unusable, until this process ends."""
        self._known: tuple[Gpu, ...] = ()

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the driver reports; none without a driver. A GPU in MIG mode counts as its slices.

        A GPU of the last report that the driver cannot query any more is still listed, as unhealthy.
        """
        with self._lock:
            self._known = tuple(self._report())
            return self._known

    def _report(self) -> Iterator[Gpu]:
        import pynvml

        try:
            self._connect(pynvml)
            self._take_errors()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._nvml = None
            for gpu in self._known:
                yield replace(gpu, healthy=False, problem=f"the driver does not answer: {error}")
            return
        index = 0
        for number in range(count):
            for gpu in self._of(pynvml, number):
                yield replace(gpu, index=index)
                index += 1

    def _connect(self, nvml: Any) -> None:
        if self._nvml is not None:
            return
        nvml.nvmlInit()
        self._nvml = nvml
        self._errors = None
        try:
            self._errors = nvml.nvmlEventSetCreate()
            for number in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._errors)
        except nvml.NVMLError:
            self._errors = None  # Not every driver tells; ECC and memory are looked at all the same.

    def _take_errors(self) -> None:
        nvml = self._nvml
        while self._errors is not None:
            try:
                told = nvml.nvmlEventSetWait_v2(self._errors, 0)
                uuid = str(nvml.nvmlDeviceGetUUID(told.device))
            except nvml.NVMLError:
                return  # there are no more
            if told.eventData not in HARMLESS_XIDS:
                self._xids[uuid] = told.eventData

    def _of(self, nvml: Any, number: int) -> list[Gpu]:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            found = _slices(nvml, handle) or [_gpu(nvml, handle, str(number), str(nvml.nvmlDeviceGetName(handle)))]
            xid = self._xids.get(str(nvml.nvmlDeviceGetUUID(handle))) if self._xids else None
            if xid is not None:
                problem = f"Xid {xid}: reset it, then restart the server"
            else:
                problem = _uncorrected_errors(nvml, handle) or _rows_to_remap(nvml, handle)
        except nvml.NVMLError as error:
            lost = [gpu for gpu in self._known if gpu.device == str(number)]
            return [replace(gpu, healthy=False, problem=f"the driver lost it: {error}") for gpu in lost]
        return [replace(gpu, healthy=not problem, problem=problem) for gpu in found]


def _uncorrected_errors(nvml: Any, handle: Any) -> str:
    try:
        count = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    except nvml.NVMLError:
        return ""  # It has no ECC, or it is off.
    return f"{count} uncorrected ECC errors since the driver was loaded: reset it" if count else ""


def _rows_to_remap(nvml: Any, handle: Any) -> str:
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError:
        return ""
    if failed:
        return "rows of its memory could not be remapped: have it replaced"
    return "rows of its memory wait to be remapped: reset it" if pending else ""


def _slices(nvml: Any, handle: Any) -> list[Gpu]:
    """The slices of a GPU in MIG mode, with types such as `mig-1g.5gb`; empty in other modes."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return []
    if not current:
        return []
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue
        profile = str(nvml.nvmlDeviceGetName(part)).rpartition("MIG ")[2]
        found.append(_gpu(nvml, part, str(nvml.nvmlDeviceGetUUID(part)), f"mig-{profile}"))
    return found


def _gpu(nvml: Any, handle: Any, device: str, kind: str) -> Gpu:
    try:
        # The first version of this call counts the driver's own memory as used.
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(index=0, device=device, type=kind, memory_mb=memory.total >> 20, used_mb=memory.used >> 20)


_SIZES_MB = {"H100": 81920, "H200": 144384, "A100": 81920, "B200": 196608, "L40S": 49152, "L4": 24576}
"""Memory of simulated GPUs whose name does not say it."""

_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9. _-]*")


class LocalInventory:
    def __init__(self, *, storage: Path, simulated_gpus: str = "", slots: int = 0) -> None:
        self._storage = storage
        self._simulated = parse_simulated(simulated_gpus) if simulated_gpus else None
        self._driver = Driver()
        self._slots = slots or max(16, 4 * (os.cpu_count() or 1))

    def nodes(self) -> Sequence[Node]:
        hostname = socket.gethostname()
        if self._simulated is None:
            return [self._node(hostname, hostname, self._driver.gpus())]
        if len(self._simulated) == 1:
            return [self._node(hostname, hostname, self._simulated[0])]
        return [self._node(f"{hostname}-{n}", hostname, gpus) for n, gpus in enumerate(self._simulated)]

    def _node(self, node_id: str, hostname: str, gpus: tuple[Gpu, ...]) -> Node:
        # Whole GiB, so that the record does not change all the time.
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
            name, _, size = kind.upper().partition("-")
            is_said = size.endswith("GB") and size[:-2].isdigit()
            memory_mb = int(size[:-2]) * 1024 if is_said else _SIZES_MB.get(name, 16384)
            gpus += [
                Gpu(index=index, device=str(index), type=kind, memory_mb=memory_mb)
                for index in range(len(gpus), len(gpus) + int(count or 1))
            ]
        nodes.append(tuple(gpus))
    return nodes
