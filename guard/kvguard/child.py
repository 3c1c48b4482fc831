"""kvguard's side of a backend process: spawned by a warden, its output read line by line, its end awaited."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from kvguard import leftovers, warden
from kvguard.domain import ExitStatus, Launch
from kvguard.ports import BackendError

LONGEST_LINE_BYTES = 16 << 10
GONE_TIMEOUT_S = 30.0
PIDS_TTL_S = 1.0


class SpawnError(BackendError):
    """The backend could not be started at all; the message says why."""


class Child:
    """One backend process. `spawn` makes it; `stop` must be awaited once."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._warden = process
        self._on_line = on_line
        self._exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.pid = 0
        self._note: Path | None = None
        self._pids: tuple[int, ...] = ()
        self._pids_at_s = float("-inf")
        self.limit_kind = "none"
        self.limit_reason = ""
        self.cgroup: Path | None = None

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
        output, write_end = os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(Path(warden.__file__)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        child = cls(process, on_line)
        order = {
            "argv": list(launch.argv),
            "env": {**os.environ, **dict(launch.env)},
            "cwd": str(cwd) if cwd else None,
            "memory_limit_bytes": memory_limit_bytes,
            "name": f"kvguard-{process.pid}",
            "output_fd": write_end,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        first = await child._report()
        if first.get("event") != "spawned":
            os.close(output)
            await process.wait()
            raise SpawnError(f"the backend cannot be started: {first.get('reason', 'its warden died')}")
        child.pid = int(first["pid"])
        child.limit_kind = first["limit_kind"]
        child.limit_reason = first["reason"]
        child.cgroup = Path(first["cgroup"]) if first["cgroup"] else None
        child._note = await asyncio.to_thread(leftovers.note, run_dir, child.pid, child.cgroup)
        reader = asyncio.create_task(child._read_output(output), name="backend-output")
        child._tasks = [reader, asyncio.create_task(child._read_reports(reader), name="backend-reports")]
        return child

    # ------------------------------------------------------------ reading

    async def _report(self) -> dict[str, Any]:
        assert self._warden.stdout is not None
        line = await self._warden.stdout.readline()
        return dict(json.loads(line)) if line else {}

    async def _read_reports(self, reader: asyncio.Task[None]) -> None:
        while report := await self._report():
            if report["event"] == "exited" and not self._exited.done():
                status = ExitStatus(
                    code=report["code"], signal=report["signal"], oom_kills=report["oom_kills"]
                )
                with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
                    await asyncio.wait_for(asyncio.shield(reader), 1.0)
                self._exited.set_result(status)
        if not self._exited.done():
            self._exited.set_result(ExitStatus(signal=9))
        self._gone.set()

    async def _read_output(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
        )
        pending = b""
        try:
            while chunk := await stream.read(LONGEST_LINE_BYTES):
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._line(line)
                if len(pending) > LONGEST_LINE_BYTES:
                    self._line(pending)
                    pending = b""
            if pending:
                self._line(pending)
        finally:
            transport.close()

    def _line(self, raw: bytes) -> None:
        self._on_line(raw[:LONGEST_LINE_BYTES].decode(errors="replace").rstrip("\r"))

    # ------------------------------------------------------------ life

    @property
    def status(self) -> ExitStatus | None:
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self._exited)

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, patience, SIGKILL to all of it. Idempotent."""
        if not self._gone.is_set() and self._warden.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._warden.stdin.write(json.dumps({"grace_s": grace_s}).encode() + b"\n")
                await self._warden.stdin.drain()
        await self.memory_gone()

    async def memory_gone(self) -> None:
        """Wait until every process of it is reaped and its cgroup removed."""
        await asyncio.wait_for(self._gone.wait(), GONE_TIMEOUT_S)
        await self._warden.wait()
        if self._note is not None:
            await asyncio.to_thread(self._note.unlink, missing_ok=True)
        self._tasks[0].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def pids(self) -> Sequence[int]:
        """The process and all that came of it; looked up at most once a second: it reads all of /proc."""
        now_s = time.monotonic()
        if now_s - self._pids_at_s > PIDS_TTL_S:
            self._pids_at_s = now_s
            try:
                children = psutil.Process(self.pid).children(recursive=True)
                self._pids = (self.pid, *(child.pid for child in children))
            except psutil.Error:
                self._pids = ()
        return self._pids

    def cpu_s(self) -> float:
        """Processor time so far; 0 when it has ended."""
        total_s = 0.0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total_s += times.user + times.system
        return total_s
