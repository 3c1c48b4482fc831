"""Predicted accounts against real llama.cpp, as a table: the worst error of each architecture over a grid.

    python bench/accounts.py [--archs N] [--resident] [--json FILE]

`--resident` adds the whole resident memory of a server that has filled its context, for models over 200 MB.
Needs llama-server (scripts/engines.py llama.cpp models); nothing here gates tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kvguard.accounts import predict
from kvguard.domain import Knobs, PoolKind
from kvguard.model import ModelMeta
from kvguard_adapters.models.gguf import read_gguf
from llama_probe import MIB, engines_dir, free_port, llama_server, load, serving
from tiny_gguf import architectures, write_tiny, write_tiny_llama

CONTEXTS = (4096, 20_000)
BATCHES = (1, 3)
KV_TYPES = ("f16", "q8_0")
POOLS = (PoolKind.UNIFIED, PoolKind.SPLIT)
ROUNDING = 0.00501 * MIB
STATES = ("state", "history", "compressor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The worst of one architecture: bytes beyond what the engine's two printed digits can show."""

    architecture: str
    cases: int
    weights_error_bytes: int
    kv_error_bytes: int
    compute_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """One server that has filled its context."""

    model: str
    ctx_tokens: int
    batch: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def knobs_of(meta: ModelMeta, ctx: int, batch: int, kind: str, pool: PoolKind) -> Knobs:
    """One point of the grid: `ctx` cells in all, as `-c` counts them."""
    unified = pool is PoolKind.UNIFIED
    each = ctx if unified else max(ctx // batch, 1)
    return Knobs(
        batch=batch,
        ctx_tokens=each,
        pool_tokens=ctx if unified else each * batch,
        pool_kind=pool,
        quant=meta.variant(),
        kv_type=kind,
    )


def arguments(knobs: Knobs) -> list[str]:
    unified = knobs.pool_kind is PoolKind.UNIFIED
    cells = knobs.pool_tokens if unified else knobs.ctx_tokens * knobs.batch
    return [
        *("-c", str(cells), "-np", str(knobs.batch), "-ub", str(knobs.prefill_tokens)),
        *("-ctk", knobs.kv_type, "-ctv", knobs.kv_type),
        "--kv-unified" if unified else "--no-kv-unified",
    ]


def compare(server: Path, path: Path, architecture: str) -> Row:
    """Run the whole grid for one architecture."""
    meta = read_gguf(path)
    weights = kv = cases = 0
    compute = 0.0
    for ctx, batch, kind, pool in itertools.product(CONTEXTS, BATCHES, KV_TYPES, POOLS):
        knobs = knobs_of(meta, ctx, batch, kind, pool)
        accounts = predict(meta, knobs)
        seen = load(server, path, *arguments(knobs))
        if seen.failed:
            raise SystemExit(f"{architecture}: the engine did not start\n" + "\n".join(seen.lines[-5:]))
        printed = (seen.caches + seen.states) * ROUNDING
        weights_off = abs(accounts.weights_bytes - seen.weights_bytes) - seen.buffers * ROUNDING
        kv_off = abs(accounts.kv_bytes - seen.kv_bytes - seen.state_bytes) - printed
        estimate = sum(e.size_bytes for e in accounts.entries if e.name == "compute buffers")
        weights, kv = max(weights, int(weights_off)), max(kv, int(kv_off))
        compute = max(compute, estimate / seen.compute_bytes - 1, key=abs)
        cases += 1
    return Row(
        architecture=architecture,
        cases=cases,
        weights_error_bytes=weights,
        kv_error_bytes=kv,
        compute_error=compute,
    )


def resident(server: Path, path: Path, ctx: int, batch: int) -> Resident:
    """Fill one context of a server and read what is resident then."""
    meta = read_gguf(path)
    knobs = knobs_of(meta, ctx, batch, "f16", PoolKind.UNIFIED)
    predicted = predict(meta, knobs).total_bytes
    port = free_port()
    off = ("--cache-ram", "0", "--ctx-checkpoints", "0")
    with serving(server, path, *arguments(knobs), *off, port=port) as (pid, _):
        fill(port, min(ctx, meta.n_ctx_train) - 64)
        status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    measured = int(found[1]) * 1024 if found else 0
    return Resident(
        model=path.stem, ctx_tokens=ctx, batch=batch, predicted_bytes=predicted, measured_bytes=measured
    )


def fill(port: int, tokens: int) -> None:
    """Prefill so many tokens, and generate a few. The server may still be opening its port."""
    body = {"prompt": [n % 200 + 1 for n in range(tokens)], "n_predict": 16, "cache_prompt": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    deadline_s = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()
                return
        except urllib.error.URLError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def large_models(folder: Path) -> Iterator[Path]:
    """Models over 200 MB: the demo model in its quantisations, and random Llamas of other shapes."""
    yield from sorted((engines_dir() / "models").glob("*.gguf"))
    yield write_tiny_llama(
        folder / "llama-wide.gguf",
        layers=8,
        embd=1024,
        heads=16,
        kv_heads=8,
        head_dim=64,
        ff=4096,
        vocab=64_000,
        ctx=16_384,
        kind="F16",
    )
    yield write_tiny_llama(
        folder / "llama-deep.gguf",
        layers=24,
        embd=768,
        heads=12,
        kv_heads=12,
        head_dim=64,
        ff=2048,
        vocab=32_000,
        ctx=16_384,
        kind="Q8_0",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archs", type=int, default=0, help="only the first N architectures")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = llama_server()
    if server is None:
        raise SystemExit("no llama-server: run scripts/engines.py llama.cpp")
    names = sorted(architectures())[: options.archs or None]
    rows, residents = [], []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        print(
            f"{'architecture':<16}{'cases':>6}{'weights':>9}{'KV':>7}{'compute':>9}   (bytes off; estimate)"
        )
        for name in names:
            rows.append(compare(server, write_tiny(folder / "tiny.gguf", name), name))
            row = rows[-1]
            print(
                f"{name:<16}{row.cases:>6}{row.weights_error_bytes:>9}{row.kv_error_bytes:>7}"
                f"{row.compute_error:>+9.0%}",
                flush=True,
            )
        for path in large_models(folder) if options.resident else ():
            for ctx, batch in ((2048, 1), (8192, 4)):
                residents.append(resident(server, path, ctx, batch))
                one = residents[-1]
                print(
                    f"{one.model:<24} ctx {ctx:>6} batch {batch}  predicted {one.predicted_bytes / MIB:7.1f}"
                    f"  resident {one.measured_bytes / MIB:7.1f} MiB  {one.error:+.1%}",
                    flush=True,
                )
    exact = sum(row.weights_error_bytes == 0 and row.kv_error_bytes == 0 for row in rows)
    print(f"{exact} of {len(rows)} architectures exact, {sum(row.cases for row in rows)} cases")
    if residents:
        print(f"resident memory: worst error {max(abs(one.error) for one in residents):.1%}")
    if options.json:
        report = {
            "machine": platform.processor() or platform.machine(),
            "server": str(server),
            "rows": [asdict(row) for row in rows],
            "resident": [asdict(one) for one in residents],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
