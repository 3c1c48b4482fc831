"""`kvguard tune`: the tuner wired around a Site, with live progress and a report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from rich.console import Console
from rich.status import Status
from rich.table import Table

from kvguard.app.guard import life_settings
from kvguard.app.site import Site
from kvguard.diagnosis import diagnose
from kvguard.domain import Knobs
from kvguard.life import Life
from kvguard.model import ModelMeta
from kvguard.report import describe
from kvguard.selection import plan_for, with_fixed
from kvguard.settings import format_size
from kvguard.tuner import Trial, Tuned, TuneFailed, Tuner, TunerParts

BATCHES = (8, 4, 2, 1)
MOST_BATCH = 256


def run_tune(
    site: Site,
    *,
    repeats: int,
    budget_s: float,
    ctx_ladder: Sequence[int] = (),
    matrix: bool = False,
    as_json: bool = False,
) -> int:
    """Tune and report. Returns the exit code: 0 when something was confirmed (or measured), else 1."""
    console = Console(stderr=True)
    rows: list[tuple[ModelMeta, Tuned]] = []
    try:
        for meta in site.models if matrix else site.models[:1]:
            progress = _Progress(console, site.usable_bytes)
            tuner = Tuner(_parts(site, meta, repeats, budget_s, progress))
            if ctx_ladder:
                work = tuner.ctx_ladder(ctx_ladder)
            elif matrix:
                work = tuner.largest_ctx()
            else:
                work = tuner.run()
            try:
                rows.append((meta, asyncio.run(work)))
            finally:
                progress.close()
    except TuneFailed as exc:
        console.print(f"[bold red]error:[/] {exc}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; what was learned is in the journal: kvguard configs")
        return 130
    measuring = matrix or bool(ctx_ladder)
    if as_json:
        print(json.dumps(_as_json(site, rows), indent=2))
    elif measuring:
        _print_rows(console, rows)
    else:
        _print_outcome(console, rows[0][1])
    return 0 if all(tuned.confirmed or (measuring and tuned.largest_ctx_tokens) for _, tuned in rows) else 1


def _parts(site: Site, meta: ModelMeta, repeats: int, budget_s: float, progress: _Progress) -> TunerParts:
    settings = life_settings(site)
    start = replace(site.wanted, quant=meta.variant())
    fixed = site.settings.knobs
    most = fixed.ctx_tokens or min(fixed.max_ctx_tokens, meta.n_ctx_train or fixed.max_ctx_tokens)
    return TunerParts(
        start=start,
        usable_bytes=site.usable_bytes,
        most_ctx_tokens=most,
        min_ctx_tokens=min(site.settings.degrade.min_ctx, most),
        make_life=lambda knobs: Life(settings, knobs),
        predict=site.predict,
        refine=lambda correction, ctx: _refined(site, start, correction, ctx),
        diagnose=diagnose,
        notes=site.recorder,
        repeats=repeats,
        budget_s=budget_s,
        spills=site.card.info.kind == "nvml",
        on_trial=progress,
    )


def _refined(site: Site, start: Knobs, correction_bytes: int, largest_ctx: int) -> Knobs | None:
    """The best configuration by the corrected prediction, after the user's preference."""
    room = site.usable_bytes - correction_bytes
    prefer = site.settings.knobs.prefer

    def fits(knobs: Knobs) -> bool:
        accounts = site.predict(knobs)
        return accounts is not None and accounts.total_bytes <= room

    if prefer == "context":
        one = replace(start, ctx_tokens=largest_ctx, pool_tokens=largest_ctx, host_cache_bytes=0)
        return next((k for batch in BATCHES if fits(k := replace(one, batch=batch))), replace(one, batch=1))
    if prefer == "throughput":
        ctx = min(site.settings.knobs.ctx_tokens or site.settings.degrade.min_ctx, largest_ctx)

        def parallel(batch: int) -> Knobs:
            return replace(start, batch=batch, ctx_tokens=ctx, pool_tokens=ctx * batch, host_cache_bytes=0)

        fitting = [batch for batch in range(1, MOST_BATCH + 1) if fits(parallel(batch))]
        return parallel(max(fitting)) if fitting else None
    settings = site.settings.model_copy(
        update={"knobs": site.settings.knobs.model_copy(update={"max_ctx_tokens": largest_ctx})}
    )
    plan = plan_for(
        settings, site.models, engine=site.engine, gpu=site.card.info.kind == "nvml", usable_bytes=room
    )
    return with_fixed(settings, plan.knobs) if plan.fits else None


class _Progress:
    """A spinner on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, usable_bytes: int) -> None:
        self._console = console
        self._usable_bytes = usable_bytes
        self._status: Status | None = None
        self._number = 0

    def __call__(self, purpose: str, knobs: Knobs, trial: Trial | None) -> None:
        if trial is None:
            self._number += 1
            text = f"trial {self._number}: {purpose}: {describe(knobs)}"
            if self._console.is_terminal:
                self._status = self._console.status(text)
                self._status.start()
            else:
                self._console.print(text, highlight=False, soft_wrap=True)
            return
        self.close()
        self._console.print(
            f"trial {trial.number}: ctx {knobs.ctx_tokens}, batch {knobs.batch}, {knobs.quant.label}: "
            f"{_coloured(trial.result)}, peak {format_size(trial.peak_bytes)} (predicted "
            f"{format_size(trial.predicted_bytes)}) of {format_size(self._usable_bytes)} usable, "
            f"{trial.seconds:.1f} s{'; ' + trial.detail if trial.detail else ''}",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _coloured(result: str) -> str:
    return f"[green]{result}[/]" if result == "success" else f"[red]{result}[/]"


def _print_outcome(console: Console, tuned: Tuned) -> None:
    if tuned.knobs is None:
        console.print(f"[bold red]nothing was confirmed[/]: {tuned.stopped}", highlight=False)
        return
    console.print(
        f"[bold green]confirmed[/]: {describe(tuned.knobs)}\n"
        f"{len(tuned.trials)} restarts ({tuned.search_restarts} to find the largest context), "
        f"{tuned.seconds:.0f} s. `kvguard serve` starts with it from now on.",
        highlight=False,
        soft_wrap=True,
    )


def _print_rows(console: Console, rows: Sequence[tuple[ModelMeta, Tuned]]) -> None:
    table = Table(title="Largest context at batch 1, measured", title_justify="left")
    for heading in ("quant", "size", "largest ctx", "trials", "seconds"):
        table.add_column(heading, justify="left" if heading == "quant" else "right")
    for meta, tuned in rows:
        largest = str(tuned.largest_ctx_tokens) if tuned.largest_ctx_tokens else "not feasible"
        table.add_row(
            meta.quant, format_size(meta.size_bytes), largest, str(len(tuned.trials)), f"{tuned.seconds:.0f}"
        )
    console.print(table)


def _as_json(site: Site, rows: Sequence[tuple[ModelMeta, Tuned]]) -> dict[str, object]:
    outcomes = [
        {"model": meta.name, "quant": meta.quant, **msgspec.to_builtins(tuned)} for meta, tuned in rows
    ]
    card = {"name": site.card.info.name, "total_bytes": site.card.info.total_bytes}
    head: dict[str, object] = {"card": card, "usable_bytes": site.usable_bytes}
    return {**head, **outcomes[0]} if len(outcomes) == 1 else {**head, "variants": outcomes}
