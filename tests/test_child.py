"""A backend process under its warden: limited, heard, ended, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvguard import leftovers
from kvguard.child import LONGEST_LINE_BYTES, Child, SpawnError
from kvguard.domain import MIB, ExitStatus, Launch
from serve_fixtures import gone

NEEDS_CGROUP = pytest.mark.skipif(os.geteuid() != 0, reason="making a memory cgroup needs root here")


def python(code: str, *args: str) -> Launch:
    return Launch(argv=(sys.executable, "-c", code, *args))


async def spawn(launch: Launch, run_dir: Path, *, limit_bytes: int | None = None) -> tuple[Child, list[str]]:
    lines: list[str] = []
    child = await Child.spawn(launch, memory_limit_bytes=limit_bytes, run_dir=run_dir, on_line=lines.append)
    return child, lines


async def test_lines_and_exit_status_arrive(tmp_path: Path) -> None:
    child, lines = await spawn(
        python("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"), tmp_path
    )
    assert await child.wait() == ExitStatus(code=3)
    await child.stop()
    assert sorted(lines) == ["one", "two"]


async def test_a_line_without_end_and_bad_bytes_are_bounded(tmp_path: Path) -> None:
    code = f"import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * {3 * LONGEST_LINE_BYTES})"
    child, lines = await spawn(python(code), tmp_path)
    await child.wait()
    await child.stop()
    assert lines
    assert lines[0].startswith("�x")
    assert max(map(len, lines)) <= LONGEST_LINE_BYTES


async def test_a_missing_program_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpawnError, match=r"/no/such/engine: No such file"):
        await spawn(Launch(argv=("/no/such/engine",)), tmp_path)


async def test_stop_ends_what_ignores_sigterm_and_all_its_children(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('up', flush=True)\n"
        "time.sleep(1000)\n"
    )
    child, lines = await spawn(python(code), tmp_path)
    while not lines:
        await _tick()
    pids = psutil.Process(child.pid).children(recursive=True)
    assert len(pids) == 1
    await child.stop(grace_s=0.1)
    assert child.status == ExitStatus(signal=signal.SIGKILL)
    assert gone([child.pid, *(p.pid for p in pids)])
    assert not list(tmp_path.iterdir())


async def _tick() -> None:
    import asyncio

    await asyncio.sleep(0.01)


@pytest.mark.cgroup
@NEEDS_CGROUP
async def test_the_kernel_kills_over_the_limit_and_is_counted(tmp_path: Path) -> None:
    child, _ = await spawn(
        python("x = []\nwhile True: x.append(bytearray(4 << 20))"), tmp_path, limit_bytes=64 * MIB
    )
    assert child.limit_kind.startswith("cgroup")
    assert await child.wait() == ExitStatus(signal=signal.SIGKILL, oom_kills=1)
    assert child.cgroup is not None
    await child.stop()
    assert not child.cgroup.exists()


@pytest.mark.cgroup
@NEEDS_CGROUP
@pytest.mark.parametrize("victim", ["guard", "guard and warden"])
def test_nothing_outlives_a_killed_parent(tmp_path: Path, victim: str) -> None:
    """The warden ends all when its parent dies; when both die at once, the next start sweeps."""
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from kvguard.child import Child\n"
        "from kvguard.domain import Launch\n"
        "async def main():\n"
        "    child = await Child.spawn(Launch(argv=('sleep', '1000')), memory_limit_bytes=64 << 20,\n"
        "                              run_dir=Path(sys.argv[1]), on_line=print)\n"
        "    print(child.pid, child.cgroup, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, cgroup = parent.stdout.readline().split()
    [warden] = psutil.Process(parent.pid).children()
    if victim == "guard and warden":
        warden.suspend()  # so that it cannot act before it is killed, too
    parent.kill()
    parent.wait()
    if victim == "guard and warden":
        warden.kill()
        assert psutil.pid_exists(int(pid))
        assert leftovers.sweep(tmp_path) == [int(pid)]
    assert gone([int(pid)])
    assert gone([warden.pid])
    assert not Path(cgroup).exists()


def test_a_reused_pid_is_never_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        note = leftovers.note(tmp_path, innocent.pid, None)
        facts = json.loads(note.read_text())
        note.write_text(json.dumps(facts | {"started_s": facts["started_s"] - 100, "guard_pid": 1 << 22}))
        assert leftovers.sweep(tmp_path) == []
        assert innocent.poll() is None
        assert not note.exists()
        innocent.kill()
