"""The process that owns a backend: makes its cgroup, spawns it, says how it ended, leaves nothing behind.

Single-threaded, standard library only, started by file (`python -I warden.py`) and outside the backend's
cgroup. It talks JSON lines: orders on stdin, reports on stdout. When stdin closes, kvguard is gone, however
it went: everything is killed and the cgroup removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

V1_ROOT = Path("/sys/fs/cgroup/memory")
V2_ROOT = Path("/sys/fs/cgroup")
PR_SET_CHILD_SUBREAPER = 36
KILL_PATIENCE_S = 10.0


class Limit:
    """A memory limit in force: a cgroup of our own, an address-space limit, or none."""

    def __init__(self, kind: str, *, path: Path | None = None, reason: str = "", size_bytes: int = 0) -> None:
        self.kind = kind
        self.path = path
        self.reason = reason
        self.size_bytes = size_bytes

    def enter(self) -> None:
        """In the child, before exec: every byte it takes is charged."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))
        elif self.kind == "rlimit_as":
            resource.setrlimit(resource.RLIMIT_AS, (self.size_bytes, self.size_bytes))

    def pids(self) -> list[int]:
        if self.path is None:
            return []
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]
        return []

    def oom_kills(self) -> int:
        """The kernel's count of processes that it killed in this cgroup."""
        if self.path is None:
            return 0
        name = "memory.oom_control" if self.kind == "cgroup_v1" else "memory.events"
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def remove(self) -> None:
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                self.path.rmdir()


def make_limit(size_bytes: int | None, name: str) -> Limit:
    """A cgroup where one can be made, else an address-space limit that says why."""
    if size_bytes is None:
        return Limit("none")
    problems = []
    for make in (_v2_cgroup, _v1_cgroup):
        try:
            return make(size_bytes, name)
        except OSError as exc:
            problems.append(str(exc))
    return Limit("rlimit_as", reason="; ".join(problems), size_bytes=size_bytes)


def _v1_cgroup(size_bytes: int, name: str) -> Limit:
    own = _own_path("memory")
    path = (V1_ROOT / own.lstrip("/")) / name
    path.mkdir()
    try:
        (path / "memory.limit_in_bytes").write_text(str(size_bytes))
        with contextlib.suppress(OSError):  # swap accounting may be off
            (path / "memory.memsw.limit_in_bytes").write_text(str(size_bytes))
        with contextlib.suppress(OSError):
            (path / "memory.swappiness").write_text("0")
    except OSError:
        path.rmdir()
        raise
    return Limit("cgroup_v1", path=path, size_bytes=size_bytes)


def _v2_cgroup(size_bytes: int, name: str) -> Limit:
    """Beside our own cgroup: one that has processes may not have children with controllers."""
    if "memory" not in (V2_ROOT / "cgroup.controllers").read_text().split():
        raise OSError("the memory controller is not under cgroup v2")
    parent = (V2_ROOT / _own_path("").lstrip("/")).parent
    if V2_ROOT not in (parent, *parent.parents):
        parent = V2_ROOT
    with contextlib.suppress(OSError):  # already on, or not ours to change
        (parent / "cgroup.subtree_control").write_text("+memory")
    path = parent / name
    path.mkdir()
    try:
        (path / "memory.max").write_text(str(size_bytes))
        (path / "memory.oom.group").write_text("1")
        with contextlib.suppress(OSError):
            (path / "memory.swap.max").write_text("0")
    except OSError:
        path.rmdir()
        raise
    return Limit("cgroup_v2", path=path, size_bytes=size_bytes)


def _own_path(controller: str) -> str:
    """Our path in the hierarchy of a v1 controller, or in v2's (empty name). Raises OSError without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") if controller else not controllers:
            return path
    raise OSError(f"no cgroup hierarchy for {controller or 'v2'}")


class Warden:
    """One backend and all its children."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._limit = make_limit(order.get("memory_limit_bytes"), order["name"])
        self._pid = 0
        self._reaped = False

    def spawn(self) -> None:
        """Fork, limit, exec. Reports `spawned`, or `failed` with the reason."""
        read_end, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read_end)
            self._become_the_backend(write_end)
        os.close(write_end)
        error = b"".join(iter(lambda: os.read(read_end, 4096), b"")).decode()
        os.close(read_end)
        os.close(self._order["output_fd"])
        if error:
            os.waitpid(self._pid, 0)
            self._limit.remove()
            report("failed", reason=error)
            raise SystemExit(0)
        report(
            "spawned",
            pid=self._pid,
            limit_kind=self._limit.kind,
            cgroup=str(self._limit.path) if self._limit.path else None,
            reason=self._limit.reason,
        )

    def _become_the_backend(self, error_fd: int) -> None:
        os.set_inheritable(error_fd, False)
        try:
            os.setsid()
            self._limit.enter()
            output = self._order["output_fd"]
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.closerange(3, error_fd)
            os.closerange(error_fd + 1, 256)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if self._order.get("cwd"):
                os.chdir(self._order["cwd"])
            argv = self._order["argv"]
            os.execvpe(argv[0], argv, self._order["env"])
        except BaseException as exc:
            os.write(error_fd, f"{self._order['argv'][0]}: {getattr(exc, 'strerror', None) or exc}".encode())
            os._exit(127)

    def watch(self) -> None:
        """Until the backend has ended and kvguard has said good-bye, or is gone."""
        pidfd = os.pidfd_open(self._pid)
        waiting_for = [0, pidfd]
        buffer = b""
        while True:
            ready, _, _ = select.select(waiting_for, [], [])
            if pidfd in ready:
                waiting_for.remove(pidfd)
                self._report_exit()
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    self.kill_all()
                    return
                buffer += data
                while b"\n" in buffer:
                    line, _, buffer = buffer.partition(b"\n")
                    self._stop(float(json.loads(line)["grace_s"]), pidfd)

    def _report_exit(self) -> None:
        _, status = os.waitpid(self._pid, 0)
        self._reaped = True
        report(
            "exited",
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            oom_kills=self._limit.oom_kills(),
        )

    def _stop(self, grace_s: float, pidfd: int) -> None:
        """SIGTERM, patience, then kill whatever is left. The exit is reported by `watch`."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGTERM)
            select.select([pidfd], [], [], grace_s)
        if not self._reaped and select.select([pidfd], [], [], 0)[0]:
            self._report_exit()
        self.kill_all()
        report("gone")
        raise SystemExit(0)

    def kill_all(self) -> None:
        """Kill every process that came of the backend, and wait until the cgroup is empty."""
        deadline_s = time.monotonic() + KILL_PATIENCE_S
        if self._limit.kind == "cgroup_v2" and self._limit.path is not None:
            with contextlib.suppress(OSError):
                (self._limit.path / "cgroup.kill").write_text("1")
        while time.monotonic() < deadline_s:
            victims = set(self._limit.pids()) | set(_descendants())
            if not self._reaped:
                victims.add(self._pid)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not victims or (self._reaped and not self._limit.pids() and not list(_descendants())):
                break
            time.sleep(0.005)
        with contextlib.suppress(OSError):
            self._limit.remove()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid and not self._reaped:
                    self._reaped = True
                    report(
                        "exited",
                        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                        oom_kills=self._limit.oom_kills(),
                    )


def _descendants() -> Iterator[int]:
    """All processes below us: as a subreaper we adopt what daemonizes."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    pending = [os.getpid()]
    while pending:
        for pid in children.get(pending.pop(), ()):
            yield pid
            pending.append(pid)


def report(event: str, **facts: object) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: stdin tells
        os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for kvguard, which then tells us
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warden = Warden(json.loads(_first_line()))
    warden.spawn()
    warden.watch()


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)
        line += byte
    return line


if __name__ == "__main__":
    main()
