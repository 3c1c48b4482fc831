"""Chooses what to start first: what the user fixed, what the journal knows, what the planner predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvguard.accounts import EngineName, predict
from kvguard.domain import Accounts, CardInfo, Knobs, PoolKind, Variant
from kvguard.model import ModelMeta
from kvguard.planner import Limits, Plan, Prefer, choose
from kvguard.record import Record, WhyRecord
from kvguard.settings import Settings, format_size
from kvguard.supervisor import Attempt

_PREFER: Mapping[str, Prefer] = {
    "context": "ctx",
    "throughput": "batch",
    "quality": "quality",
    "balanced": "balanced",
}


class CannotServe(RuntimeError):
    """Nothing can be started; the message names the number and the remedy."""


class Predictor:
    """Accounts of any knobs of this model; None for weights that nobody read."""

    def __init__(self, models: Iterable[ModelMeta], *, engine: EngineName, gpu: bool) -> None:
        self._models = {meta.variant().source: meta for meta in models}
        self._engine = engine
        self._gpu = gpu

    def __call__(self, knobs: Knobs) -> Accounts | None:
        meta = self._models.get(knobs.quant.source)
        return predict(meta, knobs, self._engine, gpu=self._gpu) if meta is not None else None


def first_attempt(
    settings: Settings,
    models: Sequence[ModelMeta],
    known: Sequence[Record],
    find: Callable[[str], Record | None],
    *,
    engine: EngineName,
    card: CardInfo,
    usable_bytes: int,
) -> Attempt:
    """Choose the configuration to start. `models[0]` is what was asked for, the others are its variants.

    1. --config-id: that one
    2. a configuration of the journal that works here and is what the user asks for
    3. the planner's choice
    Raises CannotServe where nothing fits.
    """
    wanted_id = settings.knobs.config_id
    if wanted_id:  # 1
        wanted = find(wanted_id)
        if wanted is None:
            raise CannotServe(f"no configuration {wanted_id} in the journal: see `kvguard configs`")
        return Attempt(knobs=wanted.knobs, why=WhyRecord(kind="verify", from_id=wanted_id))
    sources = {meta.variant().source for meta in models}
    for record in known:  # 2
        if record.asked == asked(settings) and record.knobs.quant.source in sources:
            return Attempt(knobs=record.knobs, why=WhyRecord(kind="verify", from_id=record.id))
    plan = plan_for(settings, models, engine=engine, gpu=card.kind == "nvml", usable_bytes=usable_bytes)  # 3
    if not plan.fits:
        raise CannotServe(
            f"{plan.verdict} on {card.name} ({format_size(card.total_bytes)}): {plan.reason}. "
            f"What would help: {plan.remedy}."
        )
    return Attempt(knobs=with_fixed(settings, plan.knobs), why=WhyRecord(kind="self_tune"))


def wanted_knobs(
    settings: Settings,
    models: Sequence[ModelMeta],
    first: Knobs,
    *,
    engine: EngineName,
    gpu: bool,
    usable_bytes: int,
) -> Knobs:
    """What would be served if nothing ever failed here: the yardstick of "degraded"."""
    plan = plan_for(settings, models, engine=engine, gpu=gpu, usable_bytes=usable_bytes)
    return with_fixed(settings, plan.knobs) if plan.fits else first


def plan_for(
    settings: Settings, models: Sequence[ModelMeta], *, engine: EngineName, gpu: bool, usable_bytes: int
) -> Plan:
    """Ask the planner within the user's limits."""
    knobs, degrade = settings.knobs, settings.degrade
    trained = models[0].n_ctx_train or knobs.max_ctx_tokens
    wanted = knobs.ctx_tokens or min(knobs.max_ctx_tokens, trained)
    limits = Limits(
        ctx_tokens=wanted,
        batch=knobs.batch,
        min_ctx=wanted if knobs.ctx_tokens is not None else min(degrade.min_ctx, wanted),
        min_batch=knobs.batch or degrade.min_batch,
        kv_type=knobs.kv_type,
        pool_kind=knobs.pool_kind or PoolKind.UNIFIED,
        gpu_layers=knobs.gpu_layers,
        prefill_tokens=knobs.prefill_tokens or 512,
    )
    forms = models[:1] if "quant" in degrade.never else models
    return choose(forms, usable_bytes, 0, prefer=_PREFER[knobs.prefer], limits=limits, gpu=gpu, engine=engine)


def with_fixed(settings: Settings, knobs: Knobs) -> Knobs:
    """Apply what the user fixed beyond the planner's limits. Raises CannotServe for a contradiction."""
    fixed = settings.knobs
    if fixed.pool_tokens is not None:
        if fixed.ctx_tokens is None:
            knobs = replace(knobs, ctx_tokens=min(knobs.ctx_tokens, fixed.pool_tokens))
        if fixed.pool_tokens < knobs.ctx_tokens:
            raise CannotServe(
                f"--pool {fixed.pool_tokens} is below --ctx {knobs.ctx_tokens}: a sequence must fit the pool"
            )
        knobs = replace(knobs, pool_tokens=fixed.pool_tokens)
    if fixed.host_cache_bytes is not None:
        knobs = replace(knobs, host_cache_bytes=fixed.host_cache_bytes)
    return knobs


def asked(settings: Settings) -> str:
    """What the user fixes, in one comparable line; a configuration is reused under the same line alone."""
    fixed = {
        **settings.knobs.model_dump(exclude_defaults=True, exclude={"config_id"}),
        **settings.degrade.model_dump(include={"min_ctx", "min_batch", "never"}, exclude_defaults=True),
        **settings.memory.model_dump(include={"headroom"}, exclude_defaults=True),
        **({"extra_args": settings.backend.extra_args} if settings.backend.extra_args else {}),
    }
    return " ".join(f"{key}={value}" for key, value in sorted(fixed.items()))


def attached_knobs() -> Knobs:
    """What stands in the snapshot of a backend whose knobs are its owner's business."""
    return Knobs(
        batch=1,
        ctx_tokens=1,
        pool_tokens=1,
        pool_kind=PoolKind.UNIFIED,
        quant=Variant(kind="checkpoint", source="attached", bits=16),
    )
