"""The machine's own memory as a card."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

import psutil

from kvguard.domain import CardInfo, CardReading
from kvguard_adapters.cards.resident import resident_bytes


class HostCard:
    """All RAM. Used is what cannot be given to a new process without swapping (MemTotal - MemAvailable)."""

    def __init__(self, *, detail: str = "") -> None:
        self.info = CardInfo(
            kind="host",
            name=f"host memory ({platform.machine()})",
            total_bytes=psutil.virtual_memory().total,
            driver=platform.release(),
            detail=detail,
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
