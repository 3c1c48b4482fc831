"""The stated rules: from a table of runs to findings. Pure; each rule is one function and reads alone.

A rule gives a Finding, or None where it does not apply. Memory rules presume that the failure to be explained
is one of memory; the first applicable rule in `RULES` names the main cause, the others stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvguard.domain import Cause, Stage
from kvguard.isolation.table import Run, Table, all_fail, all_run
from kvguard.settings import format_size

Kind = Literal["memory short", "quant incompatible", "dependency mismatch", "other", "none"]

CLEARLY_LOWER = 0.97
"""A peak counts as clearly lower below this share of the other."""

NEAR = 0.9
"""Near a limit: this share of it."""

SLOW = 0.5
"""A speed below this share of the usual one is a spill into slower memory."""

OTHERS_MATTER = 0.15
"""Other processes matter from this share of the card on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule found.

    rows         numbers of the runs that say so
    action       what to do next; `needs_bytes` is the least card memory with which that ran, headroom not
                 included, None where nothing that ran tells
    """

    rule: str
    cause: str
    kind: Kind
    says: str
    rows: tuple[int, ...]
    confidence: float
    action: str = ""
    needs_bytes: int | None = None


Rule = Callable[[Table], Finding | None]


def _rows(*groups: Sequence[Run]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(run.number for runs in groups for run in runs))


def _least(runs: Sequence[Run]) -> int | None:
    return min((run.points.peak_bytes for run in runs if run.ok), default=None)


def _fails_for_memory(table: Table) -> bool:
    return table.base is not None and table.base.looks_like_memory


def _smallest_fails(table: Table) -> bool:
    return all_fail(table.smallest, lambda run: run.looks_like_memory)


# ---------------------------------------------------------------- not a lack of memory


def not_reproduced(table: Table) -> Finding | None:
    """No run of what was asked for failed, at any batch, nor was any of them slow."""
    asked = [run for runs in table.batches().values() for run in runs]
    if not all_run(asked) or spill(table) is not None:
        return None
    peak = max(run.points.peak_bytes for run in asked)
    return Finding(
        rule="not_reproduced",
        cause="not_reproduced",
        kind="none",
        says=f"none of {len(asked)} runs failed; the highest peak was {format_size(peak)}",
        rows=_rows(asked),
        confidence=min(0.9, 0.5 + 0.1 * len(asked)),
        action="give the input, batch and context with which it fails",
        needs_bytes=peak,
    )


def full_weights(table: Table) -> Finding | None:
    """Contrast A: quantised against 16-bit weights, same loader, same input."""
    base, contrast = table.base, table.of("full_weights")
    if base is None or base.looks_like_memory or base.failure is None or not contrast:
        return None
    rows = _rows([base], contrast)
    if all_run(contrast):
        return Finding(
            rule="full_weights",
            cause="format_against_loader",
            kind="quant incompatible",
            says="the 16-bit weights run with the same loader and input, the quantised ones do not",
            rows=rows,
            confidence=0.95,
            action="another version of the loader, another quantisation, or the 16-bit weights",
            needs_bytes=_least(contrast),
        )
    alike = all(run.cause is base.cause and _stage(run) is Stage.LOAD for run in contrast)
    if alike and _stage(base) is Stage.LOAD:
        return Finding(
            rule="full_weights",
            cause="dependency_versions",
            kind="dependency mismatch",
            says="16-bit and quantised weights fail alike while loading",
            rows=rows,
            confidence=0.85,
            action="change the version of the engine or of the library that the error names",
        )
    return None


_NOT_MEMORY: dict[Cause, tuple[str, Kind]] = {
    Cause.QUANT_FORMAT_MISMATCH: ("quant_format", "quant incompatible"),
    Cause.DEPENDENCY_VERSION_MISMATCH: ("dependency_versions", "dependency mismatch"),
    Cause.CORRUPT_MODEL: ("damaged_file", "other"),
}


def not_memory(table: Table) -> Finding | None:
    """The failure itself says what it is, and it is no lack of memory."""
    base = table.base
    if base is None or base.failure is None or base.looks_like_memory:
        return None
    cause, kind = _NOT_MEMORY.get(base.cause, (base.cause.value, "other"))
    same = [run for run in table.reproductions if not run.ok and run.cause is base.cause]
    others = [run for run in table.of("quant") if run.ok]
    helps = f"; {others[0].knobs.quant.label} runs" if others else ""
    return Finding(
        rule="not_memory",
        cause=cause,
        kind=kind,
        says=f"{base.cause.value} at {base.failure.stage.value}, {len(same)} times alike{helps}",
        rows=_rows(same or [base], others),
        confidence=base.failure.confidence,
        action=base.failure.remedy,
        needs_bytes=_least(others),
    )


# ---------------------------------------------------------------- memory that is not the model's


def held_by_others(table: Table) -> Finding | None:
    """What others hold is what is missing: without them it would fit."""
    base = table.base
    if base is None or not (base.looks_like_memory or base.held_by_others):
        return None
    needs, others = base.predicted_bytes or base.points.peak_bytes, base.others_bytes
    fits_alone = needs <= table.usable_bytes
    much = others >= OTHERS_MATTER * table.limit_bytes
    if not (base.held_by_others or (much and fits_alone and needs + others > table.limit_bytes)):
        return None
    return Finding(
        rule="held_by_others",
        cause="held_by_others",
        kind="memory short",
        says=f"other processes hold {format_size(others)} of {format_size(table.limit_bytes)}; "
        f"what was asked for needs {format_size(needs)}",
        rows=_rows([base]),
        confidence=0.9 if fits_alone else 0.6,
        action="end the other process, or wait until its memory is free; then start the same again",
        needs_bytes=needs,
    )


def host_cache(table: Table) -> Finding | None:
    """It runs without the engine's prompt cache in host memory, and fails with it."""
    cured = table.of("host_cache")
    if not (_fails_for_memory(table) and all_run(cured)) or table.base is None:
        return None
    return Finding(
        rule="host_cache",
        cause="prompt_cache",
        kind="memory short",
        says="without the engine's prompt cache in host memory it runs: the cache is what grows",
        rows=_rows([table.base], cured),
        confidence=0.9,
        action="bound the prompt cache (--cache-ram, knobs.host_cache_bytes), or turn it off",
        needs_bytes=_least(cured),
    )


def spill(table: Table) -> Finding | None:
    """It runs, but at less than half the speed that less memory brings: it spills into slower memory."""
    base = [run for run in table.smallest if run.ok and run.tokens_per_s]
    lighter = [
        run
        for run in (*table.of("quant"), *table.of("ctx"), *table.of("host_cache"))
        if run.ok and run.tokens_per_s and run.knobs.batch == (base[0].knobs.batch if base else 0)
    ]
    if not base or not lighter:
        return None
    slow, fast = max(r.tokens_per_s or 0 for r in base), max(r.tokens_per_s or 0 for r in lighter)
    full = max(run.points.peak_bytes for run in base) >= NEAR * table.usable_bytes
    if slow >= SLOW * fast or not full:
        return None
    return Finding(
        rule="spill",
        cause="slow_spill",
        kind="memory short",
        says=f"{slow:.1f} tokens/s against {fast:.1f} with less memory, while the card is full",
        rows=_rows(base, lighter),
        confidence=0.85,
        action="what runs fast: " + _change(min(lighter, key=lambda run: run.points.peak_bytes)),
        needs_bytes=_least(lighter),
    )


# ---------------------------------------------------------------- one variable cures it


def batch(table: Table) -> Finding | None:
    """The smallest batch runs, and more batch breaks."""
    by_batch = table.batches()
    broken = {b: runs for b, runs in by_batch.items() if any(run.looks_like_memory for run in runs)}
    running = {b: runs for b, runs in by_batch.items() if all_run(runs)}
    if not broken or not running or min(running) > min(broken):
        return None
    first, best = min(broken), max(b for b in running if b < min(broken))
    stable = all_fail(broken[first])
    return Finding(
        rule="batch",
        cause="batch",
        kind="memory short",
        says=f"batch {best} runs, batch {first} does not",
        rows=_rows(running[best], broken[first]),
        confidence=0.9 if stable else 0.6,
        action=f"batch {best}",
        needs_bytes=max(run.points.peak_bytes for run in running[best]),
    )


def quant(table: Table) -> Finding | None:
    """The smallest batch fails, and a lower quantisation runs with a clearly lower peak."""
    base, cured = table.base, [run for run in table.of("quant") if run.ok]
    if base is None or not _smallest_fails(table) or not cured:
        return None
    best = max(cured, key=lambda run: run.knobs.quant.bits)
    if best.points.peak_bytes > CLEARLY_LOWER * base.needed_bytes:
        return None
    return Finding(
        rule="quant",
        cause="quant",
        kind="memory short",
        says=f"{base.knobs.quant.label} fails, {best.knobs.quant.label} runs with a peak of "
        f"{format_size(best.points.peak_bytes)}",
        rows=_rows(table.smallest, cured),
        confidence=0.9,
        action=f"take {best.knobs.quant.label}",
        needs_bytes=best.points.peak_bytes,
    )


def context(table: Table) -> Finding | None:
    """Less context with the same conversation cures it."""
    cured = [run for run in table.of("ctx") if run.ok]
    if table.base is None or not _smallest_fails(table) or not cured:
        return None
    best = max(cured, key=lambda run: run.knobs.ctx_tokens)
    return Finding(
        rule="context",
        cause="context",
        kind="memory short",
        says=f"ctx {table.base.knobs.ctx_tokens} fails, {best.knobs.ctx_tokens} runs with the same input",
        rows=_rows(table.smallest, cured),
        confidence=0.9,
        action=f"ctx {best.knobs.ctx_tokens}",
        needs_bytes=best.points.peak_bytes,
    )


def layers(table: Table) -> Finding | None:
    """Fewer layers on the card cure it."""
    cured = [run for run in table.of("gpu_layers") if run.ok]
    if table.base is None or not _smallest_fails(table) or not cured:
        return None
    best = max(cured, key=lambda run: run.knobs.gpu_layers)
    speed = f" at {best.tokens_per_s:.1f} tokens/s" if best.tokens_per_s else ""
    return Finding(
        rule="layers",
        cause="weights",
        kind="memory short",
        says=f"with {best.knobs.gpu_layers} layers on the card it runs{speed}",
        rows=_rows(table.smallest, cured),
        confidence=0.85,
        action=f"{best.knobs.gpu_layers} layers on the card",
        needs_bytes=best.points.peak_bytes,
    )


def combined(table: Table) -> Finding | None:
    """No single change cures it, all of them together do: look at the context and how the KV cache grows."""
    together = table.of("combined")
    single = [run for name in ("quant", "ctx", "gpu_layers", "host_cache") for run in table.of(name)]
    if not _smallest_fails(table) or not all_run(together) or any(run.ok for run in single):
        return None
    return Finding(
        rule="combined",
        cause="combined",
        kind="memory short",
        says="no single change helps, all together do",
        rows=_rows(table.smallest, single, together),
        confidence=0.8,
        action=f"{_change(together[0])}; then look at the context, and at how the KV cache grows with it",
        needs_bytes=_least(together),
    )


# ---------------------------------------------------------------- where it failed


def shortest_input(table: Table) -> Finding | None:
    """Contrast B: the shortest input against the normal one, same weights, same loader."""
    base, contrast = table.base, table.of("shortest_input")
    if base is None or not base.looks_like_memory or not contrast:
        return None
    if all_run(contrast):
        return Finding(
            rule="shortest_input",
            cause="peak",
            kind="memory short",
            says="the shortest input runs, the normal one does not: the peak of a request is too high",
            rows=_rows([base], contrast),
            confidence=0.8,
            action="a shorter input, a smaller batch, fewer new tokens, or images in tiles",
            needs_bytes=_least(contrast),
        )
    if all_fail(contrast, lambda run: run.looks_like_memory and _stage(run) is Stage.LOAD):
        return _capacity(table, [base, *contrast], "even the shortest input fails, while loading")
    return None


def capacity(table: Table) -> Finding | None:
    """Loaded and idle, it was already near the limit; then it failed."""
    full = [
        run
        for run in table.smallest
        if not run.ok and (run.points.loaded_idle_bytes or 0) >= NEAR * table.limit_bytes
    ]
    if not full:
        return None
    idle = format_size(full[0].points.loaded_idle_bytes or 0)
    return _capacity(table, full, f"loaded and idle it held {idle} of {format_size(table.limit_bytes)}")


def _capacity(table: Table, runs: Sequence[Run], says: str) -> Finding:
    needs = max(run.needed_bytes for run in runs)
    return Finding(
        rule="capacity",
        cause="capacity",
        kind="memory short",
        says=says,
        rows=_rows(runs),
        confidence=0.8,
        action="a larger card, or a smaller model",
        needs_bytes=needs if needs > table.usable_bytes else None,
    )


def weights(table: Table) -> Finding | None:
    """It fails before all weights are in."""
    if not (_smallest_fails(table) and all_fail(table.smallest, lambda run: run.before_weights)):
        return None
    return Finding(
        rule="weights",
        cause="weights",
        kind="memory short",
        says="it fails before all weights are in memory",
        rows=_rows(table.smallest),
        # the last line of a log is not the last thing that happened: a kill comes without one
        confidence=0.6 if any(r.cause is Cause.HOST_RAM_OOM_KILLED for r in table.smallest) else 0.8,
        action="a smaller quantisation, fewer layers on the card, or a larger card",
        needs_bytes=max(run.needed_bytes for run in table.smallest),
    )


def headroom(table: Table) -> Finding | None:
    """The smallest batch runs, and its peak is already near the limit."""
    high = [run for run in table.smallest if run.points.peak_bytes >= NEAR * table.limit_bytes]
    if not high or not all_run(table.smallest):
        return None
    peak = max(run.points.peak_bytes for run in high)
    return Finding(
        rule="headroom",
        cause="headroom",
        kind="memory short",
        says=f"the smallest batch peaks at {format_size(peak)} of {format_size(table.limit_bytes)}",
        rows=_rows(high),
        confidence=0.7,
        action="a smaller quantisation or context: there is no room for anything unforeseen",
        needs_bytes=peak,
    )


def half_ctx_no_help(table: Table) -> Finding | None:
    """Half the context with the same number of new tokens does not help: it is the weights."""
    tried = table.of("ctx")
    if not _smallest_fails(table) or not all_fail(tried, lambda run: run.looks_like_memory):
        return None
    return Finding(
        rule="half_ctx_no_help",
        cause="weights",
        kind="memory short",
        says=f"ctx {min(run.knobs.ctx_tokens for run in tried)} fails too",
        rows=_rows(tried),
        confidence=0.65,
        action="try a smaller quantisation next",
    )


def layers_no_effect(table: Table) -> Finding | None:
    """Fewer layers on the card, and no less memory: the step had no effect, or KV and buffers dominate."""
    tried = table.of("gpu_layers")
    base = table.base or (table.smallest[0] if table.smallest else None)
    if base is None or not tried:
        return None
    if any(run.points.peak_bytes < CLEARLY_LOWER * base.points.peak_bytes for run in tried):
        return None
    return Finding(
        rule="layers_no_effect",
        cause="context",
        kind="memory short",
        says="fewer layers on the card take no less of it: the step had no effect, or KV cache and buffers "
        "are most of it",
        rows=_rows([base], tried),
        confidence=0.6,
        action="go back to the context",
    )


def mid_generation(table: Table) -> Finding | None:
    """It failed while tokens came: the KV cache grew, or one request of the batch is long."""
    found = [
        run
        for runs in table.batches().values()
        for run in runs
        if run.looks_like_memory and (run.failed_at_token or 0) > 0
    ]
    if not found:
        return None
    tokens = sorted({run.failed_at_token or 0 for run in found})
    several = found[0].knobs.batch > 1
    return Finding(
        rule="mid_generation",
        cause="kv_growth",
        kind="memory short",
        says=f"it failed after {', '.join(map(str, tokens))} new tokens: the KV cache grows"
        + (", or one request of the batch is long" if several else ""),
        rows=_rows(found),
        confidence=0.75,
        action="a smaller context, fewer new tokens, or a smaller batch",
    )


def memory_alone(table: Table) -> Finding | None:
    """It is a lack of memory, and no experiment cured it."""
    base = table.base
    if base is None or not base.looks_like_memory:
        return None
    return Finding(
        rule="memory_alone",
        cause=base.cause.value,
        kind="memory short",
        says="it runs out of memory, and nothing that was tried cures it",
        rows=_rows([base]),
        confidence=0.5,
        action=base.failure.remedy if base.failure is not None else "",
        needs_bytes=base.needed_bytes if base.needed_bytes > table.usable_bytes else None,
    )


RULES: tuple[Rule, ...] = (
    not_reproduced,
    full_weights,
    not_memory,
    held_by_others,
    spill,
    host_cache,
    batch,
    quant,
    context,
    layers,
    combined,
    capacity,
    shortest_input,
    weights,
    half_ctx_no_help,
    layers_no_effect,
    mid_generation,
    headroom,
    memory_alone,
)


def _stage(run: Run) -> Stage | None:
    return run.failure.stage if run.failure is not None else None


def _change(run: Run) -> str:
    knobs = run.knobs
    return f"batch {knobs.batch}, ctx {knobs.ctx_tokens}, {knobs.quant.label or 'weights as stored'}"
