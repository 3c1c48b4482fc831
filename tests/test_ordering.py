"""Whose turn it is: bands, fairness, first come, and a bound on being passed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.domain import Demand, Ticket
from kvguard_policies.ordering import MAX_PASSES, FairOrder


def ticket(id: int, key: str = "a", *, priority: int = 0, prompt: int = 100, front: bool = False) -> Ticket:
    demand = Demand(prompt_tokens=prompt, max_new_tokens=0)
    return Ticket(id=id, key=key, priority=priority, demand=demand, tokens=prompt, front=front)


def filled(*tickets: Ticket, order: FairOrder | None = None) -> FairOrder:
    order = FairOrder() if order is None else order
    for each in tickets:
        order.push(each)
    return order


def drained(order: FairOrder) -> list[int]:
    ids = []
    while (head := order.head()) is not None:
        order.started(head)
        ids.append(head.id)
    return ids


def test_first_come_first_served_within_a_key() -> None:
    assert drained(filled(ticket(1), ticket(2), ticket(3))) == [1, 2, 3]


def test_a_higher_band_goes_first_and_a_replay_before_all() -> None:
    order = filled(ticket(1), ticket(2, priority=5), ticket(3, front=True), ticket(4, front=True))
    assert [t.id for t in order.in_order()] == [3, 4, 2, 1]
    assert drained(order) == [3, 4, 2, 1]


def test_keys_take_turns_by_tokens_not_by_requests() -> None:
    big = [ticket(i, "big", prompt=300) for i in range(3)]
    small = [ticket(i, "small", prompt=100) for i in range(10, 19)]
    ids = drained(filled(*big, *small))
    assert ids[:5] == [0, 10, 11, 12, 1]


def test_new_tokens_count_twice_and_a_refund_gives_the_prompt_back() -> None:
    order = filled(ticket(1, "a"), ticket(2, "b"), ticket(3, "a"), ticket(4, "b"))
    order.started(ticket_of(order, 1))
    order.started(ticket_of(order, 2))
    order.served("a", 10)
    assert order.head() == ticket_of(order, 4)
    order.refund(Demand(prompt_tokens=100, max_new_tokens=0), "a")
    assert order.head() == ticket_of(order, 3)


def ticket_of(order: FairOrder, id: int) -> Ticket:
    return next(t for t in order.in_order() if t.id == id)


def test_a_heavier_key_gets_more() -> None:
    tickets = [ticket(i, "gold") for i in range(20)] + [ticket(100 + i, "base") for i in range(20)]
    ids = drained(filled(*tickets, order=FairOrder({"gold": 3.0})))
    assert sum(id < 100 for id in ids[:12]) == 9


def test_a_key_that_was_away_saves_up_nothing() -> None:
    order = filled(*(ticket(i, "busy") for i in range(50)))
    for i in range(40):
        order.started(ticket_of(order, i))
    for i in range(100, 120):
        order.push(ticket(i, "new"))
    first = drained(order)[:10]
    assert 4 <= sum(id >= 100 for id in first) <= 6


def test_the_head_is_passed_three_times_at_most_and_then_keeps_its_place() -> None:
    order = filled(ticket(1, prompt=1000), *(ticket(i) for i in range(2, 10)))
    for _ in range(MAX_PASSES):
        passer = order.passers(8)[0]
        assert passer.id != 1
        order.started(passer)
    assert order.passers(8) == ()
    order.push(ticket(50, "newcomer"))
    assert order.head() == ticket_of(order, 1)
    order.started(ticket_of(order, 1))
    assert order.passers(8) != ()


def test_those_who_may_pass_are_the_first_of_every_key_before_the_second_of_any() -> None:
    order = filled(*(ticket(i, "a") for i in range(4)), *(ticket(10 + i, "b") for i in range(4)))
    assert [t.id for t in order.passers(4)] == [10, 1, 11, 2]


def test_what_is_ahead_follows_the_order() -> None:
    order = filled(ticket(1, "a"), ticket(2, "a"), ticket(3, "a"), ticket(4, "b", prompt=50))
    assert order.ahead_tokens(ticket_of(order, 1)) == 0
    assert order.ahead_tokens(ticket_of(order, 4)) == 0
    assert order.ahead_tokens(ticket_of(order, 3)) == 250
    assert order.ahead_tokens(ticket(9, "c", priority=1)) == 0
    assert order.ahead_tokens(ticket(9, "c", priority=-1)) == 350


KEYS = st.sampled_from("abc")
EVENTS = st.lists(
    st.tuples(st.sampled_from(["push", "start", "leave", "pass"]), KEYS, st.integers(1, 500), st.booleans()),
    max_size=80,
)


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_and_all_questions_agree(events: list[tuple[str, str, int, bool]]) -> None:
    order, waiting = FairOrder(), {}
    for id, (what, key, tokens, front) in enumerate(events):
        head = order.head()
        if what == "push":
            waiting[id] = ticket(id, key, prompt=tokens, front=front and tokens % 7 == 0)
            order.push(waiting[id])
        elif head is not None:
            passers = order.passers(4)
            chosen = head if what == "start" else passers[-1] if what == "pass" and passers else None
            if what == "leave":
                order.remove(waiting.pop(next(iter(waiting))))
            elif chosen is not None:
                order.started(waiting.pop(chosen.id))
        assert len(order) == len(waiting)
        assert sorted(t.id for t in order.in_order()) == sorted(waiting)
        assert (order.head() is None) == (not waiting)
        assert len({t.id for t in order.passers(100)}) == len(order.passers(100)) <= max(0, len(waiting) - 1)
        for each in waiting.values():
            assert 0 <= order.ahead_tokens(each) <= sum(t.tokens for t in waiting.values()) - each.tokens + 1


@given(
    st.lists(st.integers(1, 400), min_size=40, max_size=40),
    st.lists(st.integers(1, 400), min_size=40, max_size=40),
)
@settings(max_examples=50, deadline=None)
def test_two_busy_keys_are_never_further_apart_than_two_requests(a: list[int], b: list[int]) -> None:
    order = filled(
        *(ticket(i, "a", prompt=p) for i, p in enumerate(a)),
        *(ticket(1000 + i, "b", prompt=p) for i, p in enumerate(b)),
    )
    served, left = {"a": 0, "b": 0}, {"a": len(a), "b": len(b)}
    while all(left.values()):
        head = order.head()
        assert head is not None
        order.started(head)
        served[head.key] += head.tokens
        left[head.key] -= 1
        assert abs(served["a"] - served["b"]) <= 2 * 400
