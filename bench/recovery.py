#!/usr/bin/env python3
"""Out of memory on real llama.cpp, live: each rung of the ladder cures what it should, no request is lost.

  rungs  a load that needs more than the card has, once for each rung; the journal afterwards
  storm  clients that stream all the time while the kernel kills the engine for memory, again and again: a
         neighbour in the same container takes what is left. Answered, continued, replayed, refused; and the
         time from death to the first token, against a plain start of the same engine.

The card of `batch`, `ctx` and `quant` is a memory cgroup. That of `gpu_layers` is a ggml-rpc-server with an
address-space limit: it refuses an allocation as a GPU does. kvguard cannot measure it: hence
--degrade-strict. Needs root (memory cgroups) and the engines of scripts/engines.py. Exit code: 0 when every
rung cured and every request was answered or refused with a clear error, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
from rich.console import Console
from rich.table import Table

from kvguard import __version__
from kvguard.domain import MIB

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from recovery_fixtures import container, engine_pid, hog, make_first_victim, metric, write_heavy_llama
from serve_fixtures import GuardProcess, guard
from tiny_gguf import write_tiny_llama

ENGINES = Path(os.environ.get("KVGUARD_ENGINES", Path.home() / ".cache" / "kvguard" / "engines"))
PATIENCE_S = 300.0
CONTAINER_BYTES = 1400 * MIB
NEIGHBOUR_BYTES = 1150 * MIB
"""Leaves kvguard its own memory, and the engine not enough."""


def binary(name: str) -> str:
    found = sorted(ENGINES.glob(f"llama.cpp-*/bin/{name}"))
    if not found:
        raise SystemExit(f"there is no {name} under {ENGINES}: run scripts/engines.py first")
    return str(found[-1])


def variant(name: str) -> str:
    path = ENGINES / "models" / f"gemma3-270m-{name}.gguf"
    if not path.exists():
        raise SystemExit(f"there is no {path}: run scripts/engines.py first")
    return str(path)


# ---------------------------------------------------------------- each rung


@dataclass(slots=True, kw_only=True)
class Rung:
    """What one rung did with a load that was too much."""

    rung: str
    load: str
    cured: bool = False
    degraded_by: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    journal: list[str] = field(default_factory=list)
    error: str = ""


def try_rung(rung: str, load: str, args: Sequence[str], *, engine_args: Sequence[str] = ()) -> Rung:
    """Start with too much, and see whether this rung alone brings it to serve."""
    result = Rung(rung=rung, load=load)
    began_s = time.monotonic()
    order = ("--degrade", rung, "--backend", "llama-server", "--llama-server", binary("llama-server"))
    with tempfile.TemporaryDirectory() as directory:
        try:
            with guard(*args, *order, *engine_args, state_dir=Path(directory)) as process:
                if "ready" in process.until_line("kvguard is ready|backend_failed .*")[0]:
                    process.until_ready()
                    result.degraded_by = process.get("/guard/status")[1]["degraded_by"]
                    answer = process.client().completions.create(model="default", prompt="One", max_tokens=4)
                    result.cured = bool(answer.usage) and rung in result.degraded_by
                else:
                    result.error = process.until_line("backend_failed .*")[0]
        except AssertionError as exc:
            result.error = str(exc).splitlines()[-1] if str(exc) else "it did not start"
        records = process.records()
    result.seconds = round(time.monotonic() - began_s, 1)
    result.journal = [in_words(record) for record in records]
    result.starts = len(records)
    return result


def in_words(record: dict[str, Any]) -> str:
    knobs, why, failure = record["knobs"], record.get("why") or {}, record.get("failure")
    text = (
        f"{record['id']} {record['event']} batch={knobs['batch']} ctx={knobs['ctx_tokens']} "
        f"pool={knobs['pool_tokens']} quant={knobs['quant']['label']} gpu_layers={knobs['gpu_layers']}"
    )
    if why.get("rung"):
        text += f" | degraded from {why['from_id']} by {why['rung']}"
    if failure:
        text += f" | {failure['causes'][0]} at {failure['stage']} ({failure['exit']})"
    return text


def rungs(work: Path) -> Iterator[Rung]:
    heavy = str(write_heavy_llama(work / "heavy.gguf"))
    card = ("--memory-limit", "300MiB", "--pool", "32768")
    yield try_rung("batch", "KV of 32,768 tokens (512 MiB) on 300 MiB", (heavy, *card, "--batch", "8"))
    yield try_rung("ctx", "KV of 32,768 tokens (512 MiB) on 300 MiB", (heavy, *card, "--batch", "1"))
    yield quant_rung()
    yield layers_rung(work)


def quant_rung() -> Rung:
    """The largest card on which the largest variant is tried and fails; on smaller ones it is not tried."""
    flags = ("--pool", "8192", "--batch", "2", "--prefer", "quality", "--headroom", "0%")
    flags += tuple(part for name in ("q4_k_m", "q3_k_m", "q2_k") for part in ("--variant", variant(name)))
    with tempfile.TemporaryDirectory() as directory:
        engine = ("--backend", "llama-server", "--llama-server", binary("llama-server"))
        with guard(
            variant("q8_0"), "--memory-limit", "2GiB", *flags, *engine, state_dir=Path(directory)
        ) as process:
            process.until_ready()
            peak = max(phase["peak_bytes"] for phase in process.records()[-1]["memory"])
    for limit_mib in range(peak // MIB - 16, peak // MIB - 48, -2):
        load = f"gemma3-270m q8_0, {peak // MIB} MiB, on {limit_mib} MiB"
        row = try_rung("quant", load, (variant("q8_0"), "--memory-limit", f"{limit_mib}MiB", *flags))
        if row.starts > 1:
            break
    return row


def layers_rung(work: Path) -> Rung:
    model = write_tiny_llama(
        work / "layers.gguf", layers=12, embd=256, ff=4096, heads=4, kv_heads=2, head_dim=64, ctx=8192
    )
    with rpc_card(64 * MIB) as address:
        return try_rung(
            "gpu_layers",
            "12 layers, 77 MiB, on an RPC device of 64 MiB",
            (str(model), "--ctx", "2048", "--batch", "1", "--degrade-strict"),
            engine_args=("--", "--rpc", address),
        )


@contextlib.contextmanager
def rpc_card(limit_bytes: int) -> Iterator[str]:
    """A device in a process of its own that has so much address space and no more."""
    port = free_port()
    command = f'ulimit -v {limit_bytes >> 10} && exec "$0" -H 127.0.0.1 -p {port}'
    with subprocess.Popen(
        ["sh", "-c", command, binary("ggml-rpc-server")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
                if server.poll() is not None:
                    raise SystemExit(f"ggml-rpc-server does not start in {limit_bytes // MIB} MiB")
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


# ---------------------------------------------------------------- the storm


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    model: str
    clients: int
    kills: int
    new_tokens: int
    plain_starts: int


@dataclass(slots=True, kw_only=True)
class Storm:
    """What the clients saw, and how long they saw nothing."""

    clients: int
    kills: int
    answered: int = 0
    continued: int = 0
    replayed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    to_first_token_s: list[float] = field(default_factory=list)
    plain_start_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.to_first_token_s) / statistics.median(self.plain_start_s)


class Clients:
    """Each sends one stream after the other until told to stop."""

    def __init__(self, process: GuardProcess, size: Size) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=process.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )
        self._new_tokens = size.new_tokens
        self.stop = False
        self.token = asyncio.Event()
        self.endings: Counter[str] = Counter()

    async def run(self, number: int) -> None:
        turn = 0
        while not self.stop:
            turn += 1
            self.endings[await self._one(f"Client {number}, turn {turn}: once upon a time")] += 1

    async def _one(self, prompt: str) -> str:
        """How one stream ended: answered, an error's code, or broken."""
        finish = None
        try:
            stream = await self._client.completions.create(
                model="default", prompt=prompt, max_tokens=self._new_tokens, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for chunk in stream:
                self.token.set()
                finish = chunk.choices[0].finish_reason or finish if chunk.choices else finish
        except openai.APIError as exc:
            return str(getattr(exc, "code", None) or "broken")
        return "answered" if finish else "broken"


async def storm(size: Size) -> Storm:
    result = Storm(clients=size.clients, kills=size.kills)
    with tempfile.TemporaryDirectory() as directory, container(CONTAINER_BYTES) as cgroup:
        args = (
            size.model, "--batch", "8", "--ctx", "2048", "--deadline", str(PATIENCE_S),
            "--backend", "llama-server", "--llama-server", binary("llama-server"),
        )  # fmt: skip
        with guard(*args, state_dir=Path(directory), inside=cgroup) as process:
            await asyncio.to_thread(process.until_ready)
            clients = Clients(process, size)
            async with asyncio.TaskGroup() as tasks:
                for number in range(size.clients):
                    tasks.create_task(clients.run(number))
                for _ in range(size.kills):
                    await next_token(clients)
                    result.to_first_token_s.append(await kill_once(process, cgroup, clients))
                clients.stop = True
            result.answered = clients.endings.pop("answered", 0)
            result.broken = clients.endings.pop("broken", 0)
            result.refused = dict(clients.endings)
            result.continued = int(metric(process, "kvguard_replays_total", how="continued"))
            result.replayed = int(metric(process, "kvguard_replays_total", how="replayed"))
            command = process.records()[-1]["command"]
        for _ in range(size.plain_starts):
            result.plain_start_s.append(await plain_start(command))
    return result


async def next_token(clients: Clients) -> None:
    clients.token.clear()
    await asyncio.wait_for(clients.token.wait(), PATIENCE_S)


async def kill_once(process: GuardProcess, cgroup: Path, clients: Clients) -> float:
    """Seconds from the engine's death to the first token of the next one."""
    pid = engine_pid(process)
    generation = process.get("/guard/status")[1]["generation"]
    make_first_victim(pid)
    dead = os.pidfd_open(pid)
    with hog(cgroup, NEIGHBOUR_BYTES) as neighbour:
        try:
            await asyncio.to_thread(select.select, [dead], [], [], PATIENCE_S)
            died_s = time.monotonic()
            await asyncio.to_thread(
                process.until, lambda s: s["generation"] > generation or s["state"] != "ready"
            )
        finally:
            neighbour.kill()
            os.close(dead)
    await asyncio.to_thread(process.until, lambda s: s["generation"] > generation and s["state"] == "ready")
    await next_token(clients)
    return round(time.monotonic() - died_s, 2)


async def plain_start(command: Sequence[str]) -> float:
    """Seconds from the start of the same engine, alone, to its first token."""
    port = free_port()
    argv = list(command)
    argv[argv.index("--port") + 1] = str(port)
    began_s = time.monotonic()
    quiet = asyncio.subprocess.DEVNULL
    engine = await asyncio.create_subprocess_exec(*argv, stdout=quiet, stderr=quiet)
    body = {"prompt": "Once", "max_tokens": 1, "temperature": 0}
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                        if answer.status == 200:
                            return round(time.monotonic() - began_s, 2)
                await asyncio.sleep(0.02)
    finally:
        engine.kill()
        await engine.wait()


# ---------------------------------------------------------------- what is printed


def show(console: Console, cured: Sequence[Rung], weather: Storm) -> None:
    table = Table("rung", "load", "cured", "starts", "seconds", title="Each rung, alone, on a real card")
    for row in cured:
        table.add_row(
            row.rung, row.load, "yes" if row.cured else f"no: {row.error}", str(row.starts), str(row.seconds)
        )
    console.print(table)
    for row in cured:
        console.print(f"[bold]journal, {row.rung}[/]")
        for line in row.journal:
            console.print("  " + line, soft_wrap=True, highlight=False)
    table = Table("", "", title=f"{weather.clients} clients stream, {weather.kills} kills by the kernel")
    for name in ("answered", "continued", "replayed", "refused", "broken"):
        table.add_row(name, str(getattr(weather, name) or 0))
    table.add_row("death to first token, s", ", ".join(map(str, weather.to_first_token_s)))
    table.add_row("plain start to first token, s", ", ".join(map(str, weather.plain_start_s)))
    table.add_row("ratio of the medians", f"{weather.ratio:.2f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, 8 clients, 2 kills")
    parser.add_argument("--clients", type=int, help="clients of the storm (50, or 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("making memory cgroups needs root here")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        cured = list(rungs(work))
        quick = Size(
            model=str(work / "heavy.gguf"), clients=args.clients or 8, kills=2, new_tokens=400, plain_starts=1
        )
        full = Size(
            model=variant("q4_k_m"), clients=args.clients or 50, kills=5, new_tokens=64, plain_starts=3
        )
        weather = asyncio.run(storm(quick if args.quick else full))
    if args.json:
        machine = {"kvguard": __version__, "machine": platform.platform(), "cpus": os.cpu_count()}
        rows = [asdict(row) for row in cured]
        print(json.dumps({**machine, "rungs": rows, "storm": asdict(weather) | {"ratio": weather.ratio}}))
    else:
        show(Console(), cured, weather)
    return 0 if all(row.cured for row in cured) and weather.answered and not weather.broken else 1


if __name__ == "__main__":
    sys.exit(main())
