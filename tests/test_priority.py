"""Who goes first: a key's own priority, and what a header may ask for within it."""

from __future__ import annotations

import pytest

from kvguard.priority import Priorities, PriorityError


@pytest.mark.parametrize(
    ("by_key", "key", "asked", "priority"),
    [
        ({}, "anonymous", None, 0),
        ({}, "anonymous", b"7", 7),
        ({}, "anonymous", b" -3 ", -3),
        ({"web": 5}, "web", None, 5),
        ({"web": 5}, "web", b"-100", -100),
        ({"web": 5}, "web", b"9", 5),
        ({"web": 5}, "other", b"9", 0),
        ({"batch": -5}, "batch", b"0", -5),
    ],
)
def test_a_header_asks_for_less_than_its_key_has_or_for_anything_where_none_is_set(
    by_key: dict[str, int], key: str, asked: bytes | None, priority: int
) -> None:
    assert Priorities(by_key).of(key, asked) == priority


@pytest.mark.parametrize("asked", [b"high", b"", b"1.5", b"101", b"-101", b"9" * 5000])
def test_what_is_no_priority_is_refused(asked: bytes) -> None:
    with pytest.raises(PriorityError, match="X-KVGuard-Priority"):
        Priorities().of("anonymous", asked)
