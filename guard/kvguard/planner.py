"""Choose a configuration that fits a card, and say why another does not. Pure: it reads no file and no card.

A card's usable memory is its total minus what others hold minus headroom, never its nominal size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvguard.accounts import EngineName, engine_of, predict
from kvguard.domain import GIB, Accounts, CardReading, Knobs, PoolKind
from kvguard.model import ModelMeta
from kvguard.overhead import Learned

__all__ = [
    "Limits",
    "Plan",
    "choose",
    "default_headroom",
    "judge",
    "judged",
    "max_batch_of",
    "max_ctx_of",
    "predict",
    "usable_bytes",
]

DEFAULT_CTX = 32_768
DEFAULT_BATCH: dict[EngineName, int] = {"llama.cpp": 4, "vllm": 16}
GOOD_CTX = 8192  # a context below this is given up only after batch and micro-batch
PREFILL_TOKENS: dict[EngineName, int] = {"llama.cpp": 512, "vllm": 2048}
GOOD_PREFILL_TOKENS = 128
LEAST_PREFILL_TOKENS = 64
HOST_CACHE_MAX_BYTES = 2 * GIB
MOST_CTX = 1 << 20  # where a model does not tell its training context
MOST_BATCH = 1024
STEP = 256  # llama.cpp rounds contexts to this

Prefer = Literal["balanced", "quality", "ctx", "batch"]
Fit = Literal["fits", "weights do not fit", "kv cache insufficient", "overhead too large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user fixed (None: free), and how far the planner may go down.

    ctx_tokens and batch are wishes: they shrink, unless `exact`.
    """

    ctx_tokens: int | None = None
    batch: int | None = None
    min_ctx: int = 2048
    min_batch: int = 1
    kv_type: str = "f16"
    pool_kind: PoolKind = PoolKind.UNIFIED
    gpu_layers: int | None = None
    prefill_tokens: int | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An answer for one card. Where nothing fits, `knobs` is the smallest that was tried."""

    meta: ModelMeta
    knobs: Knobs
    accounts: Accounts
    usable_bytes: int
    verdict: Fit
    reason: str = ""
    remedy: str = ""

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"


def default_headroom(total_bytes: int, *, gpu: bool) -> int:
    """What is never handed out: max(1 GiB, 10 %) of a GPU (half of a tiny one), 10 % of a cgroup or host."""
    tenth = total_bytes // 10
    return min(max(GIB, tenth), total_bytes // 2) if gpu else tenth


def usable_bytes(card: CardReading | int, headroom_bytes: int) -> int:
    """Total minus what others hold minus headroom. An int is a card that nobody uses."""
    if isinstance(card, int):
        return max(0, card - headroom_bytes)
    others = max(0, card.used_bytes - (card.own_bytes or 0))
    return max(0, card.total_bytes - others - headroom_bytes)


def judge(accounts: Accounts, usable: int) -> Fit:
    """Name the first account that goes over: weights, then weights and KV, then all."""
    if accounts.total_bytes <= usable:
        return "fits"
    if accounts.weights_bytes > usable:
        return "weights do not fit"
    if accounts.weights_bytes + accounts.kv_bytes > usable:
        return "kv cache insufficient"
    return "overhead too large"


def choose(
    variants: Sequence[ModelMeta],
    card: CardReading | int,
    headroom_bytes: int,
    *,
    prefer: Prefer = "balanced",
    min_ctx: int | None = None,
    engine: EngineName | None = None,
    limits: Limits | None = None,
    gpu: bool = False,
    learned: Learned | None = None,
    projector_bytes: int = 0,
) -> Plan:
    """Choose variant and knobs for a card. Raises: GeometryError for what the engine would refuse.

    balanced   the best weights that still leave a context of GOOD_CTX; quality: that leave min_ctx
    ctx, batch the variant that carries most of it, the best weights among equals
    """
    limits = limits or Limits()
    if min_ctx is not None:
        limits = replace(limits, min_ctx=min_ctx)
    search = _Search(card, headroom_bytes, engine, limits, gpu, learned, projector_bytes)
    ordered = sorted(variants, key=lambda meta: -meta.bits)
    if not ordered:
        raise ValueError("no variant to choose from")
    plans = [search.plan(meta) for meta in ordered]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting and gpu and limits.gpu_layers is None:
        plans = [search.offload(meta) for meta in ordered]
        fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return plans[-1]
    if prefer == "ctx":
        return max(fitting, key=lambda plan: plan.knobs.ctx_tokens)
    if prefer == "batch":
        return max(fitting, key=lambda plan: plan.knobs.batch)
    if prefer == "balanced":
        wanted = min(limits.ctx_tokens or DEFAULT_CTX, GOOD_CTX)
        good = [p for p in fitting if p.knobs.ctx_tokens >= min(wanted, p.meta.n_ctx_train or wanted)]
        return (good or fitting)[0]
    return fitting[0]


def max_ctx_of(
    meta: ModelMeta, usable: int, batch: int, limits: Limits | None = None, *, gpu: bool = False
) -> int:
    """The largest context that `batch` sequences may all fill at once; 0 where none fits."""
    limits = limits or Limits()
    most = meta.n_ctx_train or MOST_CTX

    def fits(ctx: int) -> bool:
        return _full(meta, batch, ctx, limits, gpu) <= usable

    steps = STEP * _largest(lambda n: fits(n * STEP), most // STEP)
    # a training context that is no whole number of steps is still reached
    return most if most % STEP and steps == most - most % STEP and fits(most) else steps


def max_batch_of(
    meta: ModelMeta, usable: int, ctx_tokens: int, limits: Limits | None = None, *, gpu: bool = False
) -> int:
    """The most sequences that may all fill `ctx_tokens` at once; 0 where not even one may."""
    limits = limits or Limits()
    return _largest(lambda n: _full(meta, n, ctx_tokens, limits, gpu) <= usable, MOST_BATCH)


def _full(meta: ModelMeta, batch: int, ctx_tokens: int, limits: Limits, gpu: bool) -> int:
    """Bytes on the card when every sequence has a context of its own."""
    knobs = Knobs(
        batch=batch,
        ctx_tokens=ctx_tokens,
        pool_tokens=ctx_tokens * batch,
        pool_kind=limits.pool_kind,
        quant=meta.variant(),
        kv_type=limits.kv_type,
        gpu_layers=-1 if limits.gpu_layers is None else limits.gpu_layers,
        prefill_tokens=limits.prefill_tokens or PREFILL_TOKENS[engine_of(meta)],
    )
    return predict(meta, knobs, gpu=gpu).total_bytes


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Bisect for the largest n in 1..most; 0 where none fits. `fits` must be monotone."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class _Search:
    """One card and one set of limits."""

    def __init__(
        self,
        card: CardReading | int,
        headroom_bytes: int,
        engine: EngineName | None,
        limits: Limits,
        gpu: bool,
        learned: Learned | None,
        projector_bytes: int,
    ) -> None:
        self.usable = usable_bytes(card, headroom_bytes)
        self.engine, self.limits, self.gpu = engine, limits, gpu
        self.learned, self.projector_bytes = learned, projector_bytes

    def accounts(self, meta: ModelMeta, knobs: Knobs) -> Accounts:
        return predict(
            meta,
            knobs,
            self.engine,
            self.learned,
            gpu=self.gpu,
            projector_bytes=self.projector_bytes,
        )

    def fits(self, meta: ModelMeta, knobs: Knobs) -> bool:
        return self.accounts(meta, knobs).total_bytes <= self.usable

    def plan(self, meta: ModelMeta, gpu_layers: int | None = None) -> Plan:
        """The first configuration on the way down that fits, its pool and caches grown into what is left."""
        knobs = None
        for knobs in self.candidates(meta, gpu_layers):
            if self.fits(meta, knobs):
                return self.answer(meta, self.grown(meta, knobs))
        assert knobs is not None
        return self.answer(meta, knobs)

    def offload(self, meta: ModelMeta) -> Plan:
        """As many layers on the card as fit with the smallest configuration."""
        *_, smallest = self.candidates(meta, 0)
        layers = _largest(lambda n: self.fits(meta, replace(smallest, gpu_layers=n)), meta.n_layer + 1)
        return self.plan(meta, layers)

    def candidates(self, meta: ModelMeta, gpu_layers: int | None) -> Iterator[Knobs]:
        """Configurations from the wish downwards, one variable a step.

        1. pool  2. ctx to GOOD_CTX  3. micro-batch, while it still prefills well: in a shared pool fewer
        sequences free little  4. batch  5. micro-batch to its least  6. ctx to min_ctx
        """
        limits = self.limits
        wish = limits.ctx_tokens or DEFAULT_CTX
        ctx = max(min(wish, meta.n_ctx_train or wish), 1)
        layers = limits.gpu_layers if gpu_layers is None else gpu_layers
        engine = self.engine or engine_of(meta)
        batch = limits.batch or (1 if meta.is_embedding else DEFAULT_BATCH[engine])
        knobs = Knobs(
            batch=batch,
            ctx_tokens=ctx,
            pool_tokens=ctx * batch,
            pool_kind=limits.pool_kind,
            quant=meta.variant(),
            kv_type=limits.kv_type,
            gpu_layers=-1 if layers is None else layers,
            prefill_tokens=limits.prefill_tokens or PREFILL_TOKENS[engine],
        )
        yield knobs
        if limits.pool_kind is PoolKind.UNIFIED and batch > 1:
            knobs = replace(knobs, pool_tokens=ctx)
            yield knobs
        if limits.exact:
            return
        floor = min(limits.min_ctx, ctx)
        steps = (
            _ctx_to(max(floor, GOOD_CTX)),
            _prefill_to(GOOD_PREFILL_TOKENS),
            _batch_to(limits.min_batch),
            _prefill_to(LEAST_PREFILL_TOKENS),
            _ctx_to(floor),
        )
        for step in steps:
            while (smaller := step(knobs)) is not None:
                knobs = smaller
                yield knobs

    def grown(self, meta: ModelMeta, knobs: Knobs) -> Knobs:
        """Give what is left first to the shared pool, then half of the rest to the host's prompt cache."""
        if knobs.pool_kind is PoolKind.UNIFIED:
            tokens = _largest(
                lambda n: self.fits(meta, replace(knobs, pool_tokens=max(n * STEP, knobs.ctx_tokens))),
                knobs.ctx_tokens * knobs.batch // STEP,
            )
            knobs = replace(knobs, pool_tokens=max(tokens * STEP, knobs.ctx_tokens))
        if not self.gpu and (self.engine or engine_of(meta)) == "llama.cpp":
            left = self.usable - self.accounts(meta, knobs).total_bytes
            knobs = replace(knobs, host_cache_bytes=min(left // 2, HOST_CACHE_MAX_BYTES))
        return knobs

    def answer(self, meta: ModelMeta, knobs: Knobs) -> Plan:
        plan = Plan(
            meta=meta,
            knobs=knobs,
            accounts=Accounts(entries=()),
            usable_bytes=self.usable,
            verdict="fits",
        )
        return judged(plan, self.accounts(meta, knobs))


def judged(plan: Plan, accounts: Accounts) -> Plan:
    """The same plan with these accounts, and what follows from them."""
    verdict = judge(accounts, plan.usable_bytes)
    reason, remedy = explain(accounts, plan.usable_bytes, verdict)
    return replace(plan, accounts=accounts, verdict=verdict, reason=reason, remedy=remedy)


_Step = Callable[[Knobs], Knobs | None]


def _ctx_to(floor: int) -> _Step:
    """Halve the context, and the pool to one such context, not below `floor`."""

    def step(knobs: Knobs) -> Knobs | None:
        ctx = max(knobs.ctx_tokens // 2, floor)
        if ctx >= knobs.ctx_tokens:
            return None
        pool = ctx if knobs.pool_kind is PoolKind.UNIFIED else ctx * knobs.batch
        return replace(knobs, ctx_tokens=ctx, pool_tokens=pool)

    return step


def _batch_to(floor: int) -> _Step:
    def step(knobs: Knobs) -> Knobs | None:
        batch = max(knobs.batch // 2, floor, 1)
        if batch >= knobs.batch:
            return None
        pool = knobs.pool_tokens if knobs.pool_kind is PoolKind.UNIFIED else knobs.ctx_tokens * batch
        return replace(knobs, batch=batch, pool_tokens=pool)

    return step


def _prefill_to(floor: int) -> _Step:
    def step(knobs: Knobs) -> Knobs | None:
        smaller = knobs.prefill_tokens // 2
        return replace(knobs, prefill_tokens=smaller) if smaller >= floor else None

    return step


def explain(accounts: Accounts, usable: int, verdict: Fit) -> tuple[str, str]:
    """Say in words why it does not fit, and the next thing to change; empty where it fits.

    A smaller context is never offered as the cure for weights.
    """
    if verdict == "fits":
        return "", ""
    gib = 1 / GIB
    weights, kv, overhead = accounts.weights_bytes, accounts.kv_bytes, accounts.overhead_bytes
    have = f"{usable * gib:.2f} GiB usable"
    if verdict == "weights do not fit":
        return (
            f"weights of {weights * gib:.2f} GiB against {have}",
            "a smaller quantisation, fewer layers on the card, or a larger card; not a smaller context",
        )
    if verdict == "kv cache insufficient":
        return (
            f"weights {weights * gib:.2f} + KV {kv * gib:.2f} GiB against {have}",
            "a smaller context or batch, a quantised KV cache, or a smaller quantisation",
        )
    return (
        f"weights {weights * gib:.2f} + KV {kv * gib:.2f} + overhead {overhead * gib:.2f} GiB against {have}",
        "a smaller micro-batch or prompt cache, or a smaller context",
    )
