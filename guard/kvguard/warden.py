"""The process that owns a backend: makes its cgroup, spawns it, says how it ended, leaves nothing behind.

Single-threaded, standard library only, and outside the backend's cgroup. It talks JSON lines: orders on
stdin, reports on stdout. What comes in:

    {"argv", "env", "cwd", "name", "memory_limit_bytes", "output_fd", "record"}   the first line
    {"grace_s": 10}      SIGTERM now, and SIGKILL to all of it after so long
    end of file          kvguard is gone, however it went: SIGKILL to all of it now

What goes out: `spawned` or `failed`, then `exited` once, then `gone` when no process and no cgroup is left.
When the backend has ended, whatever it started is killed too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvguard import processes
from kvguard.cgroups import make_limit, own_cgroups

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_AGAIN_S = 0.05
OOM_SCORE = 500
"""Of 1,000, on top of ours: in a container that both share, the kernel kills the backend and not kvguard."""

_libc = ctypes.CDLL(None)


class Orders:
    """Lines from kvguard. Read without buffering ahead of `select`."""

    def __init__(self) -> None:
        self._pending = b""
        self.ended = False

    def take(self) -> list[dict[str, Any]]:
        """Read once; returns the whole lines, and sets `ended` at the end of file."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = os.read(0, 1 << 20)
        self.ended = not data
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> dict[str, Any]:
        while True:
            taken = self.take()
            if taken:
                return taken[0]
            if self.ended:
                raise SystemExit(0)


class Warden:
    """One backend and all that comes of it."""

    def __init__(self, orders: Orders, wakeup_fd: int) -> None:
        self._orders = orders
        self._wakeup_fd = wakeup_fd
        self._order = orders.first()
        self._limit = make_limit(self._order["memory_limit_bytes"], self._order["name"], own_cgroups())
        self._record = Path(self._order["record"])
        self._pid = 0
        self._ended = False
        self._signalled = False

    # ------------------------------------------------------------ spawn

    def spawn(self) -> None:
        """Fork, limit, exec. Reports `spawned`, or `failed` with the reason and exits."""
        read_end, write_end = os.pipe()
        warden_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._become_the_backend(write_end, warden_pid)
        os.close(write_end)
        os.close(self._order["output_fd"])
        self._write_record()
        error = b"".join(iter(lambda: os.read(read_end, 4096), b"")).decode()
        os.close(read_end)
        if error:
            report("failed", reason=error)
            self.kill_all()
            raise SystemExit(0)
        report(
            "spawned",
            pid=self._pid,
            limit_kind=self._limit.kind,
            cgroup=str(self._limit.path) if self._limit.path else None,
            reason=self._limit.reason,
        )

    def _become_the_backend(self, error_fd: int, warden_pid: int) -> None:
        """In the child. An error goes up the pipe that exec would close."""
        argv = self._order["argv"]
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # of our one thread: the warden's end
            if os.getppid() != warden_pid:
                os._exit(127)
            os.setsid()
            self._limit.enter()
            _go_first_when_memory_is_short()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._order["output_fd"], 1)
            os.dup2(self._order["output_fd"], 2)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                with contextlib.suppress(OSError):
                    signal.signal(number, signal.SIG_DFL)
            os.closerange(3, error_fd)
            os.closerange(error_fd + 1, os.sysconf("SC_OPEN_MAX"))
            if self._order["cwd"]:
                os.chdir(self._order["cwd"])
            os.execvpe(argv[0], argv, self._order["env"])
        except BaseException as exc:
            os.write(error_fd, f"{argv[0]}: {getattr(exc, 'strerror', None) or exc}".encode())
            os._exit(127)

    def _write_record(self) -> None:
        """What a later start needs to find this backend if we are killed; see `leftovers`."""
        record = {
            "name": self._order["name"],
            "boot": processes.boot_id(),
            "kvguard": _identity(os.getppid()),
            "warden": _identity(os.getpid()),
            "backend": _identity(self._pid),
            "cgroup": str(self._limit.path) if self._limit.path else None,
        }
        with contextlib.suppress(OSError):
            self._record.write_text(json.dumps(record))

    # ------------------------------------------------------------ watch

    def watch(self) -> None:
        """Until the backend has ended, or has to."""
        kill_at_s: float | None = None
        while not self._ended:
            timeout_s = None if kill_at_s is None else max(0.0, kill_at_s - time.monotonic())
            ready, _, _ = select.select([0, self._wakeup_fd], [], [], timeout_s)
            if self._wakeup_fd in ready:
                self._reap()
            if 0 in ready:
                for order in self._orders.take():
                    self._terminate()
                    at_s = time.monotonic() + float(order["grace_s"])
                    kill_at_s = at_s if kill_at_s is None else min(kill_at_s, at_s)
                if self._orders.ended:
                    return
            if kill_at_s is not None and time.monotonic() >= kill_at_s:
                return

    def _terminate(self) -> None:
        if not self._signalled and not self._ended:
            self._signalled = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGTERM)

    def _reap(self) -> None:
        """Collect whoever has died: the backend, and orphans of it that we adopted."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_fd, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._report_exit(status)

    def _report_exit(self, status: int) -> None:
        self._ended = True
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        report(
            "exited",
            code=os.WEXITSTATUS(status) if number is None else None,
            signal=number,
            oom_kills=self._limit.oom_kills(),
            by_us=self._signalled,
        )

    # ------------------------------------------------------------ end

    def kill_all(self) -> None:
        """Kill every process that came of the backend, however long it takes to die, and its cgroup."""
        self._signalled = self._signalled or not self._ended
        self._limit.kill()
        while victims := {*self._limit.pids(), *processes.descendants(os.getpid())}:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select([self._wakeup_fd], [], [], KILL_AGAIN_S)
            self._reap()
        self._reap()
        if self._limit.remove():  # else the record stays, and the next start tries again
            self._record.unlink(missing_ok=True)


def _go_first_when_memory_is_short() -> None:
    """Its children inherit it. Raising one's own score needs no right; a sandbox may have no such file."""
    with contextlib.suppress(OSError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(1000, int(path.read_text()) + OOM_SCORE)))


def _identity(pid: int) -> list[int]:
    process = processes.look(pid)
    return [pid, process.started if process is not None else 0]


def report(event: str, **facts: object) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: stdin tells
        os.write(1, json.dumps({"event": event, **facts}).encode() + b"\n")


def _wake_on_child() -> int:
    """A descriptor that is readable when a child has died."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read_end


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for kvguard, which then tells us
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warden = Warden(Orders(), _wake_on_child())
    warden.spawn()
    warden.watch()
    warden.kill_all()
    report("gone")


def command(python: str = sys.executable) -> list[str]:
    """The command line that starts a warden: isolated, and with nothing but the standard library and us."""
    package = str(Path(__file__).parent.parent)
    code = f"import sys; sys.path.append({package!r}); from kvguard.warden import main; main()"
    return [python, "-I", "-S", "-c", code]
