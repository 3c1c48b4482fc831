"""`kvguard serve` as a child of the tests, as a person would start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil

READY = re.compile(r"kvguard is ready: (http://\S+)/v1")
PATIENCE_S = 240.0


_SERVE = (sys.executable, "-m", "kvguard.cli", "serve")


def _wrapper(cgroup: Path | None) -> list[str]:
    """A command prefix that puts what follows into a cgroup."""
    return [] if cgroup is None else ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs")]


class GuardProcess:
    """One running `kvguard serve`, its output, and what it wrote into its state directory."""

    def __init__(self, args: Sequence[str], state_dir: Path, *, inside: Path | None = None) -> None:
        self.state_dir = state_dir
        self.lines: list[str] = []
        self._moved = threading.Condition()
        self.process = subprocess.Popen(
            [*_wrapper(inside), *_SERVE, "--port", "0", "--state-dir", state_dir, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._moved:
                self.lines.append(line.rstrip("\n"))
                self._moved.notify_all()
        with self._moved:
            self._moved.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def until_line(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """Wait for a line of output. Raises AssertionError when kvguard ends or takes too long."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._moved:
            seen = 0
            while True:
                for line in self.lines[seen:]:
                    match = re.search(pattern, line)
                    if match:
                        return match
                seen = len(self.lines)
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"no {pattern!r} in time:\n{self.output}"
                assert self.process.poll() is None or len(self.lines) > seen, self.output
                self._moved.wait(min(left_s, 1.0))

    def until_ready(self) -> str:
        self.url = self.until_line(READY)[1]
        return self.url

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, **options)

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as exc:
            return exc.code, json.loads(exc.read())

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll `/guard/status` until it says so."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            status: dict[str, Any] = self.get("/guard/status")[1]
            if condition(status):
                return status
            assert time.monotonic() < deadline_s, status
            time.sleep(0.05)

    def engine_pids(self) -> list[int]:
        """The processes below kvguard, the warden included."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def written(self) -> str:
        """Every byte that it left in its state directory."""
        return "\n".join(p.read_text(errors="replace") for p in self.state_dir.rglob("*") if p.is_file())

    def records(self) -> list[dict[str, Any]]:
        journals = sorted(self.state_dir.glob("*.jsonl"))
        return [json.loads(line) for path in journals for line in path.read_text().splitlines()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def guard(*args: str, state_dir: Path, inside: Path | None = None) -> Iterator[GuardProcess]:
    """Serve until the end of the block; `inside` is a cgroup that holds kvguard and all that it starts."""
    process = GuardProcess([str(arg) for arg in args], state_dir, inside=inside)
    try:
        yield process
    finally:
        process.stop()


def gone(pids: Sequence[int]) -> bool:
    """Wait until none of these processes is there; a zombie is gone."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
