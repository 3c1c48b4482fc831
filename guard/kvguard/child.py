"""kvguard's side of a backend process: spawned by a warden, its output read line by line, its end awaited."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from kvguard import leftovers, processes, warden
from kvguard.cgroups import LimitKind, can_make, members, oom_kills_in, own_cgroups
from kvguard.domain import ExitStatus, Launch
from kvguard.lines import LineCutter
from kvguard.ports import BackendError

CHUNK_BYTES = 16 << 10
LINES_AT_ONCE = 64
LAST_LINES_S = 1.0
GONE_PATIENCE_S = 60.0
PIDS_KEPT_S = 0.5
OWN_SETTINGS = "KVGUARD_"
"""kvguard's own environment variables, its clients' keys among them, are not the backend's business."""


class SpawnError(BackendError):
    """The backend could not be started at all; the message says why."""


class StuckError(BackendError):
    """Processes of the backend do not die, and hold their memory."""


class Child:
    """One backend process. `spawn` makes it; it is gone after `stop`, or after its own end.

    limit_kind     the memory limit in force; `limit_reason` says why it is not a cgroup, where one was asked
    cgroup         the memory cgroup made for it, if any
    signal_sender  "kvguard" when we sent the signal that ended it; the kernel tells of nobody else
    """

    def __init__(self, process: asyncio.subprocess.Process, record: Path) -> None:
        self._warden = process
        self._record = record
        self._exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._pids: tuple[int, ...] = ()
        self._pids_at_s = float("-inf")
        self.pid = 0
        self.limit_kind: LimitKind = "none"
        self.limit_reason = ""
        self.cgroup: Path | None = None
        self.signal_sender = ""

    @classmethod
    async def spawn(
        cls,
        launch: Launch,
        *,
        memory_limit_bytes: int | None,
        run_dir: Path,
        on_line: Callable[[str], None],
        cwd: Path | None = None,
    ) -> Child:
        """Start `launch` under a warden. Raises SpawnError."""
        order = _order(launch, memory_limit_bytes, run_dir, cwd)
        for prefix in _scopes(memory_limit_bytes):
            child = await cls._under_warden(prefix, order, on_line)
            if child is not None:
                return child
        raise SpawnError("the backend cannot be started: its warden died")

    @classmethod
    async def _under_warden(
        cls, prefix: Sequence[str], order: dict[str, Any], on_line: Callable[[str], None]
    ) -> Child | None:
        """None when the warden itself did not come up. Raises SpawnError when the backend did not."""
        output, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                *warden.command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
        child = cls(process, Path(order["record"]))
        spawned: dict[str, Any] = {}
        try:
            child._send({**order, "output_fd": write_end})
            first = await child._report()
            if first.get("event") == "failed":
                raise SpawnError(f"the backend cannot be started: {first['reason']}")
            spawned = first
        finally:
            if not spawned:
                os.close(output)
                child._hang_up()  # whatever the warden has by now, it kills
                await process.wait()
        if not spawned:
            return None
        child._begin(spawned, output, on_line)
        return child

    def _begin(self, spawned: dict[str, Any], output: int, on_line: Callable[[str], None]) -> None:
        self.pid = int(spawned["pid"])
        self.limit_kind = spawned["limit_kind"]
        self.limit_reason = spawned["reason"]
        self.cgroup = Path(spawned["cgroup"]) if spawned["cgroup"] else None
        reader = asyncio.create_task(_read_lines(output, on_line), name="backend-output")
        self._tasks = [reader, asyncio.create_task(self._read_reports(reader), name="backend-reports")]

    # ------------------------------------------------------------ talking to the warden

    def _send(self, order: dict[str, Any]) -> None:
        assert self._warden.stdin is not None
        self._warden.stdin.write(json.dumps(order).encode() + b"\n")

    def _hang_up(self) -> None:
        assert self._warden.stdin is not None
        self._warden.stdin.close()

    async def _report(self) -> dict[str, Any]:
        assert self._warden.stdout is not None
        line = await self._warden.stdout.readline()
        return dict(json.loads(line)) if line else {}

    async def _read_reports(self, reader: asyncio.Task[None]) -> None:
        gone = False
        while report := await self._report():
            if report["event"] == "exited":
                status = ExitStatus(
                    code=report["code"], signal=report["signal"], oom_kills=report["oom_kills"]
                )
                self.signal_sender = "kvguard" if report["by_us"] and status.signal is not None else ""
                await asyncio.wait({reader}, timeout=LAST_LINES_S)  # a child of it may hold the pipe open
                self._exited.set_result(status)
            gone = report["event"] == "gone"
        if not gone:
            await self._finish_for_the_warden()
        await asyncio.wait({reader}, timeout=LAST_LINES_S)
        reader.cancel()
        if not self._exited.done():
            self._exited.set_result(ExitStatus(signal=9))
        await self._warden.wait()
        self._gone.set()

    async def _finish_for_the_warden(self) -> None:
        """Someone killed it: what it guarded has to go too."""
        left = leftovers.Leftover.read(self._record)
        while left is not None:
            await asyncio.to_thread(leftovers.kill, left, self._record)
            left = leftovers.Leftover.read(self._record)

    # ------------------------------------------------------------ life

    @property
    def status(self) -> ExitStatus | None:
        """How it ended; None while it runs."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._exited)

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, patience, SIGKILL to all of it; returns when its memory is gone. Idempotent.

        A second call may shorten the patience of the first. Raises StuckError.
        """
        if not self._gone.is_set():
            with contextlib.suppress(ConnectionError, RuntimeError):  # the warden went first
                self._send({"grace_s": grace_s})
        try:
            async with asyncio.timeout(grace_s + GONE_PATIENCE_S):
                await self.memory_gone()
        except TimeoutError:
            left = ", ".join(map(str, self.pids())) or "none that we see"
            raise StuckError(f"the backend does not die: processes left: {left}") from None

    async def memory_gone(self) -> None:
        """Wait until every process of it is reaped and its cgroup removed."""
        await self._gone.wait()

    def pids(self) -> Sequence[int]:
        """The processes of the backend, the first one first; at most half a second old."""
        now_s = time.monotonic()
        if now_s - self._pids_at_s > PIDS_KEPT_S:
            found = members(self.cgroup) if self.cgroup else processes.descendants(self._warden.pid)
            self._pids = tuple(sorted(found, key=lambda pid: pid != self.pid))
            self._pids_at_s = now_s
        return self._pids

    def cpu_s(self) -> float:
        """Processor time of what lives of it."""
        total_s = 0.0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total_s += times.user + times.system
        return total_s

    def oom_kills(self) -> int | None:
        """What the kernel has killed in its cgroup so far; None without a cgroup of its own."""
        status = self.status
        if self.cgroup is None:
            return None
        return status.oom_kills if status is not None else oom_kills_in(self.cgroup)


def _order(launch: Launch, memory_limit_bytes: int | None, run_dir: Path, cwd: Path | None) -> dict[str, Any]:
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"kvguard-{os.getpid()}-{secrets.token_hex(4)}"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(OWN_SETTINGS)}
    return {
        "argv": list(launch.argv),
        "env": {**inherited, **dict(launch.env), leftovers.MARK: name},
        "cwd": str(cwd) if cwd else None,
        "memory_limit_bytes": memory_limit_bytes,
        "name": name,
        "record": str(leftovers.record_path(run_dir, name)),
    }


async def _read_lines(descriptor: int, on_line: Callable[[str], None]) -> None:
    """Read to the end, whatever becomes of a line: an engine whose output nobody takes stops or dies.

    A child that floods waits for us, and the event loop has its turn in between.
    """
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader(limit=CHUNK_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )

    def take(line: str) -> None:
        try:
            on_line(line)
        except Exception as exc:
            loop.call_exception_handler({"message": "a line of the backend was not taken", "exception": exc})

    cutter = LineCutter()
    try:
        while chunk := await stream.read(CHUNK_BYTES):
            for number, line in enumerate(cutter.feed(chunk), start=1):
                take(line)
                if number % LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        for line in cutter.end():
            take(line)
    finally:
        transport.close()


def _scopes(memory_limit_bytes: int | None) -> list[list[str]]:
    """Command prefixes to try for the warden, best first: a systemd scope where a cgroup needs one."""
    systemd_run = shutil.which("systemd-run")
    if memory_limit_bytes is None or systemd_run is None or can_make(own_cgroups()):
        return [[]]
    whose = ["--user"] if os.geteuid() else []
    return [[systemd_run, *whose, "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--"], []]
