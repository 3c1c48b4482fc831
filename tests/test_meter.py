"""Peaks by phase, memory at rest, and a card that goes away, on hand-made and on real readings."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.domain import MIB, CardInfo, CardReading, Phase
from kvguard.meter import Meter
from kvguard.ports import CardLost
from kvguard.readings import HISTORY_S, Readings, Tolerance
from kvguard_adapters.cards import HostCard

PATIENCE_S = 60.0
LOOSE = Tolerance(size_bytes=8 * MIB, ratio=0.01)


def reading(used_bytes: int, source: str = "test") -> CardReading:
    return CardReading(at_s=0.0, total_bytes=1 << 40, used_bytes=used_bytes, source=source)


def filled(samples: Sequence[tuple[float, int]], *, interval_s: float = 0.05) -> Readings:
    readings = Readings(interval_s=interval_s, at=1000.0)
    for at_s, used in samples:
        readings.add(reading(used), at=1000.0 + at_s, at_s=at_s)
    return readings


# ---------------------------------------------------------------- phases


def test_each_phase_keeps_its_peak_its_end_and_how_it_was_read() -> None:
    readings = Readings(interval_s=0.05, at=100.0)
    readings.add(reading(10), at=100.0, at_s=0.0)
    readings.begin(Phase.LOADING, 101.0)
    for at_s, used in ((1.0, 50), (1.1, 900), (1.2, 700)):
        readings.add(reading(used, "nvml"), at=100 + at_s, at_s=at_s)
    baseline, loading = readings.peaks(103.0)
    assert (baseline.phase, baseline.peak_bytes, baseline.started_at, baseline.ended_at) == (
        Phase.BASELINE, 10, 100.0, 101.0,
    )  # fmt: skip
    assert (loading.peak_bytes, loading.last_bytes, loading.samples) == (900, 700, 3)
    assert (loading.source, loading.interval_s) == ("nvml", 0.05)
    assert (loading.started_at, loading.ended_at) == (101.0, 103.0)


def test_a_phase_without_a_reading_leaves_no_trace() -> None:
    readings = Readings(interval_s=0.05, at=0.0)
    readings.begin(Phase.LOADING, 1.0)
    readings.begin(Phase.SERVING, 2.0)
    assert readings.peaks(3.0) == ()


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.lists(st.integers(0, 1 << 50), min_size=1))))
def test_a_peak_is_the_highest_reading_of_its_phase(phases: list[tuple[Phase, list[int]]]) -> None:
    readings, at = Readings(interval_s=0.05, at=0.0), count()
    for phase, useds in phases:
        readings.begin(phase, float(next(at)))
        for used in useds:
            now = float(next(at))
            readings.add(reading(used), at=now, at_s=now)
    peaks = readings.peaks(float(next(at)))
    assert [(p.phase, p.peak_bytes, p.last_bytes, p.samples) for p in peaks] == [
        (phase, max(useds), useds[-1], len(useds)) for phase, useds in phases
    ]


def test_history_is_an_hour_of_highest_readings_a_second() -> None:
    readings = filled([(n / 20, n % 20) for n in range(20 * (HISTORY_S + 10))])
    history = readings.history()
    assert len(history) == HISTORY_S
    assert {used for _, used in history} == {19}
    assert history[-1][0] - history[0][0] == HISTORY_S - 1


# ---------------------------------------------------------------- at rest


@pytest.mark.parametrize(
    ("samples", "now_s", "expected"),
    [
        ([(0.0, 0), (0.5, 100 * MIB), (1.0, 104 * MIB), (1.5, 100 * MIB)], 1.5, True),
        ([(0.0, 0), (0.5, 100 * MIB), (1.0, 110 * MIB), (1.5, 100 * MIB)], 1.5, False),
        ([(0.0, 0), (0.5, 10_000 * MIB), (1.0, 10_090 * MIB), (1.5, 10_000 * MIB)], 1.5, True),  # under 1 %
        ([(0.0, 5), (0.1, 5), (0.2, 5)], 0.2, False),  # not a whole window yet
        ([(0.0, 5), (1.5, 5)], 1.5, False),  # too few to tell
    ],
)
def test_memory_is_at_rest_when_a_whole_window_lies_close_together(
    samples: list[tuple[float, int]], now_s: float, expected: bool
) -> None:
    readings = filled(samples)
    assert readings.at_rest(since_s=0.0, now_s=now_s, window_s=1.0, tolerance=LOOSE) is expected


def test_calm_before_the_question_does_not_count() -> None:
    readings = filled([(n / 10, 5) for n in range(20)])
    assert readings.at_rest(since_s=0.0, now_s=1.9, window_s=1.0, tolerance=LOOSE)
    assert not readings.at_rest(since_s=1.5, now_s=1.9, window_s=1.0, tolerance=LOOSE)


# ---------------------------------------------------------------- the thread


class ScriptedCard:
    """Gives the numbers of a script, one a reading, then the last for ever; an exception is raised.

    `clock` moves by a tenth of a second a reading, so that no test depends on real time.
    """

    info = CardInfo(kind="host", name="scripted", total_bytes=1 << 40)

    def __init__(self, *script: int | CardLost) -> None:
        self._script = list(script)
        self.reads = 0
        self.seen_pids: list[int] = []
        self.threads: set[str] = set()

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        self.seen_pids = list(own_pids)
        self.threads.add(threading.current_thread().name)
        step = self._script[min(self.reads, len(self._script) - 1)]
        self.reads += 1
        if isinstance(step, CardLost):
            raise step
        return reading(step)

    def clock(self) -> float:
        return self.reads / 10


@contextmanager
def meter_of(card: ScriptedCard) -> Iterator[Meter]:
    meter = Meter(card, interval_s=0.001, own_pids=lambda: [7], clock=card.clock)
    yield meter
    meter._quit.set()


async def test_it_waits_until_memory_is_at_rest() -> None:
    card = ScriptedCard(*(n * 100 * MIB for n in range(30)), 3000 * MIB)
    with meter_of(card) as meter:
        await meter.start()
        assert await meter.stable(1.0, timeout_s=PATIENCE_S)
        assert card.reads >= 40
        assert meter.used_bytes == 3000 * MIB
        assert card.seen_pids == [7]
        await meter.stop()


async def test_memory_that_never_rests_is_not_stable() -> None:
    card = ScriptedCard(*(n % 2 * 100 * MIB for n in range(1_000_000)))
    with meter_of(card) as meter:
        await meter.start()
        assert not await meter.stable(1.0, timeout_s=0.2)
        assert meter.lost is None
        await meter.stop()


async def test_readings_are_taken_off_the_event_loop() -> None:
    card = ScriptedCard(1)
    with meter_of(card) as meter:
        await meter.start()
        assert await meter.stable(0.5, timeout_s=PATIENCE_S)
        await meter.stop()
    assert threading.main_thread().name not in card.threads
    assert "meter" in card.threads
    reads = card.reads
    await asyncio.sleep(0.02)
    assert card.reads == reads


async def test_a_phase_shorter_than_the_interval_is_read_at_its_end() -> None:
    card = ScriptedCard(10, 20, 300)
    meter = Meter(card, interval_s=3600.0)
    await meter.start()
    await meter.switch(Phase.SHORT_REQUEST)
    await meter.switch(Phase.SERVING)
    await meter.stop()
    assert [(p.phase, p.peak_bytes) for p in meter.peaks()] == [
        (Phase.BASELINE, 20),
        (Phase.SHORT_REQUEST, 300),
    ]


async def test_a_card_that_is_lost_at_the_start_is_an_error() -> None:
    with meter_of(ScriptedCard(CardLost("no answer"))) as meter, pytest.raises(CardLost, match="no answer"):
        await meter.start()


async def test_a_card_that_is_lost_later_is_said_so_and_its_peaks_are_kept() -> None:
    card = ScriptedCard(10, 30, 20, CardLost("fell off the bus"))
    with meter_of(card) as meter:
        await meter.start()
        assert not await meter.stable(3600.0, timeout_s=PATIENCE_S)
        assert str(meter.lost) == "fell off the bus"
        [peak] = meter.peaks()
        assert (peak.peak_bytes, peak.last_bytes, peak.samples) == (30, 20, 3)
        await meter.stop()


async def test_a_card_that_comes_back_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvguard.meter.LOST_RETRY_S", 0.001)
    card = ScriptedCard(10, CardLost("away"), CardLost("away"), 40)
    with meter_of(card) as meter:
        await meter.start()
        async with asyncio.timeout(PATIENCE_S):
            while meter.used_bytes != 40:
                meter._sampled.clear()
                await meter._sampled.wait()
        assert await meter.stable(0.5, timeout_s=PATIENCE_S)
        assert meter.lost is None
        await meter.stop()


async def test_a_real_machine_is_sampled_with_its_own_process() -> None:
    meter = Meter(HostCard(), interval_s=0.01, own_pids=lambda: [os.getpid()])
    await meter.start()
    await meter.switch(Phase.SERVING)
    assert await meter.stable(0.05, timeout_s=PATIENCE_S, tolerance=Tolerance(ratio=1.0))
    await meter.stop()
    [_, serving] = meter.peaks()
    assert serving.samples >= 3
    assert meter.last is not None
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert meter.last.own_bytes == pytest.approx(rss_pages * os.sysconf("SC_PAGE_SIZE"), rel=0.5)
    assert 0 < meter.used_bytes < meter.total_bytes
