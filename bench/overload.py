"""Far more load than an engine sustains, for a minute: what is answered, how much of it, and what is left.

    python bench/overload.py [--model FILE.gguf] [--times 10] [--seconds 60] [--full] [--json]

Through `kvguard serve` in front of a real llama.cpp server. The best rate is measured first, closed loop with
as many clients as there are slots; the storm is open loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from load_fixtures import Storm, ask, best_rate_per_s, storm
from serve_fixtures import GuardProcess, guard
from tiny_gguf import write_tiny_llama

SLOTS = 8
SOUND = 1.1
"""A storm that is served faster than this times the best rate shows that the best rate was not found. Then
neither the share of it nor the multiple of the load says anything."""

CONFIG = f"""
[knobs]
batch = {SLOTS}
ctx_tokens = 2048
pool_tokens = 8192
pool_kind = "unified"
[admission]
queue_requests = 32
deadline_s = 30.0
"""


def body_of(new_tokens: int) -> dict[str, Any]:
    return {"model": "m", "prompt": "Once upon a time", "max_tokens": new_tokens, "ignore_eos": True}


async def overload(process: GuardProcess, options: argparse.Namespace) -> dict[str, Any]:
    """The storm, and what memory and the first request after it look like."""
    body = body_of(options.new_tokens)
    best = await best_rate_per_s(process.url, body, clients=SLOTS, seconds=options.seconds / 4)
    rate_per_s = options.times * best
    server = psutil.Process(process.process.pid)
    await storm(process.url, [body], rate_per_s=rate_per_s, seconds=2)
    before_bytes = server.memory_info().rss
    result = await storm(process.url, [body], rate_per_s=rate_per_s, seconds=options.seconds)
    after_bytes = server.memory_info().rss
    async with aiohttp.ClientSession() as session:
        alone = await ask(session, process.url, body_of(1))
    again = await best_rate_per_s(process.url, body, clients=SLOTS, seconds=options.seconds / 4)
    return {
        "best_per_s": best,
        "best_after_per_s": again,
        "offered_per_s": rate_per_s,
        "goodput_per_s": result.served / result.seconds,
        "goodput_of_best": result.served / result.seconds / max(best, again),
        "best_is_sound": result.served / result.seconds <= SOUND * max(best, again),
        "answers": dict(result.counts()),
        "not_in_order": sum(not answer.in_order for answer in result.answers),
        "refused_p50_s": _refused_after_s(result),
        "memory_before_bytes": before_bytes,
        "memory_after_bytes": after_bytes,
        "first_after_s": alone.took_s if alone.served else None,
    }


def _refused_after_s(result: Storm) -> float:
    took_s = sorted(answer.took_s for answer in result.answers if answer.status == 503)
    return took_s[len(took_s) // 2] if took_s else 0.0


def provenance() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "commit": commit.stdout.strip(), "python": platform.python_version(), "machine": platform.machine(),
        "cpus": multiprocessing.cpu_count(), "command": " ".join(sys.argv),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    table = Table(title="overload", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    storm_result = result["overload"]
    for key, value in storm_result.items():
        table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF; without one a tiny random Llama")
    parser.add_argument("--times", type=float, default=10.0, help="load over the best rate")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="a storm of 60 s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.full:
        options.seconds = 60.0
    with tempfile.TemporaryDirectory() as directory:
        state_dir = Path(directory)
        (state_dir / "kvguard.toml").write_text(CONFIG)
        model = options.model or write_tiny_llama(state_dir / "tiny.gguf")
        with guard(str(model), "--config", str(state_dir / "kvguard.toml"), state_dir=state_dir) as process:
            process.until_ready()
            result = {
                "provenance": provenance(),
                "overload": asyncio.run(overload(process, options)),
            }
    print(json.dumps(result, indent=1)) if options.json else show(result)


if __name__ == "__main__":
    main()
