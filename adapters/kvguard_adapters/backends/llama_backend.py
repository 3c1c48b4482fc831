"""What all ways to run llama.cpp's own server have in common: its log, its HTTP API and its rungs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvguard.domain import Accounts, Capabilities, Endpoint, Knobs, PoolKind, Rung
from kvguard_adapters.backends import llama_log
from kvguard_adapters.backends.llama_engine import LlamaEngine
from kvguard_adapters.backends.options import Options
from kvguard_adapters.backends.steps import next_steps

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

LLAMA_CAPABILITIES = Capabilities(
    rungs=frozenset(Rung),
    pool_kinds=frozenset(PoolKind),
    kv_types=KV_TYPES,
    overflow="fails_all",
    reports_kv_usage=True,
    reports_slots=True,
    cancels_streams=True,
    continues_completions=True,
    continues_chat=True,
)


class LlamaBackend:
    """The shared part of `ports.Backend`."""

    capabilities = LLAMA_CAPABILITIES

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pinned: frozenset[str] = frozenset()

    def connect(self, endpoint: Endpoint) -> LlamaEngine:
        return LlamaEngine(endpoint, embedding=self.options.embedding)

    def milestone(self, line: str) -> str | None:
        return llama_log.milestone(line)

    def measured(self, log_lines: Sequence[str]) -> Accounts | None:
        return llama_log.measured(log_lines)

    def next_steps(self, knobs: Knobs, rung: Rung) -> Sequence[Knobs]:
        return next_steps(knobs, rung, self.options, self.pinned)

    def log_filter(self) -> Callable[[str], str | None]:
        return llama_log.LlamaLogFilter()
