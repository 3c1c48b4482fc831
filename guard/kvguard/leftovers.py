"""Backends that outlived both kvguard and their warden: found by their record and killed, nothing else is.

A warden writes one record a backend into the run directory and removes it when all is gone. A process belongs
to a record when it is in the record's cgroup, is the recorded pid with the recorded start time or came of it,
or carries the record's name in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvguard import processes
from kvguard.cgroups import members

MARK = "KVGUARD_LIFE"
"""Environment variable that holds a backend's name."""

PATIENCE_S = 15.0
LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What a warden wrote of its backend; processes as (pid, start time in clock ticks)."""

    name: str
    kvguard: tuple[int, int]
    warden: tuple[int, int]
    backend: tuple[int, int]
    cgroup: Path | None

    @classmethod
    def read(cls, file: Path) -> Leftover | None:
        """None for a file that is gone, torn, not ours or of another boot."""
        try:
            raw = json.loads(file.read_text())
            this_boot = raw["boot"] == processes.boot_id()
            kvguard, warden, backend = (
                (int(pid), int(started)) for pid, started in (raw["kvguard"], raw["warden"], raw["backend"])
            )
            name, cgroup = str(raw["name"]), Path(raw["cgroup"]) if raw["cgroup"] else None
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if not this_boot or (cgroup is not None and cgroup.name != name):
            return None
        return cls(name=name, kvguard=kvguard, warden=warden, backend=backend, cgroup=cgroup)

    def pids(self) -> set[int]:
        """All processes of this backend that are alive."""
        found = set(members(self.cgroup)) if self.cgroup is not None else set()
        if processes.is_alive(*self.backend):
            found |= {self.backend[0], *processes.descendants(self.backend[0])}
        return found | set(_marked(self.name))


def record_path(run_dir: Path, name: str) -> Path:
    return run_dir / f"{name}.backend.json"


def sweep(run_dir: Path) -> list[int]:
    """Kill what dead kvguards left under this run directory; returns the pids. Blocking."""
    killed: list[int] = []
    for file in sorted(run_dir.glob("*.backend.json")):
        leftover = Leftover.read(file)
        if leftover is None:
            file.unlink(missing_ok=True)
            continue
        if processes.is_alive(*leftover.warden):
            if processes.is_alive(*leftover.kvguard):
                continue
            if _until(partial(_has_ended, leftover.warden)):  # it is at it
                continue
        killed += sorted(kill(leftover, file))
    return killed


def kill(leftover: Leftover, file: Path) -> set[int]:
    """Kill one backend without a warden, remove its cgroup and record; returns the pids. Blocking."""
    killed: set[int] = set()

    def none_left() -> bool:
        victims = leftover.pids()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(victims)
        return not victims

    if _until(none_left) and _until(partial(_removed, leftover.cgroup)):
        file.unlink(missing_ok=True)
    return killed


def _has_ended(process: tuple[int, int]) -> bool:
    return not processes.is_alive(*process)


def _removed(cgroup: Path | None) -> bool:
    if cgroup is None:
        return True
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


def _marked(name: str) -> Iterator[int]:
    mark = f"{MARK}={name}".encode()
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if mark in environment.split(b"\0"):
                process = processes.look(pid)
                if process is not None and process.alive:
                    yield pid


def _until(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True
