"""Memory cgroups, v1 and v2, as cards: allocation over the limit really fails there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvguard.domain import CardInfo, CardReading
from kvguard.ports import CardLost
from kvguard_adapters.cards.resident import resident_bytes

UNLIMITED_BYTES = 1 << 60
"""v1 says a number near 2^63 for "no limit"."""


@dataclass(frozen=True, slots=True)
class _Version:
    name: str
    limit: str
    usage: str
    cached: tuple[str, str]
    mapped: str


_V1 = _Version(
    "v1",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "total_mapped_file",
)
_V2 = _Version("v2", "memory.max", "memory.current", ("inactive_file", "active_file"), "file_mapped")


@dataclass(frozen=True, slots=True)
class _Level:
    """One cgroup of the chain from the innermost to the root."""

    path: Path
    version: _Version
    limit_bytes: int | None

    def held_bytes(self) -> int:
        """Usage minus the page cache that no process maps: that is dropped before anyone is killed.

        A model file that was read into buffers leaves such cache behind; one that is mapped is in use.
        Raises CardLost.
        """
        try:
            usage = int((self.path / self.version.usage).read_text())
            stat = (self.path / "memory.stat").read_text()
        except OSError as exc:
            raise CardLost(f"the cgroup {self.path} is gone") from exc
        cached = sum(_field(stat, name) for name in self.version.cached)
        return max(0, usage - max(0, cached - _field(stat, self.version.mapped)))


class CgroupCard:
    """One cgroup with all that is above it: whichever limit is nearest to its usage binds.

    `shared` says that others than the backend are in it, as in a container; else all of it is the backend's.
    Raises CardLost when neither it nor anything above it has a limit, or when it is gone.
    """

    def __init__(self, path: Path, *, name: str = "", shared: bool = False, detail: str = "") -> None:
        levels = list(_levels(path))
        if not levels:
            raise CardLost(f"{path} is not a memory cgroup")
        self.path = path
        self._inner = levels[0]
        self._limited = [(level, level.limit_bytes) for level in levels if level.limit_bytes is not None]
        if not self._limited:
            raise CardLost(f"neither {path} nor a cgroup above it has a memory limit")
        self._shared = shared
        self._source = f"cgroup {self._inner.version.name} less unmapped page cache"
        self.info = CardInfo(
            kind="cgroup",
            name=name or "memory cgroup",
            total_bytes=min(limit for _, limit in self._limited),
            driver=self._inner.version.name,
            detail=detail,
        )

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        """`used_bytes` is the total minus what may still be taken at every level."""
        inner = self._inner.held_bytes()
        free = min(
            limit - (inner if level is self._inner else level.held_bytes()) for level, limit in self._limited
        )
        used = max(0, self.info.total_bytes - free)
        own: int | None = min(used, inner)
        if self._shared:
            own = min(used, resident_bytes(own_pids)) if own_pids else None
        return CardReading(
            at_s=time.time(),
            total_bytes=self.info.total_bytes,
            used_bytes=used,
            own_bytes=own,
            source=self._source,
        )


def _levels(path: Path) -> Iterator[_Level]:
    """The cgroup and those above it, as far as they have memory files."""
    for folder in (path, *path.parents):
        version = next((v for v in (_V1, _V2) if (folder / v.usage).exists()), None)
        if version is None:
            return
        yield _Level(folder, version, _limit_bytes(folder / version.limit))


def _limit_bytes(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:  # v2's root has no such file
        return None
    return None if text == "max" or int(text) >= UNLIMITED_BYTES else int(text)


def _field(stat: str, name: str) -> int:
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
