"""NVIDIA GPUs through NVML, MIG instances among them.

One card stands for all GPUs that the backend sees. With tensor parallelism each of them holds its share, so
the one with the least free memory binds, and is the one that a reading tells of.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from kvguard.domain import CardInfo, CardReading
from kvguard.ports import CardLost

BY_PROCESS = "NVML device memory, ours by process"
BY_DELTA = "NVML device memory, ours as the delta against the baseline (per-process numbers are hidden)"

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's own pid namespace, fixed in the kernel (PROC_PID_INIT_INO)."""


class NoGpu(RuntimeError):
    """There is no NVIDIA GPU that we could measure; the message says why."""


@dataclass(slots=True)
class Device:
    """One GPU or MIG instance, and how much of it was in use before the present backend came."""

    uuid: str
    name: str
    handle: Any
    total_bytes: int
    baseline_bytes: int = 0

    def free_bytes(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).free)


class NvmlCard:
    """The GPUs that a backend sees. Reads may come from several threads."""

    def __init__(self, devices: Sequence[Device], *, driver: str, detail: str, pids_are_ours: bool) -> None:
        self._devices = list(devices)
        self._pids_are_ours = pids_are_ours
        self._seen_pids: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self.info = CardInfo(
            kind="nvml",
            name=_name(self._devices),
            total_bytes=min(device.total_bytes for device in self._devices),
            driver=driver,
            detail=detail,
        )

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        """Read the tightest GPU. One that does not answer is looked up anew once before it counts as lost."""
        pids = frozenset(own_pids)
        with self._lock:
            with contextlib.suppress(pynvml.NVMLError):
                return self._read(pids)
            try:
                self._reopen()
                return self._read(pids)
            except pynvml.NVMLError as exc:
                raise CardLost(f"{self.info.name} does not answer: {exc}") from exc

    def _read(self, own_pids: frozenset[int]) -> CardReading:
        free = [(device.free_bytes(), device) for device in self._devices]
        self._notice_a_new_life(free, own_pids)
        free_bytes, tightest = min(free, key=lambda pair: pair[0])
        used_bytes = max(0, self.info.total_bytes - free_bytes)
        own_bytes, source = self._by_process(tightest, own_pids), BY_PROCESS
        if own_bytes is None:
            own_bytes, source = tightest.total_bytes - free_bytes - tightest.baseline_bytes, BY_DELTA
        return CardReading(
            at_s=time.time(),
            total_bytes=self.info.total_bytes,
            used_bytes=used_bytes,
            own_bytes=min(max(0, own_bytes), used_bytes),
            source=source,
        )

    def _notice_a_new_life(self, free: Sequence[tuple[int, Device]], own_pids: frozenset[int]) -> None:
        """The first reading of a new process tree is the baseline: an engine takes seconds to reach a GPU."""
        if own_pids and own_pids.isdisjoint(self._seen_pids):
            for free_bytes, device in free:
                device.baseline_bytes = device.total_bytes - free_bytes
        self._seen_pids = own_pids or self._seen_pids

    def _by_process(self, device: Device, own_pids: frozenset[int]) -> int | None:
        """What our processes hold; None where NVML does not tell, or tells pids of another namespace."""
        try:
            listed = _running(device.handle)
        except pynvml.NVMLError as exc:
            if exc.value in _HIDDEN:
                return None
            raise
        ours = [process.usedGpuMemory for process in listed if process.pid in own_pids]
        if any(used is None for used in ours) or not (ours or self._pids_are_ours):
            return None
        return int(sum(ours))

    def _reopen(self) -> None:
        """After a reset or a driver restart the handles are void, and the devices may be back."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        for device in self._devices:
            device.handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)


def _running(handle: Any) -> list[Any]:
    """Drivers before R510 know the second version only, those before R450 none that we could read."""
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    except pynvml.NVMLError as exc:
        if exc.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle))


_HIDDEN = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
)


def nvml_card(environ: Mapping[str, str]) -> NvmlCard:
    """The card of the GPUs that a backend with this environment sees. Raises NoGpu."""
    try:
        pynvml.nvmlInit()
        devices = list(_visible(environ.get("CUDA_VISIBLE_DEVICES")))
        if not devices:
            raise NoGpu("CUDA_VISIBLE_DEVICES hides every NVIDIA GPU")
        return NvmlCard(
            devices,
            driver=_driver(),
            detail=_detail(devices, environ),
            pids_are_ours=os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE,
        )
    except pynvml.NVMLError as exc:
        raise NoGpu(_why_not(exc)) from exc


def _why_not(error: Any) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver (libnvidia-ml.so.1 is not installed)"
    if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        return "the NVIDIA driver is too old for its memory to be read: update it"
    return f"the NVIDIA driver does not answer: {error}"


# ---------------------------------------------------------------- which GPUs


def _visible(wanted: str | None) -> Iterator[Device]:
    """The devices that CUDA would show: the list ends at the first entry that names none. Raises NoGpu."""
    count = pynvml.nvmlDeviceGetCount()
    if count == 0:
        raise NoGpu("the NVIDIA driver finds no GPU")
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    entries = [str(index) for index in range(count)] if wanted is None else wanted.split(",")
    for entry in entries:
        handle = _handle(entry.strip(), gpus)
        if handle is None:
            return
        yield _device(handle)


def _handle(entry: str, gpus: Sequence[Any]) -> Any | None:
    """By index, by UUID or its beginning, or by the UUID of a MIG instance."""
    if entry.isdigit():
        return _first_instance(gpus[int(entry)]) if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        return next((mig for mig in _instances(gpus) if _uuid(mig) == entry), None) or _by_uuid(entry)
    matches = [gpu for gpu in gpus if entry and _uuid(gpu).startswith(entry)]
    return _first_instance(matches[0]) if len(matches) == 1 else None


def _by_uuid(uuid: str) -> Any | None:
    with contextlib.suppress(pynvml.NVMLError):
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return None


def _instances(gpus: Iterable[Any]) -> Iterator[Any]:
    """The MIG instances of these GPUs."""
    for gpu in gpus:
        if not _has_mig(gpu):
            continue
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(pynvml.NVMLError):  # an index that holds no instance
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)


def _first_instance(gpu: Any) -> Any:
    """What CUDA uses of a GPU: all of it, or the first instance where it is cut into MIG instances."""
    return next(_instances([gpu]), gpu)


def _has_mig(gpu: Any) -> bool:
    with contextlib.suppress(pynvml.NVMLError):
        return bool(pynvml.nvmlDeviceGetMigMode(gpu)[0])
    return False


def _device(handle: Any) -> Device:
    return Device(
        uuid=_uuid(handle),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        handle=handle,
        total_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _uuid(handle: Any) -> str:
    return str(pynvml.nvmlDeviceGetUUID(handle))


# ---------------------------------------------------------------- in words


def _name(devices: Sequence[Device]) -> str:
    names = sorted({device.name for device in devices})
    return f"{len(devices)} x {', '.join(names)}" if len(devices) > 1 else names[0]


def _driver() -> str:
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(pynvml.NVMLError):
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return f"{driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return driver


def _detail(devices: Sequence[Device], environ: Mapping[str, str]) -> str:
    notes = [device.uuid for device in devices]
    ecc = {_ecc(device.handle) for device in devices} - {""}
    notes += sorted(ecc)
    in_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if environ.get("CUDA_VISIBLE_DEVICES", "")[:1].isdigit() and not in_pci_order and _gpus_differ():
        notes.append(
            "CUDA counts these different GPUs from the fastest, NVML by their place on the bus: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return "; ".join(notes)


def _ecc(handle: Any) -> str:
    with contextlib.suppress(pynvml.NVMLError):
        return "ECC on" if pynvml.nvmlDeviceGetCurrentEccMode(handle) else "ECC off"
    return ""


def _gpus_differ() -> bool:
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return len({pynvml.nvmlDeviceGetName(handle) for handle in handles}) > 1
