"""What kvguard costs: the same load against a fast fake engine alone and through kvguard, in one run.

    python bench/overhead.py [--json] [--seconds 2]

Rows: requests/s and latency (p50, p99) at 1, 16 and 64 clients, for a short answer in one piece and a short
stream; then chunks/s of 64 paced streams, and of 8 streams as fast as they go. Engine, kvguard and this load
generator are three processes. On a machine with fewer than three free cores they disturb each other: read
the ratios, and the rows at 1 client for latency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import uvloop

HERE = Path(__file__).parent
CLIENTS = (1, 16, 64)
SHORT_STREAM = 8
PACED_CHUNKS = 100
PACED_INTERVAL_S = 0.005
WARM_UP_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`clients` connections, each sending its next request when the last was answered."""

    name: str
    clients: int
    stream_chunks: int = 0
    paced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    requests_per_s: float
    chunks_per_s: float
    p50_s: float
    p99_s: float
    server_cpu_s_per_request: float


class Client(asyncio.Protocol):
    """One keep-alive connection; counts what an answer brings without parsing it."""

    def __init__(self, request: bytes, *, stream: bool) -> None:
        self._request = request
        self._end = b"\r\n0\r\n\r\n" if stream else b"}"
        self._tail = b""
        self._done: asyncio.Future[None] | None = None
        self.chunks = 0
        self.latencies_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")
        self._tail = (self._tail + data)[-8:]
        if self._tail.endswith(self._end) and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    async def run(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while (start_s := time.perf_counter()) < until_s:
            self._done = loop.create_future()
            self.transport.write(self._request)
            await self._done
            self.latencies_s.append(time.perf_counter() - start_s)


def request_of(load: Load) -> bytes:
    body = json.dumps(
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": load.stream_chunks or 16,
            "stream": bool(load.stream_chunks),
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def measure(port: int, pid: int, load: Load, seconds: float) -> Result:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(load.clients):
        _, client = await loop.create_connection(
            lambda: Client(request_of(load), stream=bool(load.stream_chunks)), "127.0.0.1", port
        )
        clients.append(client)
    warm_until_s = time.perf_counter() + WARM_UP_S
    await asyncio.gather(*(client.run(warm_until_s) for client in clients))
    for client in clients:
        client.chunks, client.latencies_s = 0, []
    start_s, start_cpu_s = time.perf_counter(), cpu_s(pid)
    await asyncio.gather(*(client.run(start_s + seconds) for client in clients))
    took_s, took_cpu_s = time.perf_counter() - start_s, cpu_s(pid) - start_cpu_s
    for client in clients:
        client.transport.close()
    latencies_s = sorted(s for client in clients for s in client.latencies_s)
    return Result(
        requests_per_s=len(latencies_s) / took_s,
        chunks_per_s=sum(client.chunks for client in clients) / took_s,
        p50_s=latencies_s[len(latencies_s) // 2],
        p99_s=latencies_s[int(len(latencies_s) * 0.99)],
        server_cpu_s_per_request=took_cpu_s / len(latencies_s),
    )


def start(script: str, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start a script of this folder that prints its port."""
    child = subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line.strip().isdigit():
        child.kill()
        raise SystemExit(f"{script} did not start")
    return child, int(line)


def loads() -> list[Load]:
    whole = [Load(name="whole", clients=n) for n in CLIENTS]
    short = [Load(name=f"stream of {SHORT_STREAM}", clients=n, stream_chunks=SHORT_STREAM) for n in CLIENTS]
    return [
        *whole,
        *short,
        Load(name="64 paced streams", clients=64, stream_chunks=PACED_CHUNKS, paced=True),
        Load(name="8 unpaced streams", clients=8, stream_chunks=2000),
    ]


async def run_all(seconds: float, log_dir: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for paced in (False, True):
        interval = str(PACED_INTERVAL_S if paced else 0)
        engine, engine_port = start("fake_upstream.py", "--interval-s", interval)
        guard, guard_port = start("guarded.py", f"http://127.0.0.1:{engine_port}", "--log", log_dir)
        try:
            for load in (load for load in loads() if load.paced == paced):
                direct = await measure(engine_port, engine.pid, load, seconds)
                guarded = await measure(guard_port, guard.pid, load, seconds)
                rows.append(row_of(load, direct, guarded))
        finally:
            for child in (guard, engine):
                child.terminate()
                child.wait()
    return rows


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row_of(load: Load, direct: Result, guarded: Result) -> dict[str, object]:
    return {
        "load": load.name,
        "clients": load.clients,
        "added_p50_ms": (guarded.p50_s - direct.p50_s) * 1e3,
        "added_p99_ms": (guarded.p99_s - direct.p99_s) * 1e3,
        "requests_ratio": guarded.requests_per_s / direct.requests_per_s,
        "chunks_ratio": guarded.chunks_per_s / direct.chunks_per_s if load.stream_chunks else None,
        "direct": asdict(direct),
        "guarded": asdict(guarded),
    }


def show(rows: list[dict[str, object]]) -> None:
    print(f"{'load':18} {'clients':>7} {'p50 +ms':>8} {'p99 +ms':>8} {'req/s':>8} {'of direct':>9} "
          f"{'cpu us/req':>10} {'chunks/s':>9} {'of direct':>9}")  # fmt: skip
    for row in rows:
        guarded = row["guarded"]
        assert isinstance(guarded, dict)
        chunks = row["chunks_ratio"]
        print(
            f"{row['load']:18} {row['clients']:7} {row['added_p50_ms']:8.2f} {row['added_p99_ms']:8.2f} "
            f"{guarded['requests_per_s']:8.0f} {row['requests_ratio']:9.2f} "
            f"{guarded['server_cpu_s_per_request'] * 1e6:10.0f} {guarded['chunks_per_s']:9.0f} "
            + (f"{chunks:9.3f}" if isinstance(chunks, float) else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as log_dir:
        rows = uvloop.run(run_all(args.seconds, log_dir))
    if args.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
        print(json.dumps({"machine": machine, "rows": rows}, indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main()
