"""Headroom: what is never handed out."""

import pytest

from kvguard.domain import GIB, MIB
from kvguard_policies.headroom import headroom_bytes, parse_headroom


@pytest.mark.parametrize(
    ("total_bytes", "kind", "expected"),
    [
        (80 * GIB, "nvml", 8 * GIB),
        (8 * GIB, "nvml", GIB),
        (GIB, "nvml", 512 * MIB),
        (8 * GIB, "cgroup", int(0.8 * GIB)),
        (600 * MIB, "host", 60 * MIB),
        (600 * MIB, "limit", 60 * MIB),
    ],
)
def test_the_default_depends_on_the_card(total_bytes: int, kind: str, expected: int) -> None:
    assert headroom_bytes(total_bytes, kind) == pytest.approx(expected, abs=1)
    assert parse_headroom(None).of(total_bytes, kind) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * GIB),
        ("512 mib", 512 * MIB),
        ("1048576", MIB),
        ("0%", 0),
        ("12.5%", 2 * GIB),
        ("", int(1.6 * GIB)),
    ],
)
def test_sizes_and_shares_are_read(text: str, expected: int) -> None:
    assert parse_headroom(text).of(16 * GIB, "nvml") == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("text", ["2 apples", "-1GiB", "GiB", "10%%", "2GB", "1e3"])
def test_nonsense_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="neither a size nor a share"):
        parse_headroom(text)


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ValueError, match="100 %"):
        parse_headroom("100%")
    with pytest.raises(ValueError, match="leaves nothing"):
        parse_headroom("4GiB").of(4 * GIB, "cgroup")
