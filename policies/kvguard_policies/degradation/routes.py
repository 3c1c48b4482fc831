"""Which rungs can cure a failure: the table stage x cause -> rungs.

Only memory failures have a route. For every other cause nothing is changed: the failure's own remedy is
what a person has to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvguard.domain import Cause, Rung, Stage

ALL = frozenset(Rung)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What may help. A rung outside `rungs` is passed over for `why_not`.

    `if_priced` may help on some cards only: it is taken where the accounts say that it frees memory there.
    """

    rungs: frozenset[Rung]
    why_not: str = ""
    if_priced: frozenset[Rung] = frozenset()


_ANY_RUNG = Route(rungs=ALL)
_WEIGHTS = Route(
    rungs=frozenset({Rung.QUANT, Rung.GPU_LAYERS}),
    why_not="the weights alone do not fit, so less KV cannot cure it",
)
_HOST = Route(
    rungs=frozenset({Rung.BATCH, Rung.CTX, Rung.QUANT}),
    why_not="host memory ran out, and layers that leave the GPU go into it",
    if_priced=frozenset({Rung.GPU_LAYERS}),
)

_BY_CAUSE = {
    Cause.WEIGHTS_DONT_FIT: _WEIGHTS,
    Cause.KV_DONT_FIT: _ANY_RUNG,
    Cause.ACTIVATION_PEAK: _ANY_RUNG,
    Cause.HOST_RAM_OOM_KILLED: _HOST,
    Cause.SHARED_MEMORY_SPILL: _ANY_RUNG,
}

ROUTES: dict[tuple[Stage, Cause], Route] = {
    (stage, cause): route for stage in Stage for cause, route in _BY_CAUSE.items()
} | {
    # The weights were loaded before: something else grew, so less of what grows helps too.
    (stage, Cause.WEIGHTS_DONT_FIT): _ANY_RUNG
    for stage in (Stage.INFERENCE, Stage.IDLE)
}


def route(stage: Stage, cause: Cause) -> Route | None:
    """None: not a failure of memory, so no rung may change anything."""
    return ROUTES.get((stage, cause))
