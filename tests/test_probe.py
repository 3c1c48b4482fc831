"""A probe's size is what was asked for, whatever the engine's vocabulary makes of the filler."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvguard.probe import CALIBRATION_FILLERS, Calibration, filler_text


@given(first=st.integers(1, 8), per_filler=st.integers(1, 6), wanted=st.integers(16, 100_000))
def test_the_prompt_is_never_longer_than_wanted_and_at_most_one_filler_shorter(
    first: int, per_filler: int, wanted: int
) -> None:
    calibration = Calibration.of(first, first + per_filler * CALIBRATION_FILLERS)
    tokens = first + per_filler * calibration.fillers(wanted)
    assert wanted - per_filler < tokens <= wanted


def test_a_tokenizer_that_merges_fillers_still_gives_a_finite_text() -> None:
    assert 0 < Calibration.of(2, 2).fillers(1000) <= 64_000
    assert filler_text(2) == "Hello the the"
