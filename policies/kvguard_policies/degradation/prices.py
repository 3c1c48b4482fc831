"""What each rung can free on the card that ran out, and so which rungs cannot help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from kvguard.domain import Knobs, Rung
from kvguard.remedies import Route
from kvguard_policies.degradation.words import mib

KV_RUNGS = (Rung.BATCH, Rung.CTX)


class Prices:
    """The rungs that are left, in order, seen through a failure's route and (where known) the accounts.

    need_bytes  what is missing; None or 0 where that is not known
    frees       what a configuration frees; None where nothing is known
    The step numbers are those of `ladder`.
    """

    def __init__(
        self,
        left: Mapping[Rung, Sequence[Knobs]],
        way: Route,
        need_bytes: int | None,
        frees: Callable[[Knobs], int] | None,
    ) -> None:
        self._way = way
        self._frees = frees
        self._need_bytes = need_bytes or 0
        self._best_bytes = {rung: max(map(frees, offered)) for rung, offered in left.items()} if frees else {}
        self._kv_bytes = sum(max(0, self._best_bytes.get(rung, 0)) for rung in KV_RUNGS)
        self._only_weights_cure = self._kv_bytes < self._need_bytes and any(
            best > 0 for rung, best in self._best_bytes.items() if rung not in KV_RUNGS
        )

    def against(self, rung: Rung) -> str | None:
        """Why this rung cannot help; None if it may."""
        best_bytes = self._best_bytes.get(rung)
        priced = best_bytes is not None and best_bytes > 0
        if rung not in self._way.rungs and not (priced and rung in self._way.if_priced):  # 3b
            return self._way.why_not
        if best_bytes is not None and not priced:  # 3c
            return f"frees nothing on the card that ran out ({mib(best_bytes)} at best)"
        if self._only_weights_cure and rung in KV_RUNGS:  # 3d
            return (
                f"{mib(self._need_bytes)} are missing, batch and ctx together free {mib(self._kv_bytes)}: "
                "only less weight on the card can cure it"
            )
        return None

    def choose(self, rung: Rung, offered: Sequence[Knobs]) -> tuple[Knobs, str]:
        """4: the configuration of this rung to take, and why."""
        frees = self._frees
        if frees is None:
            return offered[0], "next in order"
        passed_over = takewhile(lambda other: other != rung, self._best_bytes)
        ask_bytes = self._need_bytes - sum(max(0, self._best_bytes[r]) for r in passed_over if r in KV_RUNGS)
        enough = (knobs for knobs in offered if frees(knobs) >= max(1, ask_bytes))
        chosen = next(enough, None) or max(offered, key=frees)
        of_need = f" of {mib(self._need_bytes)} missing" if self._need_bytes else ""
        return chosen, f"frees {mib(frees(chosen))}{of_need}"
