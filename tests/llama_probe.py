"""What real llama-server says that it allocated: its load lines at verbosity 4, to the printed digit."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|DSV4 \w+ state|output|compute) buffer size\s*=\s*([\d.]+) MiB")
_CACHE = re.compile(r"size =\s*([\d.]+) MiB \(\s*(\d+) cells,\s*(\d+) layers,\s*\d+/\s*\d+ seqs\), K")
_READY = ("server is listening", "model loaded")


def engines_dir() -> Path:
    """The cache that scripts/engines.py fills."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVGUARD_ENGINES_DIR") or Path(cache) / "kvguard" / "engines")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def llama_server() -> Path | None:
    """The newest llama-server in the cache; None where there is none."""
    found = sorted(engines_dir().glob("llama.cpp-*/bin/llama-server"))
    return found[-1] if found else None


@dataclass(slots=True)
class Observed:
    """Bytes by account, from the sizes that the engine printed in MiB with two digits."""

    lines: list[str] = field(repr=False)
    weights_bytes: float = 0.0
    kv_bytes: float = 0.0
    state_bytes: float = 0.0
    compute_bytes: float = 0.0
    output_bytes: float = 0.0
    caches: int = 0
    buffers: int = 0
    states: int = 0
    rss_bytes: int = 0

    @property
    def failed(self) -> bool:
        return not any(ready in line for line in self.lines for ready in _READY)


def observed(lines: Sequence[str]) -> Observed:
    """Sum the buffers of a start. Of compute buffers the last one counts: they are reserved twice."""
    seen = Observed(list(lines))
    for line in lines:
        buffer, cache = _BUFFER.search(line), _CACHE.search(line)
        if cache:
            seen.kv_bytes += float(cache[1]) * MIB
            seen.caches += 1
        elif buffer and buffer[2] == "model":
            seen.weights_bytes += float(buffer[3]) * MIB
            seen.buffers += 1
        elif buffer and buffer[2].endswith(("RS", "state")):
            seen.state_bytes += float(buffer[3]) * MIB
            seen.states += 1
        elif buffer and buffer[2] == "compute":
            seen.compute_bytes = float(buffer[3]) * MIB
        elif buffer and buffer[2] == "output":
            seen.output_bytes = float(buffer[3]) * MIB
    return seen


@contextmanager
def serving(server: Path, model: Path, *args: str, port: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Start llama-server and wait until it is ready or has ended; yields its pid and its lines so far."""
    argv = [
        str(server),
        "-m",
        str(model),
        "--port",
        str(port),
        "--load-mode",
        "none",
        "-lv",
        "4",
        "--fit",
        "off",
    ]
    child = subprocess.Popen(
        ["nice", *argv, "--no-warmup", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
            if any(ready in line for ready in _READY):
                break
        yield child.pid, lines
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def load(server: Path, model: Path, *args: str) -> Observed:
    """Start llama-server once and return what it printed, with its resident memory when ready."""
    with serving(server, model, *args) as (pid, lines):
        seen = observed(lines)
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
            seen.rss_bytes = int(found[1]) * 1024 if found else 0
    return seen
