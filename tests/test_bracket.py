"""The bracket ends within 5 % of the largest value that fits, in few trials, however wrong the prediction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvguard.bracket import Bracket


def search(bracket: Bracket, true_bytes: int, slope: int) -> list[int]:
    """Drive it against a card on which `value` really takes true_bytes + slope x value."""
    tried: list[int] = []
    while (value := bracket.next()) is not None:
        tried.append(value)
        assert len(tried) < 20, tried
        peak = true_bytes + slope * value
        if peak <= bracket.usable_bytes:
            bracket.worked(value, peak)
        else:
            bracket.failed(value)
    return tried


def make(*, error_bytes: int, usable: int = 500_000_000, slope: int = 16_384, most: int = 131_072) -> Bracket:
    """A prediction that is `error_bytes` off against a truth of 100 MB + slope x value."""
    return Bracket(
        predict=lambda value: 100_000_000 - error_bytes + slope * value,
        usable_bytes=usable,
        least=256,
        most=most,
    )


def test_an_exact_prediction_takes_one_trial() -> None:
    bracket = make(error_bytes=0)
    assert search(bracket, 100_000_000, 16_384) == [24_320]
    assert bracket.low == 24_320


def test_a_prediction_that_is_too_low_fails_first_and_then_closes_in() -> None:
    bracket = make(error_bytes=60_000_000)
    tried = search(bracket, 100_000_000, 16_384)
    assert tried[0] > 24_414
    assert 24_414 * 0.95 <= bracket.low <= 24_414
    assert len(tried) <= 5


def test_a_prediction_that_is_too_high_is_corrected_by_one_success() -> None:
    bracket = make(error_bytes=-150_000_000)
    tried = search(bracket, 100_000_000, 16_384)
    assert len(tried) == 2
    assert bracket.low == 24_320


def test_nothing_fits() -> None:
    bracket = make(error_bytes=0, usable=50_000_000)
    search(bracket, 100_000_000, 16_384)
    assert bracket.low == 0


def test_all_fits() -> None:
    bracket = make(error_bytes=0, most=4096)
    assert search(bracket, 100_000_000, 16_384) == [4096]


@given(
    error=st.integers(-200_000_000, 200_000_000),
    usable=st.integers(150_000_000, 4_000_000_000),
    slope=st.integers(256, 500_000),
)
def test_it_ends_within_tolerance_and_never_claims_what_does_not_fit(
    error: int, usable: int, slope: int
) -> None:
    bracket = Bracket(
        predict=lambda value: max(0, 100_000_000 - error) + slope * value,
        usable_bytes=usable,
        least=256,
        most=131_072,
    )
    tried = search(bracket, 100_000_000, slope)
    largest = min(131_072, (usable - 100_000_000) // slope)
    assert bracket.low <= largest
    assert len(set(tried)) == len(tried)
    if largest >= 2048:
        assert bracket.low >= 0.95 * largest - 2 * bracket.step


def test_it_goes_on_between_a_success_and_a_failure_that_are_still_apart() -> None:
    bracket = Bracket(
        predict=lambda value: 99_999_999 + 388 * value, usable_bytes=150_061_311, least=256, most=131_072
    )
    search(bracket, 100_000_000, 388)
    assert bracket.low >= 0.95 * 129_023 - 512
