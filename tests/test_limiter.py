"""The limiter enforces: who starts, who waits, who is told at once that it will not start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from kvguard.domain import Capacity, Demand, Ending, EngineSample, Refusal
from kvguard.lease import Lease
from kvguard.limiter import Limiter, LimiterStatus
from kvguard.quota import Quota
from kvguard_policies.admission import make_policy
from kvguard_policies.ordering import FairOrder

CAPACITY = Capacity(pool_tokens=1000, ctx_tokens=600, sequences=8)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def limiter_of(policy: str = "reserve", *, ready: bool = True, **options: Any) -> Limiter:
    limiter = Limiter(policy=make_policy(policy), order=FairOrder(), **options)
    if ready:
        limiter.resize(1, CAPACITY)
    return limiter


def demand(prompt: int = 100, new: int | None = 100, **options: Any) -> Demand:
    return Demand(prompt_tokens=prompt, max_new_tokens=new, **options)


async def lease_of(answer: Awaitable[Lease | Refusal]) -> Lease:
    lease = await answer
    assert isinstance(lease, Lease)
    return lease


async def refusal_of(answer: Awaitable[Lease | Refusal]) -> Refusal:
    refusal = await answer
    assert isinstance(refusal, Refusal)
    return refusal


async def queued(limiter: Limiter, *demands: Demand, **options: Any) -> list[asyncio.Task[Lease | Refusal]]:
    """Requests that wait, in this order."""
    tasks = []
    for each in demands:
        tasks.append(asyncio.create_task(limiter.acquire(each, **options)))
        await asyncio.sleep(0)  # it runs up to where it waits
    return tasks


async def full(limiter: Limiter, n: int = 5) -> list[Lease]:
    return [await lease_of(limiter.acquire(demand())) for _ in range(n)]


# ---------------------------------------------------------------- starting and ending


async def test_a_request_that_fits_starts_at_once_and_its_release_starts_the_next() -> None:
    limiter = limiter_of()
    running = await full(limiter)
    (waiter,) = await queued(limiter, demand())
    assert (limiter.running, limiter.waiting) == (5, 1)
    running[0].release(Ending.FINISHED, 7)
    assert (await lease_of(waiter)).generation == 1
    assert (limiter.running, limiter.waiting) == (5, 0)


async def test_a_release_counts_once() -> None:
    limiter = limiter_of()
    running = await full(limiter)
    await queued(limiter, demand(), demand())
    running[0].release(Ending.FINISHED, 7)
    running[0].release(Ending.FAILED)
    assert (limiter.running, limiter.waiting) == (5, 1)


async def test_small_ones_pass_a_large_one_three_times_and_no_more() -> None:
    limiter = limiter_of()
    running = await full(limiter, 4)
    large, *small = await queued(limiter, demand(300, 300), *[demand(50, 50) for _ in range(2)])
    assert limiter.waiting == 1, "200 tokens are free: both small ones fit beside the large one's start"
    small += await queued(limiter, *[demand(50, 50) for _ in range(4)])
    for task in small[:2]:
        (await lease_of(task)).release(Ending.FINISHED, 50)
    third = await lease_of(small[2])
    third.release(Ending.FINISHED, 50)
    assert limiter.waiting == 4, "the large one was passed three times: 200 free tokens stay free for it"
    for lease in running:
        lease.release(Ending.FINISHED, 100)
    assert (await large) is not None
    assert limiter.waiting == 0


async def test_a_request_that_would_move_the_heads_start_does_not_pass() -> None:
    limiter = limiter_of()
    running = await full(limiter, 4)
    await queued(limiter, demand(300, 300))
    (tall,) = await queued(limiter, demand(50, 150))
    assert limiter.waiting == 2, "it needs 200 of the 200 free, and runs longer than the head has to wait"
    for lease in running[:3]:
        lease.release(Ending.FINISHED)
    await lease_of(tall)


# ---------------------------------------------------------------- refusals


async def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    refusal = await refusal_of(limiter_of().acquire(demand(700, 100)))
    assert refusal.code == "context_length_exceeded"
    assert refusal.retry_after_s is None
    assert all(number in refusal.message for number in ("600", "700", "100"))


async def test_a_full_queue_is_refused_at_once() -> None:
    limiter = limiter_of(max_queue_requests=2)
    await full(limiter)
    await queued(limiter, demand(), demand())
    refusal = await refusal_of(limiter.acquire(demand()))
    assert refusal.code == "overloaded"
    assert refusal.retry_after_s == 1.0
    assert "5 requests run and 2 wait" in refusal.message
    assert limiter.status().refused_total == {"overloaded": 1}


async def test_bodies_that_wait_are_bounded_in_bytes() -> None:
    limiter = limiter_of(max_queue_bytes=1000)
    await full(limiter)
    await queued(limiter, demand(), body_bytes=600)
    assert (await refusal_of(limiter.acquire(demand(), body_bytes=600))).code == "overloaded"
    await queued(limiter, demand(), body_bytes=400)
    assert limiter.status().queue_bytes == 1000


async def test_without_a_queue_a_request_starts_now_or_never() -> None:
    limiter = limiter_of(max_queue_requests=0)
    await full(limiter)
    assert (await refusal_of(limiter.acquire(demand()))).code == "overloaded"
    assert limiter.waiting == 0


async def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_time_that_it_would_take() -> None:
    clock = Clock()
    limiter = limiter_of(clock=clock)
    running = await full(limiter)
    waiting = await queued(limiter, *[demand() for _ in range(12)])
    for _ in range(6):  # one of 200 tokens every 2 s: 100 tokens/s
        clock.now_s += 2.0
        running.pop(0).release(Ending.FINISHED, 50)
        running.append(await lease_of(waiting.pop(0)))
    assert limiter.status().drain_tokens_per_s == pytest.approx(100)
    assert limiter.status().waiting[-1].expected_wait_s == pytest.approx(10)
    refusal = await refusal_of(limiter.acquire(demand(), deadline_s=clock.now_s + 5))
    assert refusal.code == "overloaded"
    assert refusal.retry_after_s == pytest.approx(7)
    await queued(limiter, demand(), deadline_s=clock.now_s + 13)


async def test_a_deadline_is_kept_where_nothing_could_be_predicted() -> None:
    limiter = limiter_of()
    await full(limiter)
    loop = asyncio.get_running_loop()
    refusal = await refusal_of(limiter.acquire(demand(), deadline_s=loop.time() + 0.02))
    assert refusal.code == "overloaded"
    assert limiter.waiting == 0


async def test_a_key_over_its_quota_is_rate_limited_and_others_are_not() -> None:
    clock = Clock()
    limiter = limiter_of(clock=clock, quotas={"a": Quota(requests=1, tokens_per_minute=600)})
    first = await lease_of(limiter.acquire(demand(), key="a"))
    assert (await refusal_of(limiter.acquire(demand(), key="a"))).code == "rate_limited"
    await lease_of(limiter.acquire(demand(), key="b"))
    first.release(Ending.FINISHED, 560)  # 660 tokens: 60 more than a minute's
    refusal = await refusal_of(limiter.acquire(demand(), key="a"))
    assert (refusal.code, refusal.retry_after_s) == ("rate_limited", pytest.approx(6.1))
    clock.now_s += 6.2
    await lease_of(limiter.acquire(demand(), key="a"))


# ---------------------------------------------------------------- cancellation


async def test_a_client_that_leaves_the_queue_frees_its_place_at_once() -> None:
    limiter = limiter_of(max_queue_requests=1, quotas={"": Quota(requests=6)})
    await full(limiter)
    (waiter,) = await queued(limiter, demand(), body_bytes=10)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (limiter.waiting, limiter.status().queue_bytes) == (0, 0)
    await queued(limiter, demand())


async def test_a_client_that_leaves_in_the_moment_of_its_start_leaves_nothing_behind() -> None:
    limiter = limiter_of()
    running = await full(limiter)
    waiter, behind = await queued(limiter, demand(), demand())
    running[0].release(Ending.FINISHED, 1)  # the waiter has its lease, its task has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await lease_of(behind)
    assert limiter.running == 5


async def test_those_who_left_but_have_not_said_so_yet_are_not_started() -> None:
    limiter = limiter_of()
    running = await full(limiter)
    leaving = await queued(limiter, demand(), demand())
    (staying,) = await queued(limiter, demand())
    for task in leaving:
        task.cancel()
    running[0].release(Ending.FINISHED, 1)
    await lease_of(staying)
    assert (limiter.running, limiter.waiting) == (5, 0)


# ---------------------------------------------------------------- backend lives


async def test_requests_wait_for_a_backend_that_is_not_up_yet() -> None:
    limiter = limiter_of(ready=False)
    waiter, too_long = await queued(limiter, demand(), demand(700, 10))
    limiter.resize(1, CAPACITY)
    assert (await lease_of(waiter)).generation == 1
    assert (await refusal_of(too_long)).code == "context_length_exceeded"


async def test_a_pause_keeps_the_queue_and_starts_nobody() -> None:
    limiter = limiter_of()
    limiter.pause()
    (waiter,) = await queued(limiter, demand())
    assert limiter.status().paused
    limiter.resume()
    await lease_of(waiter)


async def test_a_new_life_voids_old_leases_and_judges_the_queue_again() -> None:
    limiter = limiter_of()
    old = await full(limiter)
    fits, too_long = await queued(limiter, demand(200, 50), demand(350, 50))
    limiter.pause()
    limiter.resize(2, Capacity(pool_tokens=300, ctx_tokens=300, sequences=8))
    refusal = await refusal_of(too_long)
    assert refusal.code == "context_length_exceeded"
    assert "reduced from 600 to 300" in refusal.message
    assert (await lease_of(fits)).generation == 2
    for each in old:
        each.progress(50)
        each.release(Ending.FAILED)
    assert limiter.running == 1


async def test_a_replay_goes_to_the_head_and_is_not_refused_for_a_full_queue() -> None:
    limiter = limiter_of(max_queue_requests=1)
    running = await full(limiter)
    (first,) = await queued(limiter, demand())
    (replay,) = await queued(limiter, demand(), front=True)
    running[0].release(Ending.FINISHED)
    await lease_of(replay)
    assert not first.done()


async def test_a_corrected_capacity_keeps_what_runs() -> None:
    limiter = limiter_of()
    running = await full(limiter)
    limiter.resize(1, Capacity(pool_tokens=1200, ctx_tokens=600, sequences=8))
    await lease_of(limiter.acquire(demand()))
    (waiter,) = await queued(limiter, demand())
    running[0].release(Ending.FINISHED)
    await lease_of(waiter)


async def test_when_there_will_be_no_backend_everyone_is_told() -> None:
    limiter = limiter_of(ready=False)
    waiters = await queued(limiter, demand(), demand())
    limiter.refuse_all(Refusal(code="backend_failed", message="it is gone"))
    assert [(await refusal_of(waiter)).code for waiter in waiters] == ["backend_failed"] * 2


# ---------------------------------------------------------------- pricing under way


async def test_an_exact_count_makes_room() -> None:
    limiter = limiter_of()
    lease = await lease_of(limiter.acquire(demand(500, 100, exact=False)))
    (waiter,) = await queued(limiter, demand(500, 100))
    lease.reprice(demand(200, 100))
    await lease_of(waiter)


async def test_a_lease_drains_until_the_engine_has_freed_it() -> None:
    clock = Clock()
    limiter = limiter_of(clock=clock)
    running = await full(limiter)
    (waiter,) = await queued(limiter, demand())
    running[0].drain()
    assert limiter.status().draining == 1
    assert not waiter.done()
    clock.now_s += 8.6
    running[0].release(Ending.CANCELLED)
    await lease_of(waiter)
    assert running[0].drained_s == pytest.approx(8.6)
    assert limiter.status().recent_drains_s == (pytest.approx(8.6),)


# ---------------------------------------------------------------- taking back


async def overfull(limiter: Limiter, n: int) -> list[Lease]:
    """Requests that run longer than was predicted of them."""
    limiter.resize(1, Capacity(pool_tokens=1200, ctx_tokens=600, sequences=8))
    return [await lease_of(limiter.acquire(demand(100, 100), request_id=str(i))) for i in range(n)]


async def test_before_an_overflow_the_youngest_that_may_be_is_taken_back() -> None:
    limiter = limiter_of("adaptive")
    leases = await overfull(limiter, 5)
    taken: list[str] = []
    for lease in leases[:4]:  # the youngest one cannot be replayed
        lease.allow_take_back(lambda id=lease.request_id: taken.append(id))
    limiter.resize(1, Capacity(pool_tokens=800, ctx_tokens=600, sequences=8))
    for lease in leases:
        lease.progress(52)
    assert taken == ["3"], "5 * (100 + 52 + what may still come) is over 800, 4 of them are not"
    assert limiter.status().taken_back_total == 1
    leases[3].drain()
    for lease in leases:
        lease.progress(60)
    assert taken == ["3"], "it is on its way out: nobody else has to go for it"
    leases[3].release(Ending.CANCELLED)
    leases[4].release(Ending.FINISHED, 60)
    assert limiter.running == 3


async def test_an_observation_alone_can_take_back() -> None:
    limiter = limiter_of("adaptive")
    leases = await overfull(limiter, 5)
    limiter.observe(EngineSample(at_s=0.0))
    taken: list[int] = []
    for lease in leases:
        lease.allow_take_back(lambda id=lease.id: taken.append(id))
    limiter.resize(1, Capacity(pool_tokens=540, ctx_tokens=540, sequences=8))
    limiter.observe(EngineSample(at_s=0.5))
    assert taken == [leases[4].id]


# ---------------------------------------------------------------- the whole


async def test_fairness_between_keys_holds_under_load() -> None:
    limiter = limiter_of("fixed:1")
    first = await lease_of(limiter.acquire(demand(10, 10), key="a"))
    waiting = [(key, task) for key in ("a", "a", "a", "a", "b", "b", "b", "b")
               for task in await queued(limiter, demand(10, 10), key=key)]  # fmt: skip
    lease, order = first, []
    while waiting:
        lease.release(Ending.FINISHED, 10)
        await asyncio.sleep(0)
        key, task = next(pair for pair in waiting if pair[1].done())
        waiting.remove((key, task))
        order.append(key)
        lease = await lease_of(task)
    assert order == ["b", "a", "b", "a", "b", "a", "b", "a"]


async def test_at_idle_everything_that_was_admitted_is_released() -> None:
    limiter = limiter_of("adaptive", max_queue_requests=20)
    tasks = [
        asyncio.create_task(limiter.acquire(demand(10 + 7 * i, 5 * i), key=str(i % 3))) for i in range(40)
    ]
    served = 0
    while tasks:
        await asyncio.sleep(0)
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            answer = task.result()
            if isinstance(answer, Lease):
                served += 1
                answer.progress(1)
                answer.release(Ending.FINISHED, 2)
            else:
                assert answer.code == "overloaded"
    status: LimiterStatus = limiter.status()
    assert served + status.refused_total.get("overloaded", 0) == 40
    assert (status.running, status.waiting, status.queue_bytes) == (0, (), 0)
    assert status.policy_report["reserved_tokens"] == 0
    assert status.policy_report["booked_tokens"] == 0
