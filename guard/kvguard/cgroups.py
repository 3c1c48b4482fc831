"""Memory cgroups, v1 and v2: where this process is, and the limit that a new one puts on a backend.

Standard library only: the warden runs on it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

LimitKind = Literal["cgroup_v1", "cgroup_v2", "rlimit_as", "none"]
REMOVE_PATIENCE_S = 5.0


class OwnCgroups(NamedTuple):
    """The directories of the cgroups that a process is in; None where there is no such hierarchy.

    A machine may have both: v1 with the memory controller, and a v2 mount without it.
    """

    v1: Path | None
    v2: Path | None

    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in self if path is not None)


def own_cgroups(proc: Path = Path("/proc/self")) -> OwnCgroups:
    """Where this process is, by its mounts. Inside a container that may be the mount's own root."""
    v1 = v2 = None
    for line in (proc / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            v1 = path
        elif number == "0" and not controllers:
            v2 = path
    found: dict[str, Path] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        _, _, _, root, mount, *_ = left.split()
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and "memory" in options.split(",") and v1 is not None:
            found.setdefault("v1", _below(mount, root, v1))
        elif kind == "cgroup2" and v2 is not None:
            found.setdefault("v2", _below(mount, root, v2))
    return OwnCgroups(found.get("v1"), found.get("v2"))


def _below(mount: str, root: str, path: str) -> Path:
    """`path` as seen through a mount that shows the hierarchy from `root` down."""
    top = Path(mount.replace("\\040", " "))
    inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
    below = top / inside.lstrip("/")
    return below if ".." not in below.parts and below.is_dir() else top


# ---------------------------------------------------------------- a limit


class Limit:
    """A memory limit in force: a cgroup made for one backend, an address-space limit, or none."""

    def __init__(
        self,
        kind: LimitKind,
        own: OwnCgroups,
        *,
        path: Path | None = None,
        reason: str = "",
        size_bytes: int = 0,
    ) -> None:
        self.kind = kind
        self.path = path
        self.reason = reason
        self.size_bytes = size_bytes
        folders = (path,) if path is not None else own.paths()
        self._counter = next(filter(None, map(_counter_of, folders)), None)
        self._oom_before = _counted(self._counter)

    def enter(self) -> None:
        """In the child, before exec: every byte that it takes is charged."""
        if self.path is not None:
            _put(self.path / "cgroup.procs", os.getpid())
        elif self.kind == "rlimit_as":
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            size = self.size_bytes if hard == resource.RLIM_INFINITY else min(self.size_bytes, hard)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))

    def pids(self) -> list[int]:
        """The processes in the cgroup of its own; none without one."""
        return members(self.path) if self.path is not None else []

    def kill(self) -> None:
        """v2 kills a whole cgroup at once, and whatever forks meanwhile."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                _put(self.path / "cgroup.kill", 1)

    def oom_kills(self) -> int:
        """Processes that the kernel killed for memory since the limit was made.

        Without a cgroup of its own, the count is of the one that we share with it, most often a container.
        """
        return _counted(self._counter) - self._oom_before

    def remove(self) -> bool:
        """Remove the cgroup; the kernel may need a moment after the last process. False when it stays."""
        deadline_s = time.monotonic() + REMOVE_PATIENCE_S
        while self.path is not None and self.path.exists():
            with contextlib.suppress(OSError):
                self.path.rmdir()
                break
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        return True


def members(path: Path) -> list[int]:
    """The processes in one cgroup; none where it is gone."""
    try:
        return [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def oom_kills_in(path: Path) -> int:
    """Processes of this cgroup that any out-of-memory killer of the kernel has killed."""
    return _counted(_counter_of(path))


def _counter_of(path: Path) -> Path | None:
    for name in ("memory.oom_control", "memory.events"):
        if (path / name).exists():
            return path / name
    return None


def _counted(counter: Path | None) -> int:
    with contextlib.suppress(OSError):
        for line in counter.read_text().splitlines() if counter is not None else ():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


# ---------------------------------------------------------------- making one


def make_limit(
    size_bytes: int | None,
    name: str,
    own: OwnCgroups,
    *,
    mkdir: Callable[[Path], None] = Path.mkdir,
) -> Limit:
    """A cgroup of this size where one can be made, else an address-space limit that says why."""
    if size_bytes is None:
        return Limit("none", own)
    reasons = []
    for version, make in (("v2", _make_v2), ("v1", _make_v1)):
        try:
            return make(size_bytes, name, own, mkdir)
        except OSError as exc:
            where = f" at {exc.filename}" if exc.filename else ""
            reasons.append(f"cgroup {version}: {exc.strerror or exc}{where}")
    return Limit("rlimit_as", own, reason="; ".join(reasons), size_bytes=size_bytes)


def can_make(own: OwnCgroups) -> bool:
    """Whether this process may make a memory cgroup, as far as permissions tell."""
    v2 = _home_v2(own.v2) if own.v2 is not None and _has_memory(own.v2) else None
    return any(home is not None and os.access(home, os.W_OK) for home in (v2, own.v1))


def _make_v1(size_bytes: int, name: str, own: OwnCgroups, mkdir: Callable[[Path], None]) -> Limit:
    if own.v1 is None:
        raise OSError("not mounted")
    path = own.v1 / name
    mkdir(path)
    with _removed_on_error(path):
        _put(path / "memory.limit_in_bytes", size_bytes)
        with contextlib.suppress(OSError):  # there only with swap accounting
            _put(path / "memory.memsw.limit_in_bytes", size_bytes)
        with contextlib.suppress(OSError):
            _put(path / "memory.swappiness", 0)
        return Limit("cgroup_v1", own, path=path, size_bytes=size_bytes)


def _make_v2(size_bytes: int, name: str, own: OwnCgroups, mkdir: Callable[[Path], None]) -> Limit:
    if own.v2 is None:
        raise OSError("not mounted")
    if not _has_memory(own.v2):
        raise OSError("no memory controller")
    home = _home_v2(own.v2)
    if home == own.v2 and _has_parent(home):
        _move_to_leaf(home, mkdir)
    with contextlib.suppress(OSError):  # on already, or not ours to change: memory.max tells
        _put(home / "cgroup.subtree_control", "+memory")
    path = home / name
    mkdir(path)
    with _removed_on_error(path):
        _put(path / "memory.max", size_bytes)
        with contextlib.suppress(OSError):  # there only with swap
            _put(path / "memory.swap.max", 0)
        with contextlib.suppress(OSError):
            _put(path / "memory.oom.group", 1)
        return Limit("cgroup_v2", own, path=path, size_bytes=size_bytes)


def _home_v2(own: Path) -> Path:
    """Where a child with a controller can be made: a cgroup that has processes may not hand one down.

    1. a scope that holds nobody but us: below it, once we have moved to a leaf
    2. the root: below it, since the rule does not bind the machine's root
    3. else beside our own
    """
    if not _has_parent(own) or members(own) == [os.getpid()]:
        return own
    return own.parent


def _has_parent(path: Path) -> bool:
    return (path.parent / "cgroup.procs").exists()


def _has_memory(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return "memory" in (path / "cgroup.controllers").read_text().split()
    return False


def _move_to_leaf(scope: Path, mkdir: Callable[[Path], None]) -> None:
    leaf = scope / "warden"
    mkdir(leaf)
    _put(leaf / "cgroup.procs", os.getpid())


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        raise


def _put(path: Path, value: object) -> None:
    """Write a control file; never create one, as `write_text` would try to."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)
