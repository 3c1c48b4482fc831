"""What was learned of output lengths outlives a restart, and a bad file never stops a start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from kvguard.domain import Capacity, Demand, Ending
from kvguard.lengths import Lengths
from kvguard_policies.admission import make_policy
from kvguard_policies.admission.adaptive import Adaptive
from request_fixtures import until


def taught(finished: int = 60) -> Adaptive:
    policy = Adaptive()
    policy.resize(Capacity(pool_tokens=8192, ctx_tokens=4096, sequences=64, overflow="preempts"))
    teach(policy, finished)
    return policy


def teach(policy: Adaptive, finished: int) -> None:
    for lease_id in range(finished):
        policy.admit(lease_id, Demand(prompt_tokens=10, max_new_tokens=1000), "web")
        policy.release(lease_id, Ending.FINISHED, 20 + lease_id % 7)


def test_the_next_start_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    before, after = taught(), make_policy("adaptive")
    Lengths(before, tmp_path, "org/model:Q4").keep()
    Lengths(after, tmp_path, "org/model:Q4").recall()
    assert json.loads("".join(after.learned()))["curves"]
    assert "".join(after.learned()) == "".join(before.learned())


def test_another_model_starts_anew(tmp_path: Path) -> None:
    Lengths(taught(), tmp_path, "a").keep()
    after = make_policy("adaptive")
    Lengths(after, tmp_path, "b").recall()
    assert json.loads("".join(after.learned()))["curves"] == []


def test_a_name_stays_within_the_directory(tmp_path: Path) -> None:
    Lengths(taught(), tmp_path / "state", "../../etc/x").keep()
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "state"]


def test_a_torn_or_foreign_file_is_as_good_as_none(tmp_path: Path) -> None:
    policy = taught()
    Lengths(policy, tmp_path, "m").keep()
    (file,) = tmp_path.iterdir()
    for bad in (file.read_bytes()[:100], b"\xff\xfe", b"[]", b'{"schema": 99, "edges": 1, "curves": []}'):
        file.write_bytes(bad)
        fresh = make_policy("adaptive")
        Lengths(fresh, tmp_path, "m").recall()
        assert json.loads("".join(fresh.learned()))["curves"] == []


def test_a_directory_that_cannot_be_written_is_told_and_survived(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, not a directory")
    Lengths(taught(), tmp_path / "state", "m").keep()
    assert (tmp_path / "state").is_file()


async def test_it_is_written_under_way_and_only_when_something_is_new(tmp_path: Path) -> None:
    policy = taught()
    lengths = Lengths(policy, tmp_path, "m", interval_s=0.01)
    task = asyncio.create_task(lengths.run())
    try:
        await until(lambda: bool(list(tmp_path.glob("*.json"))))
        (file,) = tmp_path.glob("*.json")
        file.unlink()
        teach(policy, 1)
        await until(file.exists)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    file.unlink()
    lengths.keep()
    assert not file.exists()  # nothing is new


def test_no_piece_of_a_long_table_is_long() -> None:
    """Between pieces the event loop goes on, so a piece is what it waits for: one curve."""
    policy = taught()
    for number in range(100):
        for lease_id in range(50):
            policy.admit(lease_id, Demand(prompt_tokens=10, max_new_tokens=1000), f"key{number}")
            policy.release(lease_id, Ending.FINISHED, 1 + 19 * lease_id)
    pieces = list(policy.learned())
    assert len(pieces) > 100
    assert max(map(len, pieces)) < 6000


def test_a_policy_that_learns_nothing_writes_nothing(tmp_path: Path) -> None:
    Lengths(make_policy("reserve"), tmp_path, "m").keep()
    assert list(tmp_path.iterdir()) == []
