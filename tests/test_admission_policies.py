"""Prices, the books that all policies share, and the plain policies: exact numbers and invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.domain import Capacity, Decision, Demand, Ending, PoolKind, Verdict, Work
from kvguard_policies.admission import make_policy
from kvguard_policies.admission.pricing import Price, price
from kvguard_policies.admission.reserve import Reserve

LLAMA = Capacity(pool_tokens=4096, ctx_tokens=2048, sequences=4)
VLLM = Capacity(pool_tokens=4096, ctx_tokens=2048, sequences=4, block_tokens=16, overflow="preempts")


def demand(prompt: int = 100, new: int | None = 100, **options: object) -> Demand:
    return Demand(prompt_tokens=prompt, max_new_tokens=new, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capacity", "asked", "tokens"),
    [
        (LLAMA, demand(100, 100), 200),
        (VLLM, demand(100, 100), 208),
        (VLLM, demand(100, 100, sequences=3), 624),
        (LLAMA, demand(100, None), 2048),
        (LLAMA, demand(2000, 500), 2048),  # it stops at the end of the context
        (LLAMA, demand(2047, 1), 2048),
        (LLAMA, demand(2048, 0, work=Work.PREFILL_ONLY), 2048),
        (VLLM, demand(2000, 48), 2048),
        (VLLM, demand(100, 100, sequences=9), 832),  # the engine keeps five of them waiting inside
        (VLLM, demand(1000, None, sequences=4), 4096),  # alone it is worked off, one after the other
    ],
)
def test_a_price_is_the_most_that_a_request_may_hold(capacity: Capacity, asked: Demand, tokens: int) -> None:
    priced = price(asked, capacity)
    assert isinstance(priced, Price)
    assert priced.tokens == tokens


@pytest.mark.parametrize(
    ("capacity", "asked", "reason", "named"),
    [
        (LLAMA, demand(2048, 1), "context_too_short", ["2048", "2049"]),
        (VLLM, demand(2000, 49), "context_too_short", ["2048", "2049", "2000", "49"]),
        (LLAMA, demand(2049, 0, work=Work.PREFILL_ONLY), "context_too_short", ["2049"]),
        (LLAMA, demand(10, 10, sequences=5), "too_many_sequences", ["5", "4"]),
        (LLAMA, demand(1000, 1000, sequences=3), "pool_too_small", ["3", "2000", "4096", "365"]),
    ],
)
def test_what_never_fits_is_refused_with_the_numbers(
    capacity: Capacity, asked: Demand, reason: str, named: list[str]
) -> None:
    refused = price(asked, capacity)
    assert isinstance(refused, Decision)
    assert (refused.verdict, refused.reason) == (Verdict.REFUSE, reason)
    assert refused.code == "context_length_exceeded"
    assert all(number in refused.message for number in named)


def test_in_a_split_pool_only_sequences_bind() -> None:
    split = Capacity(pool_tokens=4096, ctx_tokens=2048, sequences=2, pool_kind=PoolKind.SPLIT)
    policy = Reserve()
    policy.resize(split)
    for lease_id in range(2):
        assert policy.decide(demand(1000, 1048)).verdict is Verdict.ADMIT
        policy.admit(lease_id, demand(1000, 1048), "")
    assert policy.decide(demand(1, 1)).reason == "slots_full"


def test_reserve_admits_up_to_the_last_token_of_the_pool() -> None:
    policy = Reserve()
    policy.resize(LLAMA)
    policy.admit(1, demand(1000, 1000), "")
    policy.admit(2, demand(1000, 1000), "")
    assert policy.decide(demand(48, 48)).verdict is Verdict.ADMIT
    full = policy.decide(demand(48, 49))
    assert (full.verdict, full.reason, full.peak_tokens) == (Verdict.WAIT, "pool_full", 4097)
    policy.progress(1, 900)
    assert policy.decide(demand(48, 49)).verdict is Verdict.WAIT, "what is left to come stays reserved"
    policy.release(1, Ending.FINISHED, 900)
    assert policy.decide(demand(48, 49)).verdict is Verdict.ADMIT


def test_an_exact_count_replaces_a_bound() -> None:
    policy = Reserve()
    policy.resize(LLAMA)
    policy.admit(1, demand(1900, 100, exact=False), "")
    policy.reprice(1, demand(400, 100))
    assert policy.report()["reserved_tokens"] == 500
    policy.reprice(7, demand(400, 100))
    policy.release(1, Ending.FINISHED, 10)
    policy.release(1, Ending.FINISHED, 10)
    assert policy.report()["reserved_tokens"] == 0


def test_backfill_lets_pass_what_ends_before_the_head_starts_or_fits_beside_it() -> None:
    policy = Reserve()
    policy.resize(LLAMA)
    policy.admit(1, demand(1000, 500), "")  # ends after 500 steps
    policy.admit(2, demand(1000, 1000), "")
    head = demand(1500, 400)  # 596 are free, 1900 needed: it starts when the first has ended
    assert policy.may_pass(head, demand(50, 499))
    assert not policy.may_pass(head, demand(50, 546)), "596 tokens, and only 196 are free beside the head"
    assert policy.may_pass(head, demand(50, 100))
    policy.progress(1, 450)
    policy.admit(3, demand(1, 1), "")
    assert not policy.may_pass(head, demand(150, 100)), "the head starts in 50 steps now"


def test_fixed_counts_requests_and_unlimited_nothing() -> None:
    fixed, unlimited = make_policy("fixed:2"), make_policy("unlimited")
    for policy in (fixed, unlimited):
        policy.resize(LLAMA)
        for lease_id in range(2):
            policy.admit(lease_id, demand(2000, 48), "")
    assert fixed.decide(demand(1, 1)).reason == "requests_full"
    assert fixed.decide(demand(3000, 1)).verdict is Verdict.REFUSE
    assert unlimited.decide(demand(3000, 1)).verdict is Verdict.ADMIT
    unlimited.admit(9, demand(3000, 1), "")
    unlimited.release(9, Ending.FAILED, 0)


@pytest.mark.parametrize("spec", ["greedy", "fixed", "fixed:0", "fixed:-3", "reserve:2", ""])
def test_an_unknown_policy_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match="admission"):
        make_policy(spec)


REQUESTS = st.builds(
    Demand,
    prompt_tokens=st.integers(0, 700),
    max_new_tokens=st.one_of(st.none(), st.integers(0, 700)),
    sequences=st.integers(1, 3),
    counted=st.booleans(),
)
CAPACITIES = st.builds(
    Capacity,
    pool_tokens=st.integers(1, 128).map(lambda blocks: 16 * blocks),
    ctx_tokens=st.integers(1, 600),
    sequences=st.integers(1, 6),
    block_tokens=st.sampled_from([1, 16]),
    overflow=st.sampled_from(["fails_all", "preempts"]),
)


@given(CAPACITIES, st.lists(REQUESTS, max_size=25), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_reserve_never_holds_more_than_the_pool_under_any_schedule(
    capacity: Capacity, requests: list[Demand], random: object
) -> None:
    policy = Reserve()
    policy.resize(capacity)
    running: dict[int, tuple[Price, int]] = {}
    for lease_id, asked in enumerate(requests):
        if policy.decide(asked).verdict is Verdict.ADMIT:
            policy.admit(lease_id, asked, "")
            priced = price(asked, capacity)
            assert isinstance(priced, Price)
            running[lease_id] = (priced, 0)
        for other in list(running):  # any of them may get any number of tokens, in any order
            priced, new = running[other]
            new = random.randint(new, priced.new_tokens)  # type: ignore[attr-defined]
            running[other] = (priced, new)
            policy.progress(other, new)
            if new == priced.new_tokens or random.random() < 0.2:  # type: ignore[attr-defined]
                policy.release(other, Ending.FINISHED, new)
                del running[other]
        held = sum(
            min(priced.tokens, priced.sequences * capacity.rounded(priced.prompt_tokens + new))
            for priced, new in running.values()
        )
        assert held <= capacity.pool_tokens
        assert sum(priced.sequences for priced, _ in running.values()) <= capacity.sequences
    for lease_id in list(running):
        policy.release(lease_id, Ending.CANCELLED, None)
    assert policy.report()["reserved_tokens"] == policy.report()["sequences"] == 0
