"""What /proc says of processes: who came of whom, and which process a pid meant. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple


class Process(NamedTuple):
    """One line of the process table. `started` (clock ticks after boot) tells a pid from its reuse."""

    pid: int
    parent: int
    state: str
    started: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def look(pid: int) -> Process | None:
    """The process of this pid now; None without one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name in parentheses may hold anything, spaces and parentheses too
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19])) if len(fields) > 19 else None


def is_alive(pid: int, started: int) -> bool:
    """Whether that very process lives; a zombie does not."""
    process = look(pid)
    return process is not None and process.started == started and process.alive


def boot_id() -> str:
    """Names this boot of the machine: pids and start times of another mean nobody here."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(pid: int) -> Iterator[int]:
    """Everything alive below a process, parents first. A subreaper is above whatever daemonizes below it."""
    children: dict[int, list[Process]] = {}
    for process in map(look, all_pids()):
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), ()):
            if child.alive:
                yield child.pid
            pending.append(child.pid)
