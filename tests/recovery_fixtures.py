"""Ways to take a running backend down for real: the kernel's out-of-memory killer, and a plain SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_fixtures import GuardProcess
from tiny_gguf import write_tiny_llama

NEEDS_CGROUP = pytest.mark.skipif(os.geteuid() != 0, reason="making a memory cgroup needs root here")

DIGITS_ONLY = {str(token): -100 for token in range(320) if not 15 <= token < 25}
"""Bans every token of the tiny model but the ten digits: one token a character, however it is tokenized."""

_HOG = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
held = []
for _ in range(int(sys.argv[2])):
    held.append(bytearray(os.urandom(1 << 12) * (1 << 10)))
print("full", flush=True)
sys.stdin.read()
"""


def write_heavy_llama(path: Path) -> Path:
    """16 KiB of KV a token: contexts that take memory for real."""
    return write_tiny_llama(path, layers=8, kv_heads=8, heads=8, head_dim=64, ctx=32768)


def engine_pid(process: GuardProcess) -> int:
    """The engine's own process: below kvguard's warden."""
    for child in psutil.Process(process.process.pid).children(recursive=True):
        command = " ".join(child.cmdline())
        if "kvguard.warden" not in command and ("embedded_server" in command or "llama-server" in command):
            return child.pid
    raise AssertionError("no engine runs")


def memory_cgroup(pid: int) -> Path:
    """The memory cgroup that a process is in."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if not controllers:
            unified = Path("/sys/fs/cgroup") / path.lstrip("/")
    return unified


@contextmanager
def container(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup as a container has one; what is in it at the end is killed."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root, limit = ("", "memory.max") if unified else ("memory", "memory.limit_in_bytes")
    path = Path("/sys/fs/cgroup") / root / f"kvg-recovery-{os.getpid()}"
    path.mkdir()
    try:
        (path / limit).write_text(str(limit_bytes))
        yield path
    finally:
        while left := (path / "cgroup.procs").read_text().split():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        path.rmdir()


def hog(cgroup: Path, size_bytes: int) -> subprocess.Popen[str]:
    """A process that fills a cgroup."""
    return subprocess.Popen(
        [sys.executable, "-c", _HOG, str(cgroup), str(size_bytes >> 22)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def make_first_victim(pid: int) -> None:
    """When memory is short, the kernel takes this one before anyone else."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def run_out_of_memory(process: GuardProcess, size_bytes: int = 4 << 30) -> None:
    """Let the kernel kill the engine for memory, between two of its tokens."""
    pid = engine_pid(process)
    os.kill(pid, signal.SIGSTOP)
    make_first_victim(pid)
    with hog(memory_cgroup(pid), size_bytes) as filler:
        try:
            filler.wait(120)  # whatever is left in the cgroup is killed with the engine
        finally:
            filler.kill()


def kill_engine(process: GuardProcess) -> None:
    os.kill(engine_pid(process), signal.SIGKILL)


def metric(process: GuardProcess, name: str, **labels: str) -> float:
    """One value of `/metrics`; 0 where it is not there."""
    with urllib.request.urlopen(process.url + "/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
    return 0.0


def failed_records(process: GuardProcess) -> list[dict[str, Any]]:
    return [record for record in process.records() if record["event"] == "config_failed"]
