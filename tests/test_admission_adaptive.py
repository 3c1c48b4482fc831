"""The adaptive policy: what it learns, what it bounds, and how it reacts to what an engine says."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.domain import Capacity, Demand, Ending, EngineSample, Verdict
from kvguard_policies.admission.adaptive import Adaptive
from kvguard_policies.admission.book import Book, Entry, lockstep_peak, quantile
from kvguard_policies.admission.feedback import Feedback
from kvguard_policies.admission.survival import AHEAD, EDGES, MIN_EVENTS, Survival, bin_of, labels

VLLM = Capacity(pool_tokens=8192, ctx_tokens=4096, sequences=64, block_tokens=16, overflow="preempts")
LLAMA = Capacity(pool_tokens=8192, ctx_tokens=4096, sequences=64)
LABELS = labels("chat", 1024, "alice")


def demand(prompt: int = 100, new: int | None = 1024, **options: object) -> Demand:
    return Demand(prompt_tokens=prompt, max_new_tokens=new, **options)  # type: ignore[arg-type]


def taught(
    policy: Adaptive, lengths: list[int], *, new: int = 1024, ending: Ending = Ending.FINISHED
) -> Adaptive:
    """A policy that has seen these lengths, one after the other."""
    for i, length in enumerate(lengths):
        policy.admit(10_000 + i, demand(10, new), "alice")
        policy.progress(10_000 + i, length)
        policy.release(10_000 + i, ending, length)
    return policy


def policy_of(capacity: Capacity = VLLM, **options: float) -> Adaptive:
    policy = Adaptive(**options)
    policy.resize(capacity)
    return policy


def admitted(policy: Adaptive, asked: Demand, most: int = 1000) -> int:
    """How many of the same request are let in at once."""
    for lease_id in range(most):
        if policy.decide(asked, "alice").verdict is not Verdict.ADMIT:
            return lease_id
        policy.admit(lease_id, asked, "alice")
    return most


# ---------------------------------------------------------------- curves


@given(st.integers(0, (1 << 20) - 1))
def test_every_length_has_its_bin(tokens: int) -> None:
    at = bin_of(tokens)
    assert EDGES[at] <= tokens
    assert at + 1 == len(EDGES) or tokens < EDGES[at + 1]


def survival_at(survival: Survival, steps: int, *, so_far: int = 0) -> float:
    index = survival.index_for(LABELS)
    row = survival.rows[survival.row_of(index, so_far, 0)]
    return float(np.interp(steps, AHEAD, row))


def test_without_evidence_everything_runs_to_its_maximum() -> None:
    survival = Survival()
    survival.follow(LABELS)
    assert survival_at(survival, 100_000) == 1.0


def test_a_curve_follows_the_lengths_that_were_seen() -> None:
    survival, random = Survival(), Random(1)
    for _ in range(1000):
        survival.finished(survival.follow(LABELS), 1 + int(random.expovariate(1 / 200)))
    for steps in (50, 200, 600):
        exact = np.exp(-steps / 200)
        assert 0.95 * exact <= survival_at(survival, steps) <= 1.5 * exact
        assert 0.8 * exact <= survival_at(survival, steps, so_far=300) <= 2 * exact


def test_the_curve_errs_towards_long() -> None:
    few = Survival()
    for _ in range(MIN_EVENTS):
        few.finished(few.follow(LABELS), 100)
    assert survival_at(few, 50) == pytest.approx(1.0, abs=0.05)
    assert 0.005 < survival_at(few, 400) < 0.2, "beyond the longest it falls slowly"
    assert survival_at(few, 1600) == pytest.approx(survival_at(few, 800) / 2, rel=0.3)


def test_those_that_still_run_are_not_forgotten() -> None:
    """Nine in ten end at 10 tokens; the tenth runs on, and whoever looks at finished ones alone is misled."""
    survival = Survival()
    for i in range(500):
        follow = survival.follow(LABELS)
        if i % 10:
            survival.finished(follow, 10)
        else:
            survival.reached(follow, 900)
    assert survival_at(survival, 800) == pytest.approx(0.1, abs=0.05)
    assert survival_at(survival, 600, so_far=50) > 0.9


def test_cut_off_and_cancelled_ones_are_censored() -> None:
    for ending in (Ending.TRUNCATED, Ending.CANCELLED, Ending.FAILED):
        policy = taught(policy_of(), [500] * 200, ending=ending)
        assert survival_at(policy._survival, 3000) == 1.0


def test_a_class_with_enough_data_has_its_own_curve() -> None:
    survival = Survival()
    for _ in range(200):
        survival.finished(survival.follow(labels("chat", 1024, "short")), 10)
        survival.finished(survival.follow(labels("chat", 1024, "long")), 1000)
    short, long = (survival.index_for(labels("chat", 1024, key)) for key in ("short", "long"))
    other = survival.index_for(labels("chat", 1024, "new"))
    column = int(np.searchsorted(AHEAD, 100))
    chances = [float(survival.rows[survival.row_of(index, 0, 0), column]) for index in (short, other, long)]
    assert chances[0] < 0.1 < 0.4 < chances[1] < 0.7 < 0.95 < chances[2]


def test_tables_survive_a_restart() -> None:
    random = Random(3)
    before = taught(policy_of(), [1 + int(random.expovariate(1 / 100)) for _ in range(400)])
    after = policy_of()
    after.recall("".join(before.learned()))
    assert "".join(after.learned()) == "".join(before.learned())
    assert admitted(after, demand()) == pytest.approx(admitted(before, demand()), abs=1)
    assert admitted(after, demand()) >= 0
    assert admitted(policy_of(), demand()) < admitted_after(before)


def admitted_after(taught_policy: Adaptive) -> int:
    fresh = policy_of()
    fresh.recall("".join(taught_policy.learned()))
    return admitted(fresh, demand())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 9, "edges": 144, "curves": []}',
        "null",
        f'{{"schema": 1, "edges": {len(EDGES)}, "curves": [{{}}]}}',
    ],
)
def test_a_table_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own message, or ours
        policy_of().recall(text)


def test_keys_are_in_a_table_by_name_only_and_it_stays_small() -> None:
    policy = taught(policy_of(), [50] * 300)
    assert len("".join(policy.learned())) < 20_000
    assert {tuple(curve["label"]) for curve in json.loads("".join(policy.learned()))["curves"]} == set(LABELS)


# ---------------------------------------------------------------- bounds


def test_lock_step_by_hand() -> None:
    """Two requests of 100 now: one ends after 10 more, the other after 50."""
    now = np.array([100, 100], dtype=np.float32)
    growth = np.array([10, 50], dtype=np.float32)
    assert lockstep_peak(now, growth, growth) == 220
    assert lockstep_peak(now[:0], growth[:0], growth[:0]) == 0


STATES = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=20
)


@given(STATES, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_sure_bound_holds_for_any_lengths(states: list[tuple[int, int, int]], random: Random) -> None:
    now = np.array([prompt + min(new, most) for prompt, most, new in states], dtype=np.float32)
    growth = np.array([most - min(new, most) for _, most, new in states], dtype=np.float32)
    bound = lockstep_peak(now, growth, growth + 1)
    ends = [random.randint(0, int(each)) for each in growth]
    for t in range(int(growth.max()) + 1):
        held = sum(float(a) + t for a, end in zip(now, ends, strict=True) if t <= end)
        assert held <= bound
    assert bound <= float((now + growth).sum()), "never above the sum of all maxima"


@given(STATES)
@settings(max_examples=100, deadline=None)
def test_the_book_counts_what_was_put_into_it(states: list[tuple[int, int, int]]) -> None:
    book = Book(size=1)
    for lease_id, (prompt, most, new) in enumerate(states):
        book.put(
            lease_id,
            Entry(fixed_tokens=prompt, most_tokens=most, new_tokens=min(new, most), extra_steps=1, row=0),
        )
    certain = np.ones((1, len(AHEAD)), dtype=np.float32)
    outlook = book.outlook(certain, len(AHEAD))
    assert outlook.variance == pytest.approx(0)
    exact = max(
        sum(
            prompt + most - max(0, most - min(new, most) - t)
            for prompt, most, new in states
            if t <= most - new
        )
        for t in range(300)
    )
    assert min(float(outlook.sure.max()), book.lockstep_peak(0)) >= exact
    for lease_id in range(len(states)):
        book.remove(lease_id)
    assert (len(book), book.now_tokens) == (0, 0)


@pytest.mark.parametrize(("n", "chance"), [(400, 0.5), (40, 0.1), (200, 0.01), (100, 0.9)])
def test_the_quantile_is_that_of_a_sum_of_independent_requests(n: int, chance: float) -> None:
    third = n * chance * (1 - chance) * (1 - 2 * chance)
    z = 3.0
    bound = float(quantile(*(np.array([x]) for x in (n * chance, n * chance * (1 - chance), third)), z)[0])
    draws = np.random.default_rng(0).binomial(n, chance, size=400_000)
    assert 0.0002 < float((draws > bound).mean()) < 0.004, "0.00135 for a normal law"


@given(
    st.lists(
        st.tuples(st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 1500)), min_size=5, max_size=40
    )
)
@settings(max_examples=60, deadline=None)
def test_cold_it_never_overflows_whatever_the_lengths(requests: list[tuple[int, int, int]]) -> None:
    """Lock step with any lengths: without evidence the policy relies on the sure bound alone."""
    policy = policy_of(LLAMA)
    waiting = [(demand(p, m), min(length, m)) for p, m, length in requests]
    running: dict[int, list[int]] = {}
    next_id = 0
    while waiting or running:
        while waiting and policy.decide(waiting[0][0], "k").verdict is Verdict.ADMIT:
            asked, length = waiting.pop(0)
            policy.admit(next_id, asked, "k")
            running[next_id] = [asked.prompt_tokens, 0, length]
            next_id += 1
        assert running, "an empty engine takes what some day fits"
        for lease_id, state in list(running.items()):
            state[1] += 1
            policy.progress(lease_id, state[1])
        assert sum(prompt + new for prompt, new, _ in running.values()) <= LLAMA.pool_tokens
        assert policy.excess_tokens() == 0
        for lease_id, (_, new, length) in list(running.items()):
            if new >= length:
                del running[lease_id]
                policy.release(lease_id, Ending.CANCELLED, new)
    assert policy.report()["booked_tokens"] == policy.report()["reserved_tokens"] == 0


# ---------------------------------------------------------------- the rule


def test_evidence_lets_more_in_than_every_maximum_would() -> None:
    cold = admitted(policy_of(), demand())
    warm = admitted(taught(policy_of(), [50 + i % 100 for i in range(400)]), demand())
    assert cold == 8192 // 1136
    assert warm >= 3 * cold


def test_more_care_lets_fewer_in() -> None:
    counts = [
        admitted(taught(policy_of(z=z), [50 + i % 300 for i in range(400)]), demand())
        for z in (1.0, 3.0, 6.0)
    ]
    assert counts[0] > counts[1] > counts[2]


def test_what_cannot_be_counted_or_drains_is_held_at_its_maximum() -> None:
    policy = taught(policy_of(), [20] * 400)
    unseen = admitted(policy, demand(counted=False))
    assert unseen == 8192 // 1136
    policy = taught(policy_of(), [20] * 400)
    policy.admit(1, demand(100, 3996), "alice")
    policy.progress(1, 10)
    before = policy.report()["booked_tokens"]
    policy.drain(1)
    policy.progress(1, 11)
    assert (before, policy.report()["booked_tokens"]) == (112, 4096)


def test_several_sequences_are_held_at_their_maximum() -> None:
    policy = taught(policy_of(LLAMA), [20] * 400)
    assert admitted(policy, demand(100, 900, sequences=4)) == 2


def test_an_empty_engine_takes_what_fills_it() -> None:
    policy = policy_of()
    assert policy.decide(demand(1000, None, sequences=3)).reason == "alone"


# ---------------------------------------------------------------- feedback


def sample(at_s: float, **known: int) -> EngineSample:
    return EngineSample(at_s=at_s, **known)


def fed(
    feedback: Feedback, reading: EngineSample, *, peak_share: float = 1.0, booked: float = 4000
) -> Feedback:
    feedback.observe(reading, booked_tokens=booked, pool_tokens=8192, peak_share=peak_share)
    return feedback


def test_care_rises_at_once_and_falls_slowly_and_only_in_use() -> None:
    feedback = Feedback(3.0)
    fed(feedback, sample(0.0, preemptions_total=5))
    assert feedback.z == 3.0, "what an engine did before we looked is not ours"
    fed(feedback, sample(1.0, preemptions_total=7))
    assert (feedback.z, feedback.violations) == (3.5, 2)
    for second in range(2, 302):
        fed(feedback, sample(float(second), preemptions_total=7), peak_share=0.1)
    assert feedback.z == 3.5
    for second in range(302, 452):
        fed(feedback, sample(float(second), preemptions_total=7))
    assert feedback.z == pytest.approx(3.25, abs=0.01)
    for second in range(1000):
        fed(feedback, sample(1000.0 + second, overflows_total=second))
    assert feedback.z == 6.0


def test_a_usage_below_the_books_is_believed_late_and_one_above_at_once() -> None:
    feedback = Feedback(3.0)
    for i in range(199):
        fed(feedback, sample(float(i), kv_used_tokens=2000))
    assert feedback.ratio == 1.0
    fed(feedback, sample(200.0, kv_used_tokens=2000))
    assert 0.5 <= feedback.ratio < 0.6
    for i in range(20):
        fed(feedback, sample(201.0 + i, kv_used_tokens=4800))
    assert feedback.ratio == pytest.approx(1.2, abs=0.02)


@pytest.mark.parametrize(
    ("reading", "now_s", "reason"),
    [
        (sample(10.0, kv_used_tokens=100), 11.9, ""),
        (sample(10.0, kv_used_tokens=100), 12.1, "metrics_stale"),
        (sample(10.0), 99.0, ""),
        (sample(10.0, kv_used_tokens=7950), 10.1, "usage_high"),
        (sample(10.0, card_free_bytes=-1), 10.1, "card_full"),
    ],
)
def test_the_brake(reading: EngineSample, now_s: float, reason: str) -> None:
    policy = policy_of()
    policy.admit(1, demand(10, 10), "")
    policy.observe(reading)
    decision = policy.decide(demand(10, 10), now_s=now_s)
    assert decision.verdict is (Verdict.WAIT if reason else Verdict.ADMIT)
    assert not reason or decision.reason == reason
    policy.release(1, Ending.FINISHED, 1)
    assert policy.decide(demand(10, 10), now_s=now_s).verdict is Verdict.ADMIT, (
        "an empty engine is never braked"
    )


def test_usage_over_the_prediction_is_counted() -> None:
    policy = policy_of()
    policy.admit(1, demand(10, 10), "")
    policy.observe(sample(0.0, kv_used_tokens=16))
    policy.observe(sample(1.0, kv_used_tokens=5000))
    report = policy.report()
    assert (report["readings"], report["readings_over_prediction"]) == (2, 1)


def test_care_is_greater_where_overflow_fails_everyone() -> None:
    lengths = [50 + i % 300 for i in range(400)]
    gentle, strict = policy_of(VLLM), policy_of(LLAMA)
    assert admitted(taught(strict, lengths), demand()) < admitted(taught(gentle, lengths), demand())
    assert strict.report()["z"] > gentle.report()["z"]


def test_what_must_be_taken_back_is_what_would_overflow_within_a_few_steps() -> None:
    policy = policy_of(LLAMA)
    for lease_id in range(4):
        policy.admit(lease_id, demand(1500, 1000), "")
        policy.progress(lease_id, 520)
    assert policy.excess_tokens() == 0
    for lease_id in range(4):
        policy.progress(lease_id, 550)
    assert policy.excess_tokens() == 4 * (1500 + 550 + 2 + 24) - 8192
    assert policy.held_tokens(3) == 2050


def test_what_the_engine_holds_beyond_what_streams_show_is_taken_into_account() -> None:
    """Events are not tokens: 4 streams show 400 tokens each, the engine holds 300, then 500 more."""
    policy = policy_of(LLAMA)
    for lease_id in range(4):
        policy.admit(lease_id, demand(1500, 1000), "")
        policy.progress(lease_id, 400)
    books = 4 * (1500 + 400 + 2)
    policy.observe(sample(1.0, kv_used_tokens=books + 300))
    assert policy.excess_tokens() == books + 300 + 300 + 4 * 24 - 8192  # as much again until the next look
    policy.observe(sample(1.5, kv_used_tokens=books + 500))
    assert policy.excess_tokens() == books + 500 + 200 + 4 * 24 - 8192
    policy.observe(sample(2.0, kv_used_tokens=books))
    assert policy.excess_tokens() == 0
