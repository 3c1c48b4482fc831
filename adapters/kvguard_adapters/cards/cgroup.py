"""Memory cgroups, v1 and v2, as cards: allocation over the limit really fails there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvguard.domain import CardInfo, CardReading
from kvguard.ports import CardLost

V1_ROOT = Path("/sys/fs/cgroup/memory")
V2_ROOT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""v1 says a number near 2^63 for "no limit"."""


class CgroupCard:
    """One cgroup. Used is the working set: usage minus the page cache that the kernel would drop first."""

    def __init__(self, path: Path, *, name: str = "") -> None:
        self.path = path
        self.is_v1 = (path / "memory.limit_in_bytes").exists()
        limit = read_limit(path)
        if limit is None:
            raise CardLost(f"{path} has no memory limit")
        version = "v1" if self.is_v1 else "v2"
        self.info = CardInfo(kind="cgroup", name=name or "memory cgroup", total_bytes=limit, driver=version)
        self._source = f"cgroup {version} working set"

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        try:
            name = "memory.usage_in_bytes" if self.is_v1 else "memory.current"
            usage = int((self.path / name).read_text())
            inactive = _inactive_file_bytes(
                self.path / "memory.stat", "total_inactive_file" if self.is_v1 else "inactive_file"
            )
        except FileNotFoundError as exc:
            raise CardLost(f"the cgroup {self.path} is gone") from exc
        except OSError:  # removed between open and read
            raise CardLost(f"the cgroup {self.path} is gone") from None
        used = max(0, usage - inactive)
        return CardReading(
            at_s=time.time(),
            total_bytes=self.info.total_bytes,
            used_bytes=used,
            own_bytes=None,
            source=self._source,
        )


def read_limit(path: Path) -> int | None:
    """The limit of one cgroup in bytes, None where it has none."""
    for name in ("memory.limit_in_bytes", "memory.max"):
        try:
            text = (path / name).read_text().strip()
        except OSError:
            continue
        if text != "max" and int(text) < UNLIMITED_BYTES:
            return int(text)
        return None
    return None


def own_cgroup_with_limit() -> Path | None:
    """The cgroup of this process, or its ancestor with the tightest limit; None without one."""
    best: tuple[int, Path] | None = None
    for start, root in _own_paths():
        path = start
        while True:
            limit = read_limit(path)
            if limit is not None and (best is None or limit < best[0]):
                best = (limit, path)
            if path == root or root not in path.parents:
                break
            path = path.parent
    return best[1] if best else None


def _own_paths() -> list[tuple[Path, Path]]:
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((V1_ROOT / path.lstrip("/"), V1_ROOT))
        elif not controllers:
            found.append((V2_ROOT / path.lstrip("/"), V2_ROOT))
    # inside a container the path may be the host's, and the mount our own
    return [(start if start.exists() else root, root) for start, root in found]


def _inactive_file_bytes(stat: Path, key: str) -> int:
    for line in stat.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
