"""The ladder's steps as exact tables, and what holds for every walk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.domain import (
    MEMORY_CAUSES,
    MIB,
    Cause,
    Exhausted,
    Failure,
    Knobs,
    PoolKind,
    Rung,
    Stage,
    Step,
    Variant,
)
from kvguard.remedies import TABLE, route
from kvguard_adapters.backends import steps
from kvguard_adapters.backends.options import Options
from kvguard_policies.degradation.climbing import FIRST_WAIT_S, LONGEST_WAIT_S, CoolDown, climb
from kvguard_policies.degradation.ladder import PRESETS, DegradationLadder, parse_order
from kvguard_policies.degradation.words import COST

Q8, Q5, Q4, Q2 = (
    Variant(kind="gguf", source=f"m-q{bits}.gguf", bits=bits, label=f"Q{bits}", size_bytes=bits * 100 * MIB)
    for bits in (8, 5, 4, 2)
)
VARIANTS = (Q8, Q5, Q4, Q2)
DEFAULT = PRESETS["default"]
MIN_CTX = 2048


def knobs(batch: int = 4, ctx: int = 8192, quant: Variant = Q8, layers: int = 16, **more: object) -> Knobs:
    return replace(
        Knobs(
            batch=batch,
            ctx_tokens=ctx,
            pool_tokens=batch * ctx,
            pool_kind=PoolKind.UNIFIED,
            quant=quant,
            gpu_layers=layers,
        ),
        **more,  # type: ignore[arg-type]
    )


def failure(cause: Cause = Cause.KV_DONT_FIT, stage: Stage = Stage.LOAD, fits: int | None = None) -> Failure:
    return Failure(stage=stage, causes=(cause,), confidence=0.9, evidence=(), fits_ctx_tokens=fits)


ENGINE = Options(variants=VARIANTS, layers=40, min_ctx=MIN_CTX)


def next_steps(now: Knobs, rung: Rung) -> Sequence[Knobs]:
    """What the adapters of the real engines offer."""
    return steps.next_steps(now, rung, ENGINE, frozenset())


def options(now: Knobs) -> dict[Rung, Sequence[Knobs]]:
    return {rung: next_steps(now, rung) for rung in Rung}


def card_bytes(k: Knobs) -> int:
    """A card's accounts: weights by layer, 0.05 MiB of KV a pool token, a compute buffer by micro-batch."""
    return k.quant.size_bytes * k.gpu_layers // 16 + k.pool_tokens * MIB // 20 + k.prefill_tokens * MIB // 8


def priced(now: Knobs, need_mib: int) -> dict[str, object]:
    return {"need_bytes": need_mib * MIB, "frees": lambda k: card_bytes(now) - card_bytes(k)}


def changed(was: Knobs, now: Knobs) -> set[str]:
    return {f.name for f in fields(Knobs) if getattr(was, f.name) != getattr(now, f.name)}


OF_RUNG = {
    Rung.BATCH: [{"batch"}, {"prefill_tokens"}],
    Rung.CTX: [{"ctx_tokens"}],
    Rung.QUANT: [{"quant"}],
    Rung.GPU_LAYERS: [{"gpu_layers"}],
}


def walk(ladder: DegradationLadder, now: Knobs, cause: Cause, stage: Stage = Stage.LOAD) -> list[str]:
    """Fail at every configuration until the ladder ends; each step in words."""
    trail: list[str] = []
    refuted: list[Knobs] = []
    while True:
        refuted.append(now)
        step = ladder.next(failure(cause, stage), now, options(now), refuted)
        if isinstance(step, Exhausted):
            return trail
        trail.append(step.reason.split(":")[0])
        now = step.knobs


# ---------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("default", DEFAULT),
        ("keep-concurrency", (Rung.QUANT, Rung.CTX, Rung.BATCH)),
        ("single-user", (Rung.CTX, Rung.QUANT, Rung.GPU_LAYERS)),
        ("quant,ctx,batch", (Rung.QUANT, Rung.CTX, Rung.BATCH)),
        (" gpu_layers , batch", (Rung.GPU_LAYERS, Rung.BATCH)),
        ("ctx", (Rung.CTX,)),
    ],
)
def test_an_order_is_a_preset_or_any_rungs(text: str, order: tuple[Rung, ...]) -> None:
    assert parse_order(text) == order


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch,context", "'context' is no rung; give any of batch, ctx, quant, gpu_layers"),
        ("", "'' is no rung"),
        ("batch,", "'' is no rung"),
        ("batch,ctx,batch", "names a rung twice"),
        ("Default", "or a preset: default, keep-concurrency, single-user"),
    ],
)
def test_a_wrong_order_is_told_with_the_right_names(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="degradation order") as raised:
        parse_order(text)
    assert says in str(raised.value)


# ---------------------------------------------------------------- the table stage x cause


def test_every_memory_cause_has_a_route_at_every_stage_and_no_other_cause_has_one() -> None:
    assert set(TABLE) == {(stage, cause) for stage in Stage for cause in Cause}
    for (_, cause), found in TABLE.items():
        assert found.changes_something == (cause in MEMORY_CAUSES)


ANY = set(Rung)
WEIGHTS = {Rung.QUANT, Rung.GPU_LAYERS}
HOST = {Rung.BATCH, Rung.CTX, Rung.QUANT}


@pytest.mark.parametrize(
    ("cause", "load", "warmup", "inference", "idle"),
    [
        (Cause.WEIGHTS_DONT_FIT, WEIGHTS, WEIGHTS, ANY, ANY),
        (Cause.KV_DONT_FIT, ANY, ANY, ANY, ANY),
        (Cause.ACTIVATION_PEAK, ANY, ANY, ANY, ANY),
        (Cause.HOST_RAM_OOM_KILLED, HOST, HOST, HOST, HOST),
        (Cause.SHARED_MEMORY_SPILL, ANY, ANY, ANY, ANY),
        (Cause.MEMORY_HELD_BY_OTHERS, None, None, None, None),
        (Cause.QUANT_FORMAT_MISMATCH, None, None, None, None),
        (Cause.DEPENDENCY_VERSION_MISMATCH, None, None, None, None),
        (Cause.CORRUPT_MODEL, None, None, None, None),
        (Cause.MISSING_FILE, None, None, None, None),
        (Cause.PORT_IN_USE, None, None, None, None),
        (Cause.DRIVER_ERROR, None, None, None, None),
        (Cause.REQUEST_TOO_LONG, None, None, None, None),
        (Cause.BENIGN, None, None, None, None),
        (Cause.UNKNOWN, None, None, None, None),
    ],
)
def test_route_of_each_stage_and_cause(
    cause: Cause,
    load: set[Rung] | None,
    warmup: set[Rung] | None,
    inference: set[Rung] | None,
    idle: set[Rung] | None,
) -> None:
    ways = [route(stage, cause) for stage in (Stage.LOAD, Stage.WARMUP, Stage.INFERENCE, Stage.IDLE)]
    assert [set(way.rungs) or None for way in ways] == [load, warmup, inference, idle]


@pytest.mark.parametrize("cause", sorted(set(Cause) - MEMORY_CAUSES))
def test_a_failure_that_is_not_of_memory_takes_no_step_even_when_strict(cause: Cause) -> None:
    now = knobs()
    for strict in (False, True):
        end = DegradationLadder(strict=strict).next(failure(cause), now, options(now), [])
        assert isinstance(end, Exhausted)
        assert "nothing is changed" in end.reason


# ---------------------------------------------------------------- walks without accounts


def test_the_default_order_walks_every_rung_one_variable_a_step() -> None:
    ladder = DegradationLadder()
    assert walk(ladder, knobs(batch=4, ctx=8192, layers=2), Cause.KV_DONT_FIT) == [
        "batch 4 -> 2",
        "batch 2 -> 1",
        "prefill_tokens 512 -> 256",
        "prefill_tokens 256 -> 128",
        "prefill_tokens 128 -> 64",
        "prefill_tokens 64 -> 32",
        "ctx_tokens 8192 -> 4096",
        "ctx_tokens 4096 -> 2048",
        "quant Q8 -> Q5",
        "quant Q5 -> Q4",
        "quant Q4 -> Q2",
        "gpu_layers 2 -> 1",
        "gpu_layers 1 -> 0",
    ]


@pytest.mark.parametrize(
    ("order", "trail"),
    [
        ("keep-concurrency", ["quant Q4 -> Q2", "ctx_tokens 4096 -> 2048", "batch 2 -> 1"]),
        ("single-user", ["ctx_tokens 4096 -> 2048", "quant Q4 -> Q2", "gpu_layers 1 -> 0"]),
        ("gpu_layers,batch", ["gpu_layers 1 -> 0", "batch 2 -> 1"]),
    ],
)
def test_another_order_gives_up_its_own_rungs_in_its_own_order(order: str, trail: list[str]) -> None:
    now = knobs(batch=2, ctx=4096, quant=Q4, layers=1, prefill_tokens=32)
    assert walk(DegradationLadder(parse_order(order)), now, Cause.KV_DONT_FIT) == trail


def test_weights_that_do_not_fit_pass_batch_and_ctx_over_and_say_why() -> None:
    now = knobs(batch=4)
    step = DegradationLadder().next(failure(Cause.WEIGHTS_DONT_FIT), now, options(now), [])
    assert isinstance(step, Step)
    assert step.knobs == replace(now, quant=Q5)
    assert step.cost == "output quality: rerun your regression checks"
    assert [(s.rung, s.reason) for s in step.skipped] == [
        (Rung.BATCH, "the weights alone do not fit, so less KV cannot cure it"),
        (Rung.CTX, "the weights alone do not fit, so less KV cannot cure it"),
    ]


def test_strict_walks_the_rungs_that_the_cause_rules_out_too() -> None:
    now = knobs(batch=2, ctx=4096, quant=Q4, layers=1, prefill_tokens=32)
    assert walk(DegradationLadder(strict=True), now, Cause.WEIGHTS_DONT_FIT) == [
        "batch 2 -> 1",
        "ctx_tokens 4096 -> 2048",
        "quant Q4 -> Q2",
        "gpu_layers 1 -> 0",
    ]


def test_host_memory_is_not_cured_by_layers_that_leave_the_card() -> None:
    now = knobs(batch=1, ctx=2048, quant=Q2, layers=4, prefill_tokens=32)
    end = DegradationLadder().next(failure(Cause.HOST_RAM_OOM_KILLED), now, options(now), [])
    assert isinstance(end, Exhausted)
    assert end.skipped[-1].rung is Rung.GPU_LAYERS
    assert "smaller model" in end.reason


def test_a_card_made_of_host_memory_is_cured_by_layers_when_the_accounts_say_so() -> None:
    now = knobs(batch=1, ctx=2048, quant=Q2, layers=4, prefill_tokens=32)
    step = DegradationLadder().next(
        failure(Cause.HOST_RAM_OOM_KILLED), now, options(now), [], **priced(now, 20)
    )
    assert isinstance(step, Step)
    assert step.knobs.gpu_layers == 2  # 200 MiB of Q2 over 16 layers: 12.5 a layer


def test_what_the_user_holds_is_never_given_up() -> None:
    now = knobs(batch=4, ctx=8192, layers=1, prefill_tokens=32)
    ladder = DegradationLadder(never=frozenset({Rung.QUANT}), min_ctx_tokens=4096, min_batch=2)
    assert walk(ladder, now, Cause.KV_DONT_FIT) == [
        "batch 4 -> 2",
        "ctx_tokens 8192 -> 4096",
        "gpu_layers 1 -> 0",
    ]


def test_a_refuted_configuration_is_jumped_over() -> None:
    now = knobs(batch=8)
    half = next_steps(now, Rung.BATCH)[0]
    step = DegradationLadder().next(failure(), now, options(now), [half])
    assert isinstance(step, Step)
    assert step.knobs.batch == 2


def test_a_step_of_two_variables_is_taken_only_where_all_of_one_are_refuted() -> None:
    now = knobs(batch=2)
    both = [replace(now, batch=1, pool_tokens=8192, prefill_tokens=p) for p in (256, 128)]
    single = replace(now, prefill_tokens=128)
    offered = {Rung.BATCH: [*both, single]}
    for strict in (False, True):
        ladder = DegradationLadder((Rung.BATCH,), strict=strict)
        step = ladder.next(failure(), now, offered, [])
        assert isinstance(step, Step)
        assert step.knobs == single
        step = ladder.next(failure(), now, offered, [single, both[0]])
        assert isinstance(step, Step)
        assert step.knobs == both[1]


# ---------------------------------------------------------------- steps by the accounts


@pytest.mark.parametrize(
    ("need_mib", "change", "skipped"),
    [
        # batch 8 -> 4 -> 2 -> 1 frees 1638, 2458, 2867 MiB; ctx 8192 -> 4096 -> 2048 frees 1638, 2458
        (1000, "batch 8 -> 4", []),
        (2000, "batch 8 -> 2", []),
        (2458, "batch 8 -> 1", []),
        (4000, "batch 8 -> 1", []),  # with ctx it is enough
        (5400, "quant Q8 -> Q5", [Rung.BATCH, Rung.CTX]),  # 5325 of KV and 300 of weights
        (5700, "quant Q8 -> Q4", [Rung.BATCH, Rung.CTX]),  # 400 of weights
        (9999, "quant Q8 -> Q2", [Rung.BATCH, Rung.CTX]),  # nothing is enough: the furthest
    ],
)
def test_the_nearest_configuration_that_frees_what_is_missing(
    need_mib: int, change: str, skipped: list[Rung]
) -> None:
    now = knobs(batch=8, ctx=8192, prefill_tokens=32)
    step = DegradationLadder().next(failure(), now, options(now), [], **priced(now, need_mib))
    assert isinstance(step, Step)
    assert step.reason.split(":")[0] == change
    assert f"of {need_mib:,} MiB missing" in step.reason
    assert [skip.rung for skip in step.skipped] == skipped


def test_a_skip_by_the_accounts_carries_its_sum() -> None:
    now = knobs(batch=2, ctx=2048, prefill_tokens=32)
    step = DegradationLadder().next(failure(), now, options(now), [], **priced(now, 300))
    assert isinstance(step, Step)
    assert step.reason == "quant Q8 -> Q5: frees 300 MiB of 300 MiB missing"
    assert {skip.rung: skip.reason for skip in step.skipped}[Rung.BATCH] == (
        "300 MiB are missing, batch and ctx together free 102 MiB: only less weight on the card can cure it"
    )


def test_layers_leave_by_what_the_accounts_say_is_missing() -> None:
    now = knobs(batch=1, ctx=2048, quant=Q2, layers=16, prefill_tokens=32)  # 12.5 MiB a layer
    for need_mib, layers in ((1, 15), (30, 13), (200, 0), (999, 0)):
        step = DegradationLadder().next(failure(), now, options(now), [], **priced(now, need_mib))
        assert isinstance(step, Step)
        assert (step.rung, step.knobs.gpu_layers) == (Rung.GPU_LAYERS, layers)


def test_kv_rungs_are_walked_when_nothing_else_is_left_even_if_they_free_too_little() -> None:
    now = knobs(batch=2, ctx=2048, quant=Q2, layers=0, prefill_tokens=32)
    step = DegradationLadder().next(failure(), now, options(now), [], **priced(now, 5000))
    assert isinstance(step, Step)
    assert step.knobs.batch == 1


def test_a_rung_that_frees_nothing_on_this_card_is_passed_over() -> None:
    now = knobs(batch=2)
    step = DegradationLadder().next(
        failure(), now, options(now), [], frees=lambda k: 0 if k.quant == now.quant else 5 * MIB
    )
    assert isinstance(step, Step)
    assert step.rung is Rung.QUANT
    assert step.skipped[0].reason == "frees nothing on the card that ran out (0 MiB at best)"


def test_what_the_engine_names_is_gone_to_at_once() -> None:
    now = knobs(batch=8, ctx=32768)
    step = DegradationLadder().next(failure(fits=11_000), now, options(now), [])
    assert isinstance(step, Step)
    assert step.knobs == replace(now, ctx_tokens=10_880, pool_tokens=10_880)
    assert step.reason == "ctx_tokens 32768 -> 10880: the engine names this context as what fits"


@pytest.mark.parametrize(
    "ladder",
    [
        DegradationLadder(strict=True),
        DegradationLadder(min_ctx_tokens=16_384),
        DegradationLadder(never=frozenset({Rung.CTX})),
        DegradationLadder((Rung.BATCH, Rung.QUANT)),
    ],
)
def test_what_the_engine_names_does_not_break_the_users_limits(ladder: DegradationLadder) -> None:
    now = knobs(batch=8, ctx=32768)
    step = ladder.next(failure(fits=11_000), now, options(now), [])
    assert isinstance(step, Step)
    assert step.rung is Rung.BATCH


def test_a_named_context_that_is_not_smaller_or_is_refuted_is_not_taken() -> None:
    now = knobs(batch=8, ctx=8192)
    jump = replace(now, ctx_tokens=4096, pool_tokens=4096)
    for fits, refuted in ((8192, []), (100_000, []), (50, []), (4096, [jump])):
        step = DegradationLadder().next(failure(fits=fits), now, options(now), refuted)
        assert isinstance(step, Step)
        assert step.rung is Rung.BATCH


# ---------------------------------------------------------------- every walk

some_knobs = st.builds(
    knobs,
    batch=st.sampled_from([1, 2, 3, 8, 64]),
    ctx=st.sampled_from([2048, 3000, 8192, 131_072]),
    quant=st.sampled_from(VARIANTS),
    layers=st.integers(0, 40),
)


@settings(max_examples=150, deadline=None)
@given(
    start=some_knobs,
    order=st.permutations(list(Rung)).flatmap(lambda r: st.integers(1, 4).map(lambda n: tuple(r[:n]))),
    causes=st.lists(st.sampled_from(sorted(MEMORY_CAUSES)), min_size=1, max_size=5),
    stage=st.sampled_from(list(Stage)),
    strict=st.booleans(),
    needs_mib=st.lists(st.none() | st.integers(0, 9000), min_size=1, max_size=5),
    named=st.none() | st.integers(1, 200_000),
    refuted_before=st.lists(some_knobs, max_size=3),
)
def test_every_walk_ends_changes_one_variable_a_step_never_grows_never_repeats(
    start: Knobs,
    order: tuple[Rung, ...],
    causes: list[Cause],
    stage: Stage,
    strict: bool,
    needs_mib: list[int | None],
    named: int | None,
    refuted_before: list[Knobs],
) -> None:
    ladder = DegradationLadder(order, strict=strict)
    now, refuted = start, [*refuted_before, start]
    for step_no in range(200):
        need_mib = needs_mib[step_no % len(needs_mib)]
        accounts = {} if need_mib is None else priced(now, need_mib)
        fault = failure(causes[step_no % len(causes)], stage, named)
        step = ladder.next(fault, now, options(now), refuted, **accounts)
        if isinstance(step, Exhausted):
            return
        assert step.rung in order
        assert changed(now, step.knobs) - {"pool_tokens"} in OF_RUNG[step.rung]
        assert step.knobs.batch <= now.batch
        assert step.knobs.ctx_tokens <= now.ctx_tokens
        assert step.knobs.pool_tokens <= now.pool_tokens
        assert step.knobs.prefill_tokens <= now.prefill_tokens
        assert step.knobs.quant.bits <= now.quant.bits
        assert step.knobs.gpu_layers <= now.gpu_layers
        assert step.knobs not in refuted
        now = step.knobs
        refuted.append(now)
    pytest.fail("the walk did not end")


# ---------------------------------------------------------------- back up


def under(limit_mib: int):  # type: ignore[no-untyped-def]
    return lambda k: card_bytes(k) <= limit_mib * MIB


def test_a_smaller_quant_affords_again_what_was_sacrificed_before_it() -> None:
    """By the accounts, not above what was wanted; the larger quant stays refuted."""
    wanted = replace(knobs(batch=8, ctx=8192, quant=Q8), pool_tokens=40_000)  # 800 + 3277 + 64 MiB
    start = replace(knobs(batch=1, ctx=2048, quant=Q4), pool_tokens=2048)  # 400 + 102 + 64
    for order, limit_mib, ends in (
        ("batch,ctx,quant", 1000, (8192, 1, 8192)),
        ("quant,ctx,batch", 1000, (2048, 4, 8192)),
        ("batch,ctx,quant", 2200, (8192, 4, 32_768)),
        ("batch,ctx,quant", 500, (2048, 1, 2048)),
    ):
        now, fits = start, under(limit_mib)
        while step := climb(
            parse_order(order), wanted, now, lambda k, fits=fits: k.quant == Q4 and fits(k), [],
            cool_down=CoolDown(), now_s=0,
        ):  # fmt: skip
            now = step.knobs
        assert (now.ctx_tokens, now.batch, now.pool_tokens) == ends


def test_the_climb_goes_back_one_variable_at_a_time_the_last_sacrificed_first() -> None:
    wanted = knobs(batch=4, ctx=4096, quant=Q8, layers=-1)
    now = knobs(batch=1, ctx=2048, quant=Q2, layers=3, prefill_tokens=128)
    trail = []
    while step := climb(
        DEFAULT, wanted, now, lambda _: True, [], cool_down=CoolDown(), now_s=0, variants=VARIANTS
    ):
        trail.append(step.reason.split(":")[0])
        now = step.knobs
    assert trail == [
        "gpu_layers 3 -> -1",
        "quant Q2 -> Q8",
        "ctx_tokens 2048 -> 4096",
        "batch 1 -> 4",
        "prefill_tokens 128 -> 512",
    ]
    assert now == wanted


def test_a_climb_takes_what_fits_and_names_what_does_not() -> None:
    wanted, now = knobs(batch=4, quant=Q8), knobs(batch=1, quant=Q2)
    back = {"cool_down": CoolDown(), "now_s": 0, "variants": VARIANTS}
    step = climb(DEFAULT, wanted, now, lambda k: k.quant.bits <= 5, [], **back)  # type: ignore[arg-type]
    assert step is not None
    assert step.knobs.quant == Q5
    step = climb(DEFAULT, wanted, now, lambda k: k.quant == Q2, [], **back)  # type: ignore[arg-type]
    assert step is not None
    assert step.knobs.batch == 4
    assert [skip.rung for skip in step.skipped] == [Rung.QUANT]
    fewer = replace(now, gpu_layers=10)
    step = climb(DEFAULT, wanted, fewer, lambda k: k.gpu_layers <= 14, [], **back)  # type: ignore[arg-type]
    assert step is not None
    assert step.knobs.gpu_layers == 14


def test_a_climb_never_takes_what_is_refuted() -> None:
    wanted, now = knobs(batch=4, ctx=2048), knobs(batch=1, ctx=2048)
    step = climb(DEFAULT, wanted, now, lambda _: True, [wanted], cool_down=CoolDown(), now_s=0)
    assert step is not None
    assert step.knobs.batch == 2


def test_the_cool_down_doubles_after_each_fall_and_starts_anew_after_a_day_without_one() -> None:
    wanted, now = knobs(batch=2), knobs(batch=1)
    cool = CoolDown()
    waits = []
    for _ in range(12):
        cool = cool.fell(1000.0)
        waits.append(cool.until_s - 1000.0)
    assert waits[:4] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S, 8 * FIRST_WAIT_S]
    assert waits[-1] == LONGEST_WAIT_S
    once = CoolDown().fell(1000.0)
    early, late = 1000.0 + FIRST_WAIT_S - 1, 1000.0 + FIRST_WAIT_S
    assert climb(DEFAULT, wanted, now, lambda _: True, [], cool_down=once, now_s=early) is None
    assert climb(DEFAULT, wanted, now, lambda _: True, [], cool_down=once, now_s=late) is not None
    day_later_s = cool.until_s + LONGEST_WAIT_S
    assert cool.fell(day_later_s).until_s == day_later_s + FIRST_WAIT_S


@settings(max_examples=100, deadline=None)
@given(wanted=some_knobs, now=some_knobs, limit_mib=st.integers(0, 20_000))
def test_a_climb_changes_one_variable_fits_and_stays_between_now_and_what_was_wanted(
    wanted: Knobs, now: Knobs, limit_mib: int
) -> None:
    for _ in range(64):
        step = climb(DEFAULT, wanted, now, under(limit_mib), [], cool_down=CoolDown(), now_s=0)
        if step is None:
            return
        assert len(changed(now, step.knobs) - {"pool_tokens"}) == 1
        assert now.batch <= step.knobs.batch <= max(now.batch, wanted.batch)
        assert now.ctx_tokens <= step.knobs.ctx_tokens <= max(now.ctx_tokens, wanted.ctx_tokens)
        assert card_bytes(step.knobs) <= limit_mib * MIB
        now = step.knobs
    pytest.fail("the climb did not end")


# ---------------------------------------------------------------- the document


def test_the_document_says_what_the_code_does() -> None:
    text = (Path(__file__).parent.parent / "docs" / "degradation.md").read_text()
    for name, order in PRESETS.items():
        assert f"| `{name}` | `{','.join(order)}` |" in text
    for rung, cost in COST.items():
        assert re.search(rf"^\| `{rung}` \|.*\| {re.escape(cost)} \|$", text, re.MULTILINE)
    for cause in MEMORY_CAUSES:
        early, late = (
            {", ".join(rung for rung in DEFAULT if rung in TABLE[stage, cause].rungs) for stage in stages}
            for stages in ((Stage.LOAD, Stage.WARMUP), (Stage.INFERENCE, Stage.IDLE))
        )
        assert f"| `{cause}` | {early.pop()} | {late.pop()} |" in text
        assert not early
        assert not late
    for cause in set(Cause) - MEMORY_CAUSES - {Cause.BENIGN}:
        assert f"`{cause}`" in text
