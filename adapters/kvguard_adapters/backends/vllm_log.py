"""What vLLM says in its log: milestones, memory, sizes, and what may be shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvguard.domain import GIB, AccountName, Accounts, Basis, Entry

_MILESTONES = (
    ("weights_loading", re.compile(r"Starting to load model|Loading (?:safetensors|pt) checkpoint shards")),
    (
        "weights_loaded",
        re.compile(r"Model loading took|Loading weights took|Warming up model for the compil"),
    ),
    ("kv_allocated", re.compile(r"KV cache size: [\d,]+ tokens|# (?:GPU|CPU) blocks: \d+")),
    ("warmup", re.compile(r"Graph capturing finished|init engine \(profile, create kv cache")),
    ("ready", re.compile(r"Application startup complete")),
)


def milestone(line: str) -> str | None:
    return next((name for name, pattern in _MILESTONES if pattern.search(line)), None)


# ---------------------------------------------------------------- memory

_GIB_LINES: tuple[tuple[AccountName, str, re.Pattern[str]], ...] = (
    ("weights", "weights", re.compile(r"Model loading took (?P<gib>[\d.]+) Gi?B")),
    ("kv", "kv cache", re.compile(r"Available KV cache memory: (?P<gib>[\d.]+) GiB")),
    ("overhead", "peak activation", re.compile(r"(?P<gib>[\d.]+) GiB for peak activation")),
    ("overhead", "CUDA graphs", re.compile(r"Graph capturing finished in .* took (?P<gib>-?[\d.]+) GiB")),
)
_KV_BYTES = re.compile(r"'kv_cache_memory_bytes': (\d+)")


def measured(lines: Iterable[str]) -> Accounts | None:
    """The sizes that it printed, of one rank; None where there are none. On a CPU it prints the pool alone.

    A pool that was given in bytes is exact; all else is rounded to 0.01 GiB.
    """
    sizes: dict[tuple[AccountName, str], int] = {}
    for line in lines:
        if match := _KV_BYTES.search(line):
            sizes["kv", "kv cache"] = int(match[1])
        for account, name, pattern in _GIB_LINES:
            if match := pattern.search(line):
                sizes.setdefault((account, name), round(max(0.0, float(match["gib"])) * GIB))
    if not sizes:
        return None
    return Accounts(
        entries=tuple(
            Entry(account=account, name=name, size_bytes=size, basis=Basis.MEASURED)
            for (account, name), size in sizes.items()
        )
    )


# ---------------------------------------------------------------- sizes

_POOL = re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens")
_SEQUENCES = re.compile(r"'max_num_seqs': (\d+)")
_PREFILL = re.compile(r"max_num_batched_tokens=(\d+)")
_MODEL_LEN = re.compile(r"Using max model len (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedSizes:
    """0 where the log does not tell."""

    pool_tokens: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    max_model_len: int = 0


def printed_sizes(lines: Sequence[str]) -> PrintedSizes:
    """The pool is on a line of its own before 0.9, and on one with the concurrency since."""
    return PrintedSizes(
        pool_tokens=_last(_POOL, lines),
        sequences=_last(_SEQUENCES, lines),
        prefill_tokens=_last(_PREFILL, lines),
        max_model_len=_last(_MODEL_LEN, lines),
    )


def _last(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    found = next((match for line in reversed(lines) if (match := pattern.search(line))), None)
    return int(found[1].replace(",", "")) if found else 0


# ---------------------------------------------------------------- what may be shown

_HEAD = re.compile(
    r"(?:\([\w-]+(?: pid=\d+)?\) )*(?:INFO|WARNING|ERROR|CRITICAL|DEBUG) [\d-]+ [\d:]+ \[[\w./]+:\d+\]"
)
_N = r"-?[\d.,]+"
_FIXED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Engine \d+: (?:(?:Avg )?[A-Z][\w %/-]*: {_N}(?: tokens/s| reqs|%)?(?:, )?)+\.?$",
        r"EngineCore encountered a fatal error\.$",
        r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError: CUDA out of memory\.",
        r"Worker proc VllmWorker-\d+ died unexpectedly, shutting down executor\.$",
        r"Engine core proc EngineCore(?:_DP\d+)? died unexpectedly, shutting down client\.$",
        r"No available shared memory broadcast block found in \d+ seconds\.",
        r"Shutting down$|Waiting for application shutdown\.$|Application shutdown complete\.$",
    )
)
_SERVING = re.compile(r"Application startup complete")


class VllmLogFilter:
    """Says what a log may show of one life's output.

    Until it serves, all is shown. Afterwards an error quotes what it failed on, and a request may look like
    any line: of those that are not made of fixed words and numbers, only the head (who, how bad, where).
    """

    def __init__(self) -> None:
        self._serving = False

    def __call__(self, line: str) -> str | None:
        if not self._serving:
            self._serving = _SERVING.search(line) is not None
            return line
        head = _HEAD.match(line)
        text = line[head.end() :].strip() if head else line.strip()
        fixed = next((match for pattern in _FIXED if (match := pattern.match(text))), None)
        if fixed:
            return f"{head[0]} {fixed[0]}" if head else fixed[0]
        return f"{head[0]} ..." if head else None
