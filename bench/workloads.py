"""Seeded request streams from production traces: lengths and burstiness are the trace's, the rate is ours."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from simulator import Arrival

MOST_KEYS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    at_s: float
    prompt_tokens: int
    length: int


def load_trace(path: Path) -> list[TraceRow]:
    """Read TIMESTAMP,ContextTokens,GeneratedTokens or timestamp_ms,input_length,output_length.

    Raises ValueError naming the file, and the line where one is not usable.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        for reading, needed in _FORMATS.items():
            if set(needed) <= columns:
                rows = [_row(path, i, row, reading, needed) for i, row in enumerate(reader, start=2)]
                break
        else:
            known = " or ".join(",".join(needed) for needed in _FORMATS.values())
            raise ValueError(f"{path}: its columns are {','.join(sorted(columns))}; expected {known}")
    rows = sorted((row for row in rows if row.length > 0 and row.prompt_tokens > 0), key=lambda row: row.at_s)
    if len(rows) < 2:
        raise ValueError(f"{path}: fewer than two usable requests")
    return rows


def _azure_s(text: str) -> float:
    return datetime.fromisoformat(text[:26]).timestamp()


def _milliseconds(text: str) -> float:
    return float(text) / 1000


_FORMATS: Mapping[Callable[[str], float], tuple[str, str, str]] = {
    _azure_s: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _milliseconds: ("timestamp_ms", "input_length", "output_length"),
}


def _row(
    path: Path,
    line: int,
    row: Mapping[str, str],
    reading: Callable[[str], float],
    columns: tuple[str, str, str],
) -> TraceRow:
    at, prompt, length = (row[column] for column in columns)
    try:
        return TraceRow(at_s=reading(at), prompt_tokens=int(prompt), length=int(length))
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{path}, line {line}: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTokens:
    """What the clients put into `max_tokens`, which no trace tells.

    fixed  one number for all, as where a framework sends its default
    times  a multiple of the need, as a power of two: clients that know their answers
    none   nothing: the rest of the context
    """

    kind: Literal["fixed", "times", "none"]
    number: int = 0

    def of(self, length: int) -> int | None:
        if self.kind == "none":
            return None
        return self.number if self.kind == "fixed" else 1 << (self.number * length - 1).bit_length()

    def __str__(self) -> str:
        names = {"none": "none", "fixed": f"{self.number}", "times": f"{self.number}x need"}
        return names[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent, and to how large an engine.

    concurrency  how many mean requests the pool holds at once
    length_scale multiplies the trace's outputs
    """

    name: str
    rows: Sequence[TraceRow]
    max_tokens: MaxTokens
    ctx_tokens: int
    concurrency: float = 24
    length_scale: float = 1.0
    ttft_s: float = 10.0
    tpot_s: float = 0.2
    requests: int = 1500

    def pool_tokens(self, block_tokens: int = 16) -> int:
        """Room for `concurrency` requests of mean size, and for one whole context."""
        mean = sum(row.prompt_tokens + self._length(row) for row in self.rows) / len(self.rows)
        return -(-max(round(self.concurrency * mean), self.ctx_tokens) // block_tokens) * block_tokens

    def arrivals(self, rate_per_s: float, seed: int) -> list[Arrival]:
        """A slice of the trace that begins at a seeded place, its clock stretched to this mean rate."""
        rng = random.Random(seed)
        begin = rng.randrange(len(self.rows))
        picked = [self.rows[(begin + i) % len(self.rows)] for i in range(len(self.rows))]
        gaps = [max(0.0, b.at_s - a.at_s) for a, b in itertools.pairwise(picked)]
        usable: list[tuple[float, TraceRow]] = []
        at_s = 0.0
        for row, gap_s in zip(picked, [0.0, *gaps], strict=True):
            at_s += min(gap_s, MAX_GAP_S)
            if row.prompt_tokens < self.ctx_tokens:
                usable.append((at_s, row))
            if len(usable) == self.requests:
                break
        stretch = len(usable) / rate_per_s / max(usable[-1][0], 1e-9)
        return [self._arrival(at_s * stretch, row, rng) for at_s, row in usable]

    def _arrival(self, at_s: float, row: TraceRow, rng: random.Random) -> Arrival:
        prompt_tokens, length = row.prompt_tokens, self._length(row)
        most = self.max_tokens.of(length)
        room = self.ctx_tokens - prompt_tokens
        return Arrival(
            at_s=at_s, prompt_tokens=prompt_tokens, length=length,
            max_new_tokens=None if most is None else min(most, room), key=f"key{rng.randrange(MOST_KEYS)}",
        )  # fmt: skip

    def _length(self, row: TraceRow) -> int:
        return max(1, round(row.length * self.length_scale))


MAX_GAP_S = 60.0
"""A pause that is longer, as where the end of the trace is joined to its start, is cut to this."""


def synthetic(requests: int = 6000, seed: int = 0) -> list[TraceRow]:
    """Chat-like lengths where there is no trace at hand: log-normal, Poisson arrivals."""
    rng, at_s, rows = random.Random(seed), 0.0, []
    for _ in range(requests):
        at_s += rng.expovariate(1.0)
        prompt_tokens = min(4000, 1 + int(rng.lognormvariate(6.9, 0.8)))
        rows.append(
            TraceRow(
                at_s=at_s,
                prompt_tokens=prompt_tokens,
                length=min(1000, 1 + int(rng.lognormvariate(4.8, 1.0))),
            )
        )
    return rows


def concatenated(first: Sequence[TraceRow], second: Sequence[TraceRow]) -> list[TraceRow]:
    """One trace after the other: the mix of requests changes under way."""
    shift_s = first[-1].at_s - second[0].at_s
    return [
        *first,
        *(TraceRow(at_s=r.at_s + shift_s, prompt_tokens=r.prompt_tokens, length=r.length) for r in second),
    ]
