"""The meter keeps the peak of each phase, sees short ones, and knows what stable means."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kvguard.domain import MIB, CardInfo, CardReading, Phase
from kvguard.meter import Meter
from kvguard.ports import CardLost


class ScriptedCard:
    """A card whose use the test sets; it tells when it was read."""

    def __init__(self) -> None:
        self.info = CardInfo(kind="limit", name="scripted", total_bytes=1000 * MIB)
        self.used_bytes = 100 * MIB
        self.lost = False
        self._read = threading.Condition()
        self._count = 0

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        with self._read:
            self._count += 1
            self._read.notify_all()
        if self.lost:
            raise CardLost("it fell off the bus")
        return CardReading(
            at_s=0, total_bytes=self.info.total_bytes, used_bytes=self.used_bytes, source="script"
        )

    async def reads(self, more: int = 2) -> None:
        """Wait until it was read so many times more."""
        with self._read:
            goal = self._count + more
        await asyncio.to_thread(self._until, goal)

    def _until(self, goal: int) -> None:
        with self._read:
            assert self._read.wait_for(lambda: self._count >= goal, timeout=10)


@pytest.fixture
def card() -> ScriptedCard:
    return ScriptedCard()


async def test_each_phase_has_its_own_peak_source_and_interval(card: ScriptedCard) -> None:
    meter = Meter(card, interval_s=0.005)
    await meter.start()
    await meter.phase(Phase.LOADING)
    card.used_bytes = 700 * MIB
    await card.reads()
    card.used_bytes = 400 * MIB
    await card.reads()
    await meter.phase(Phase.LOADED_IDLE)
    await meter.stop()
    peaks = {p.phase: p for p in meter.peaks()}
    assert peaks[Phase.BASELINE].peak_bytes == 100 * MIB
    assert (peaks[Phase.LOADING].peak_bytes, peaks[Phase.LOADING].last_bytes) == (700 * MIB, 400 * MIB)
    assert (peaks[Phase.LOADING].source, peaks[Phase.LOADING].interval_s) == ("script", 0.005)


async def test_a_phase_shorter_than_the_interval_is_still_read(card: ScriptedCard) -> None:
    meter = Meter(card, interval_s=1.0)
    await meter.start()
    await meter.phase(Phase.SHORT_REQUEST)
    card.used_bytes = 300 * MIB
    await meter.phase(Phase.SERVING)
    await meter.stop()
    assert {p.phase: p.peak_bytes for p in meter.peaks()}[Phase.SHORT_REQUEST] == 300 * MIB


async def test_stable_waits_for_the_end_of_a_climb(card: ScriptedCard) -> None:
    meter = Meter(card, interval_s=0.005)
    await meter.start()
    stable = asyncio.create_task(meter.stable(0.2, timeout_s=10))
    for step in range(20):
        card.used_bytes = (100 + 20 * step) * MIB
        await card.reads(3)
    assert not stable.done()
    assert await stable
    await meter.stop()


async def test_a_card_that_never_rests_is_not_stable(card: ScriptedCard) -> None:
    meter = Meter(card, interval_s=0.005)
    await meter.start()
    stable = asyncio.create_task(meter.stable(0.1, timeout_s=0.5))
    while not stable.done():
        card.used_bytes = 900 * MIB if card.used_bytes < 500 * MIB else 100 * MIB
        await card.reads(1)
    assert not await stable
    await meter.stop()


async def test_a_lost_card_is_remembered_and_ends_the_sampling(card: ScriptedCard) -> None:
    meter = Meter(card, interval_s=0.005)
    await meter.start()
    card.lost = True
    await card.reads(1)
    await meter.stop()
    assert isinstance(meter.lost, CardLost)
    assert meter.used_bytes == 100 * MIB
