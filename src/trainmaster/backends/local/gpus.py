"""The GPUs of this machine by NVML, NVIDIA's driver library: what there is, what of it is in use, what is broken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.server.core.resources import Gpu

HARMLESS_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors that a program causes for itself (a bad address, a kill in the middle): the GPU is as good as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A GPU, or one slice of it."""

    device: str
    """What CUDA_VISIBLE_DEVICES takes."""
    type: str
    memory_mb: int
    used_mb: int


class Driver:
    """Asks the driver, again and again, over one session: errors that happen in between are told by it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._errors: Any = None
        """The set of events that the session listens to."""
        self._xids: dict[str, int] = {}
        """By a GPU's UUID: the last error that makes it unusable. It stays until this process ends."""
        self._known: tuple[Gpu, ...] = ()

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the driver reports; none when there is no driver. A GPU in MIG mode counts by its slices.

        A GPU of the last report that the driver cannot answer for any more is still there, and unhealthy.
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
        """Take in the errors since the last look."""
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
        """A GPU as one unit, or as its slices."""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            units = _slices(nvml, handle) or [_whole(nvml, handle, str(number))]
            problem = self._problem(nvml, handle)
        except nvml.NVMLError as error:
            lost = [gpu for gpu in self._known if gpu.device == str(number)]
            return [replace(gpu, healthy=False, problem=f"the driver lost it: {error}") for gpu in lost]
        return [
            Gpu(
                index=0,
                device=unit.device,
                type=unit.type,
                memory_mb=unit.memory_mb,
                used_mb=unit.used_mb,
                healthy=not problem,
                problem=problem,
            )
            for unit in units
        ]

    def _problem(self, nvml: Any, handle: Any) -> str:
        """Why no job should get this GPU; empty when all is well."""
        xid = self._xids.get(str(nvml.nvmlDeviceGetUUID(handle))) if self._xids else None
        if xid is not None:
            return f"Xid {xid}: reset it, then restart the server"
        for found in (_uncorrected_errors(nvml, handle), _rows_to_remap(nvml, handle)):
            if found:
                return found
        return ""


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


def _whole(nvml: Any, handle: Any, device: str) -> _Unit:
    total_mb, used_mb = _memory_mb(nvml, handle)
    return _Unit(device=device, type=str(nvml.nvmlDeviceGetName(handle)), memory_mb=total_mb, used_mb=used_mb)


def _slices(nvml: Any, handle: Any) -> list[_Unit]:
    """Each slice of a GPU in MIG mode, of a type such as `mig-1g.5gb`; none when it is not."""
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
        total_mb, used_mb = _memory_mb(nvml, part)
        uuid = str(nvml.nvmlDeviceGetUUID(part))
        found.append(_Unit(device=uuid, type=f"mig-{profile}", memory_mb=total_mb, used_mb=used_mb))
    return found


def _memory_mb(nvml: Any, handle: Any) -> tuple[int, int]:
    """What there is, and what programs use of it."""
    try:
        # The first form of this call counts what the driver keeps for itself as used.
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.total >> 20, memory.used >> 20
