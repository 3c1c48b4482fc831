"""What to do about a failure: the table stage x cause -> rungs of the ladder, or advice alone.

A route lists the rungs that can help, the likeliest first; which of them is taken, and in whose order, is the
ladder's. A cause without rungs changes nothing: its advice is for a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvguard.domain import Cause, Failure, Rung, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a failure leads. No rungs: take no step, tell `advice`.

    A rung outside `rungs` is passed over for `why_not`. `if_priced` may help on some cards only: it is taken
    where the accounts say that it frees memory there.
    """

    rungs: tuple[Rung, ...]
    advice: str
    why_not: str = ""
    if_priced: frozenset[Rung] = frozenset()

    @property
    def changes_something(self) -> bool:
        return bool(self.rungs)


_B, _C, _Q, _G = Rung.BATCH, Rung.CTX, Rung.QUANT, Rung.GPU_LAYERS

ADVICE: dict[Cause, str] = {
    Cause.WEIGHTS_DONT_FIT: (
        "The weights alone are larger than the memory: take a smaller quantisation, fewer layers on "
        "the card, or a larger card. A smaller batch or context does not help."
    ),
    Cause.KV_DONT_FIT: (
        "The weights fit, the KV cache beside them does not: lower the context or the number of "
        "parallel sequences, use a smaller KV type, or take a smaller quantisation."
    ),
    Cause.ACTIVATION_PEAK: (
        "Weights and KV cache fit, the working memory of a forward pass does not: lower the micro-"
        "batch (-ub, --max-num-batched-tokens) or the parallel sequences, or leave more headroom."
    ),
    Cause.HOST_RAM_OOM_KILLED: (
        "Host memory (RAM, the cgroup's limit, or /dev/shm) ran out, not the card's: raise the limit "
        "(memory.max, docker --memory, --shm-size), lower host caches (--cache-ram), or load a "
        "smaller file."
    ),
    Cause.SHARED_MEMORY_SPILL: (
        "The card is full and the driver uses host memory in its place, which is many times slower: "
        "lower batch or context, take a smaller quantisation, or forbid the driver's fallback."
    ),
    Cause.MEMORY_HELD_BY_OTHERS: (
        "Another process holds the memory: end it (nvidia-smi lists it) or wait, then start again "
        "with the same configuration. Making this one smaller would not cure the reason."
    ),
    Cause.QUANT_FORMAT_MISMATCH: (
        "The loader cannot read this quantisation, or this card cannot compute it: take a variant "
        "that the engine supports, or another engine. More memory or a bigger card does not cure a "
        "format fault."
    ),
    Cause.DEPENDENCY_VERSION_MISMATCH: (
        "Engine, library, driver or CPU do not go together, or the model is newer than the engine: "
        "change the version the error names, in an environment of its own."
    ),
    Cause.CORRUPT_MODEL: (
        "A file of the model is damaged or incomplete: compare size and checksum with the source and "
        "download it again."
    ),
    Cause.MISSING_FILE: (
        "A file is not where the configuration says, or may not be read: check the path, the parts of"
        " a split model, permissions, and access to the model repository."
    ),
    Cause.PORT_IN_USE: ("Another process listens on this port: end it, or choose another port."),
    Cause.DRIVER_ERROR: (
        "The device or its driver failed; this is not a lack of memory: look for Xid or reset "
        "messages in dmesg, restart the driver or the machine, and update the driver if it comes "
        "back."
    ),
    Cause.REQUEST_TOO_LONG: (
        "One request is longer than the context that is served: shorten it, or serve a larger "
        "context. The engine is healthy."
    ),
    Cause.BENIGN: ("Nothing to do: what the log shows was overcome, or was asked for."),
    Cause.UNKNOWN: (
        "No cause was found: keep the log, raise the engine's verbosity, and look at the first error in it."
    ),
}

_EVERYWHERE: dict[Cause, tuple[Rung, ...]] = {
    Cause.WEIGHTS_DONT_FIT: (_Q, _G),
    Cause.KV_DONT_FIT: (_B, _C, _Q, _G),
    Cause.ACTIVATION_PEAK: (_B, _C, _Q, _G),
    Cause.HOST_RAM_OOM_KILLED: (_B, _C, _Q),  # fewer layers on the card would move more into host memory
    Cause.SHARED_MEMORY_SPILL: (_B, _C, _Q, _G),
}

_AT_STAGE: dict[tuple[Stage, Cause], tuple[Rung, ...]] = {
    # An engine checks at start that one sequence of full length fits: fewer sequences cannot cure that.
    (Stage.LOAD, Cause.KV_DONT_FIT): (_C, _B, _Q, _G),
    (Stage.WARMUP, Cause.KV_DONT_FIT): (_C, _B, _Q, _G),
    # The weights were loaded before: something else grew, so less of what grows helps too.
    (Stage.INFERENCE, Cause.WEIGHTS_DONT_FIT): (_B, _C, _Q, _G),
    (Stage.IDLE, Cause.WEIGHTS_DONT_FIT): (_B, _C, _Q, _G),
    # Before the weights are in, batch and context have cost little yet.
    (Stage.LOAD, Cause.ACTIVATION_PEAK): (_Q, _G, _B, _C),
    # A kill tells no account: the KV cache may have been on its way in, under the loader's last line.
    (Stage.LOAD, Cause.HOST_RAM_OOM_KILLED): (_Q, _B, _C),
    (Stage.LOAD, Cause.SHARED_MEMORY_SPILL): (_Q, _G, _B, _C),
}

_WHY_NOT: dict[Cause, str] = {
    Cause.WEIGHTS_DONT_FIT: "the weights alone do not fit, so less KV cannot cure it",
    Cause.HOST_RAM_OOM_KILLED: "host memory ran out, and layers that leave the GPU go into it",
}
_IF_PRICED: dict[Cause, frozenset[Rung]] = {Cause.HOST_RAM_OOM_KILLED: frozenset({_G})}

TABLE: dict[tuple[Stage, Cause], Route] = {
    (stage, cause): Route(
        rungs=_AT_STAGE.get((stage, cause), _EVERYWHERE.get(cause, ())),
        advice=ADVICE[cause],
        why_not=_WHY_NOT.get(cause, ""),
        if_priced=_IF_PRICED.get(cause, frozenset()),
    )
    for stage in Stage
    for cause in Cause
}


def as_markdown() -> str:
    """The table for the documentation: a row a cause, a column a stage, then the advice."""
    lines = [f"| cause | {' | '.join(Stage)} | what to do |", "|---" * (len(Stage) + 2) + "|"]
    for cause in Cause:
        cells = [" → ".join(TABLE[stage, cause].rungs) or "-" for stage in Stage]
        lines.append(f"| `{cause}` | {' | '.join(cells)} | {ADVICE[cause]} |")
    return "\n".join(lines)


def route(stage: Stage, cause: Cause) -> Route:
    return TABLE[stage, cause]


def route_of(failure: Failure) -> Route:
    """Where a failure leads. While others hold the memory, nothing of ours is made smaller."""
    if Cause.MEMORY_HELD_BY_OTHERS in failure.causes:
        return TABLE[failure.stage, Cause.MEMORY_HELD_BY_OTHERS]
    return TABLE[failure.stage, failure.cause]


def advice_for(causes: Sequence[Cause]) -> str:
    if Cause.MEMORY_HELD_BY_OTHERS in causes:
        return ADVICE[Cause.MEMORY_HELD_BY_OTHERS]
    return ADVICE[causes[0] if causes else Cause.UNKNOWN]
