"""The selection matrix: which quantisation of a model runs on which card, and with how much context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvguard.domain import CardReading
from kvguard.model import ModelMeta
from kvguard.planner import Limits, Plan, choose, default_headroom, max_ctx_of, usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow:
    """One card: its reading (an int is a card that nobody uses), and whether it is apart from host memory."""

    label: str
    card: CardReading | int
    gpu: bool
    headroom_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        return self.card if isinstance(self.card, int) else self.card.total_bytes

    @property
    def headroom(self) -> int:
        if self.headroom_bytes is not None:
            return self.headroom_bytes
        return default_headroom(self.total_bytes, gpu=self.gpu)

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.card, self.headroom)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A confirmed configuration of the journal, as much as a plan needs of it; 0: nothing was predicted."""

    header_hash: str
    card_total_bytes: int
    ctx_tokens: int
    peak_bytes: int
    predicted_bytes: int = 0

    def is_of(self, meta: ModelMeta, row: CardRow) -> bool:
        return (self.header_hash, self.card_total_bytes) == (meta.header_hash, row.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One variant on one card. `ctx_tokens` is the largest for one sequence; 0 where it is not feasible."""

    plan: Plan
    ctx_tokens: int
    measured: Measured | None = None

    @property
    def feasible(self) -> bool:
        return self.ctx_tokens > 0


def matrix(
    variants: Sequence[ModelMeta],
    rows: Sequence[CardRow],
    limits: Limits,
    measured: Sequence[Measured] = (),
) -> list[list[Cell]]:
    """Fill the matrix, one list a card, in the order of `variants`."""
    return [[_cell(meta, row, limits, measured) for meta in variants] for row in rows]


def _cell(meta: ModelMeta, row: CardRow, limits: Limits, measured: Sequence[Measured]) -> Cell:
    plan = choose([meta], row.card, row.headroom, limits=limits, gpu=row.gpu)
    best = max((m for m in measured if m.is_of(meta, row)), key=lambda m: m.ctx_tokens, default=None)
    predicted = max_ctx_of(meta, row.usable_bytes, 1, limits, gpu=row.gpu) if plan.fits else 0
    return Cell(plan=plan, ctx_tokens=best.ctx_tokens if best else predicted, measured=best)
