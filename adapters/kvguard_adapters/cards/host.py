"""The machine's own memory as a card."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

import psutil

from kvguard.domain import CardInfo, CardReading


class HostCard:
    """All RAM. Used is what cannot be given to a new process without swapping (MemTotal - MemAvailable)."""

    def __init__(self) -> None:
        total = psutil.virtual_memory().total
        self.info = CardInfo(
            kind="host",
            name=f"host memory ({platform.machine()})",
            total_bytes=total,
            driver=platform.release(),
        )

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        memory = psutil.virtual_memory()
        return CardReading(
            at_s=time.time(),
            total_bytes=memory.total,
            used_bytes=memory.total - memory.available,
            own_bytes=resident_bytes(own_pids),
            source="MemTotal - MemAvailable",
        )


class ProcessCard:
    """A limit without a device behind it: the resident memory of our process tree against a number."""

    def __init__(self, limit_bytes: int, *, name: str = "address-space limit") -> None:
        self.info = CardInfo(kind="limit", name=name, total_bytes=limit_bytes)

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        own = resident_bytes(own_pids)
        return CardReading(
            at_s=time.time(),
            total_bytes=self.info.total_bytes,
            used_bytes=own,
            own_bytes=own,
            source="sum of resident sets",
        )


def resident_bytes(pids: Sequence[int]) -> int:
    """Sum of the resident sets; a process that is gone counts nothing."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total
