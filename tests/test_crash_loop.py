"""kvguard itself is killed at random instants: nothing is left running or half written, and it starts again.

KVGUARD_CRASHES sets how many instants (default 12), KVGUARD_CRASH_SEED which ones.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from kvguard.journal import read_all
from recovery_fixtures import NEEDS_CGROUP, kill_engine, run_out_of_memory
from serve_fixtures import GuardProcess, gone, guard
from tiny_gguf import write_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.cgroup, NEEDS_CGROUP]

CRASHES = int(os.environ.get("KVGUARD_CRASHES", "12"))
SEED = int(os.environ.get("KVGUARD_CRASH_SEED", "1"))
CRASHES_A_TEST = 4
LONGEST_LATER_S = 0.4

STARTING = ("starting", "weights_loading", "kv_allocated", "confirming", "config_", "kvguard is ready")
"""What kvguard says on its way up; it is killed at one of these words or a little later."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(-(-CRASHES // CRASHES_A_TEST)))
def test_it_is_killed_at_any_instant_and_leaves_nothing(model: Path, tmp_path: Path, part: int) -> None:
    rng = random.Random(f"{SEED} {part}")
    args = (str(model), "--memory-limit", "300MiB", "--batch", "2")
    records = 0
    for _ in range(CRASHES_A_TEST):
        moment = rng.choice((*STARTING, "killed", "out of memory"))
        later_s = rng.uniform(0.0, LONGEST_LATER_S)
        said = f"killed {later_s:.3f} s after {moment!r}"
        with guard(*args, state_dir=tmp_path) as process:
            bring_to(process, moment)
            time.sleep(later_s)  # the instant is what is random: there is nothing to wait for
            below = process.engine_pids()
            process.process.kill()
            assert gone(below), said
        assert until_no_cgroup_of(process), said
        kept, _ = read_all(tmp_path)
        assert len(kept) >= records, said
        records = len(kept)
    with guard(*args, state_dir=tmp_path) as process:
        process.until_ready()
        assert process.client().completions.create(model="default", prompt="a", max_tokens=2).usage
        assert process.stop() == 0
    kept, unreadable = read_all(tmp_path)
    assert len(kept) > records
    assert unreadable == 0
    assert until_no_cgroup_of(process)
    assert not list((tmp_path / "run").glob("*.backend.json"))


def bring_to(process: GuardProcess, moment: str) -> None:
    if moment in STARTING:
        process.until_line(moment)
        return
    process.until_line("kvguard is ready")
    if moment == "killed":
        kill_engine(process)
    else:
        run_out_of_memory(process, 1 << 30)
    process.until_line("backend_died")


def until_no_cgroup_of(process: GuardProcess) -> bool:
    """Wait until no cgroup is left that this kvguard had made; its warden removes them."""
    root = Path("/sys/fs/cgroup")
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if not any(root.glob(f"**/kvguard-{process.process.pid}-*")):
            return True
        time.sleep(0.02)
    return False
