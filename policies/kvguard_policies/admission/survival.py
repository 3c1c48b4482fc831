"""How long outputs get, learned from running and finished requests: survival curves by class of request.

Learning from finished requests alone is biased short, since the long ones have not finished yet. So each
request counts as *at risk* in every bin of length that it enters, and as an *event* only in the bin where
the model stopped by itself; one that still runs, was cancelled or was cut off at its maximum is censored
(Kaplan & Meier 1958). Greenwood's variance gives an upper curve: an error of the curve is shared by all
requests and is not averaged away. One imagined request is at risk in every bin. Until enough was seen it
never ends, so that "no data" reads "runs to its maximum"; then it follows Pareto's law, so that beyond the
longest that was seen each doubling is reached by half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

LINEAR_TOKENS = 16
BINS_PER_OCTAVE = 8
LARGEST_TOKENS = 1 << 20
SCHEMA = 1

EDGES = np.unique(
    np.concatenate(
        [
            np.arange(LINEAR_TOKENS),
            np.round(
                2.0 ** np.arange(math.log2(LINEAR_TOKENS), math.log2(LARGEST_TOKENS), 1 / BINS_PER_OCTAVE)
            ),
        ]
    )
).astype(np.int64)
"""Lengths at which bins begin, in tokens."""

AHEAD = np.unique(np.round(np.geomspace(4, LARGEST_TOKENS, 38))).astype(np.float32)
"""Steps ahead at which curves are tabulated."""

LAGS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Steps until a first token for which there are rows of their own."""

MIN_EVENTS = 48
"""Finished requests from which a class has a curve of its own."""

TAIL_HAZARD = 1 - 2 ** (-1 / BINS_PER_OCTAVE)
"""Chance that the imagined request ends in a bin: half of those like it reach twice their length."""

HALF_LIFE_EVENTS = 2000
FORGET_EVERY = 64
Z_CURVE = 0.5

Label = tuple[str, ...]


def bin_of(tokens: int) -> int:
    """Index of the bin that holds a length."""
    if tokens < LINEAR_TOKENS:
        return tokens
    return int(np.searchsorted(EDGES, tokens, side="right")) - 1


def labels(route: str, max_new_tokens: int | None, key: str) -> tuple[Label, ...]:
    """Classes of a request, the widest first. Names of keys are the operator's own, never the secrets."""
    bucket = "rest" if max_new_tokens is None else str(max(0, max_new_tokens - 1).bit_length())
    return (), (route,), (route, bucket), (route, bucket, key)


class Curve:
    """Counts of one class."""

    __slots__ = ("at_risk", "events", "finished", "forgotten_at", "index", "tabulated_at")

    def __init__(self, index: int) -> None:
        self.index = index
        self.at_risk = np.zeros(len(EDGES))
        self.events = np.zeros(len(EDGES))
        self.finished = 0
        self.tabulated_at = 0
        self.forgotten_at = 0

    def finish(self, at_bin: int) -> None:
        self.events[at_bin] += 1
        self.finished += 1
        if self.finished - self.forgotten_at >= FORGET_EVERY:
            kept = 0.5 ** ((self.finished - self.forgotten_at) / HALF_LIFE_EVENTS)
            self.at_risk *= kept
            self.events *= kept
            self.forgotten_at = self.finished

    @property
    def stale(self) -> bool:
        """Whether enough has been seen since the last tabulation to matter."""
        return self.finished - self.tabulated_at >= max(4, min(self.tabulated_at // 16, FORGET_EVERY))

    def tabulate(self, z_curve: float) -> Floats:
        """Chance to be still running, for each bin of tokens so far (then each lag) and each of `AHEAD`.

        Upper curve: exp(log S(g + t) - log S(g) + z sqrt(var)), the variance being that of the difference.
        """
        self.tabulated_at = self.finished
        at_risk = np.maximum(self.at_risk, self.events) + 1.0
        events = self.events + (TAIL_HAZARD if self.finished >= MIN_EVENTS else 0.0)
        log_survival = np.concatenate([[0.0], np.cumsum(np.log1p(-events / at_risk))])
        variance = np.concatenate([[0.0], np.cumsum(events / (at_risk * (at_risk - events)))])
        ends = np.append(EDGES, LARGEST_TOKENS).astype(np.float64)
        begins = np.concatenate([EDGES, np.zeros(len(LAGS))])[:, None]
        lags = np.concatenate([np.zeros(len(EDGES)), LAGS])[:, None]
        then = begins + np.maximum(AHEAD[None, :] - lags, 0.0)
        log_ratio = np.interp(then, ends, log_survival) - np.interp(begins, ends, log_survival)
        spread = np.interp(then, ends, variance) - np.interp(begins, ends, variance)
        upper = np.exp(np.minimum(log_ratio + z_curve * np.sqrt(np.maximum(spread, 0.0)), 0.0))
        return np.asarray(upper, dtype=np.float32)


ROWS = len(EDGES) + len(LAGS)


@dataclass(slots=True)
class Follow:
    """One running request: the curves that it teaches, the one that predicts it, and how far it has come."""

    curves: tuple[Curve, ...]
    index: int
    bin: int = 0
    next_tokens: int = 1  # where the next bin begins


class Survival:
    """All curves, and the table of rows that predictions are read from. Row 0 is "runs to its maximum"."""

    def __init__(self, *, z_curve: float = Z_CURVE, max_curves: int = 256) -> None:
        self._z_curve = z_curve
        self._max_curves = max_curves
        self._curves: dict[Label, Curve] = {}
        self.rows: Floats = np.ones((1, len(AHEAD)), dtype=np.float32)

    # ------------------------------------------------------------ prediction

    def row_of(self, index: int, new_tokens: int, lag: int) -> int:
        """Row of a request that has so many tokens, or whose first is at most `lag` steps away."""
        if new_tokens > 0:
            return 1 + index * ROWS + bin_of(new_tokens)
        at = next((i for i, steps in enumerate(LAGS) if steps >= lag), len(LAGS) - 1)
        return 1 + index * ROWS + len(EDGES) + at

    def row_at(self, follow: Follow) -> int:
        """Row of a followed request that has tokens."""
        return 1 + follow.index * ROWS + follow.bin

    def index_for(self, of: Sequence[Label]) -> int:
        """The narrowest class that has seen enough."""
        for label in reversed(of):
            curve = self._curves.get(label)
            if curve is not None and curve.finished >= MIN_EVENTS:
                return curve.index
        return self._curve(()).index

    # ------------------------------------------------------------ learning

    def follow(self, of: Sequence[Label]) -> Follow:
        """A request of these classes starts."""
        curves = tuple(self._curve(label) for label in of if self._has_room(label))
        for curve in curves:
            curve.at_risk[0] += 1
        return Follow(curves=curves, index=self.index_for(of))

    def reached(self, follow: Follow, new_tokens: int) -> None:
        """It has come so far: it is at risk in all bins up to there."""
        if new_tokens < follow.next_tokens:
            return
        at = bin_of(new_tokens)
        follow.next_tokens = _next_edge(at)
        if at > follow.bin:
            for curve in follow.curves:
                curve.at_risk[follow.bin + 1 : at + 1] += 1
            follow.bin = at

    def finished(self, follow: Follow, new_tokens: int) -> None:
        """The model stopped by itself at this length."""
        self.reached(follow, new_tokens)
        for curve in follow.curves:
            curve.finish(follow.bin)
        stale = next((curve for curve in reversed(follow.curves) if curve.stale), None)
        if stale is not None:  # one at a time, so that no release takes long
            self._tabulate(stale)

    # ------------------------------------------------------------ persistence

    def to_json(self) -> Iterator[str]:
        """One object, a curve at a time."""
        yield f'{{"schema": {SCHEMA}, "edges": {len(EDGES)}, "curves": ['
        comma = ""
        for label, curve in list(self._curves.items()):
            if curve.finished:
                row = {"label": list(label), "finished": curve.finished, **_sparse(curve)}
                yield comma + json.dumps(row)
                comma = ", "
        yield "]}"

    def load_json(self, text: str) -> None:
        """Take over what was learned before. Raises ValueError where it is not of this form."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA or data["edges"] != len(EDGES):
                raise ValueError(f"schema {data['schema']} with {data['edges']} bins is not known")
            loaded = [(tuple(map(str, entry["label"])), entry) for entry in data["curves"]]
            for label, entry in loaded[: self._max_curves]:
                curve = self._curve(label)
                curve.at_risk[:] = _dense(entry["at_risk"])
                curve.events[:] = _dense(entry["events"])
                curve.finished = curve.forgotten_at = int(entry["finished"])
                self._tabulate(curve)
        except (KeyError, TypeError, IndexError, AttributeError) as exc:
            raise ValueError(f"not a table of output lengths: {exc!r}") from exc

    # ------------------------------------------------------------ helpers

    def _has_room(self, label: Label) -> bool:
        return label in self._curves or len(self._curves) < self._max_curves

    def _curve(self, label: Label) -> Curve:
        curve = self._curves.get(label)
        if curve is None:
            curve = self._curves[label] = Curve(len(self._curves))
            if len(self.rows) < 1 + len(self._curves) * ROWS:
                fresh = np.ones((len(self._curves) * ROWS, len(AHEAD)), dtype=np.float32)
                self.rows = np.concatenate([self.rows, fresh])
        return curve

    def _tabulate(self, curve: Curve) -> None:
        begin = 1 + curve.index * ROWS
        self.rows[begin : begin + ROWS] = curve.tabulate(self._z_curve)


def _next_edge(at: int) -> int:
    return int(EDGES[at + 1]) if at + 1 < len(EDGES) else LARGEST_TOKENS


def _sparse(curve: Curve) -> Mapping[str, Mapping[str, float]]:
    def nonzero(counts: NDArray[np.float64]) -> Iterator[tuple[str, float]]:
        for i in np.flatnonzero(counts):
            yield str(i), round(float(counts[i]), 3)

    return {"at_risk": dict(nonzero(curve.at_risk)), "events": dict(nonzero(curve.events))}


def _dense(sparse: Mapping[str, Any]) -> NDArray[np.float64]:
    counts = np.zeros(len(EDGES))
    for i, count in sparse.items():
        if float(count) < 0:
            raise ValueError(f"a count is negative: {count}")
        counts[int(i)] = float(count)
    return counts
