"""A backend under its warden: real processes, real cgroups, and nothing left however kvguard goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from kvguard import leftovers, processes, warden
from kvguard.cgroups import Limit, own_cgroups
from kvguard.child import Child, SpawnError
from kvguard.domain import MIB, ExitStatus, Launch

DRIVER = Path(__file__).parent / "warden_driver.py"
OWN = own_cgroups()
PATIENCE_S = 60.0

needs_v1 = pytest.mark.skipif(
    OWN.v1 is None or not os.access(OWN.v1, os.W_OK), reason="no memory cgroup can be made here: needs root"
)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("daemon", os.getpid(), flush=True)
    time.sleep(600)
os.wait()
print("up", flush=True)
"""
HOG = "a = bytearray(256 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1\nprint('ate it all')"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-c", code)


class Lines:
    """A child's output as a test waits for it."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._moved = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.all.append(line)
        self._moved.set()

    async def until(self, start: str) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for line in self.all:
                    if line.startswith(start):
                        return line
                self._moved.clear()
                await self._moved.wait()


@contextlib.asynccontextmanager
async def spawned(
    run_dir: Path, code: str, *, limit: int | None = None, env: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[tuple[Child, Lines]]:
    lines = Lines()
    child = await Child.spawn(
        Launch(argv=python(code), env=env), memory_limit_bytes=limit, run_dir=run_dir, on_line=lines
    )
    try:
        yield child, lines
    finally:
        await child.stop(0.0)


def lives(pid: int) -> bool:
    process = processes.look(pid)
    return process is not None and process.alive


def until(condition: Callable[[], bool]) -> bool:
    """Poll what tells of no event: other people's processes and directories."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


# ---------------------------------------------------------------- start and end


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; print('bye', file=sys.stderr)", ExitStatus(code=0)),
        ("print('bye'); raise SystemExit(3)", ExitStatus(code=3)),
        ("import os; print('bye', flush=True); os.abort()", ExitStatus(signal=signal.SIGABRT)),
    ],
)
async def test_the_end_is_reported_after_the_last_line(
    tmp_path: Path, code: str, expected: ExitStatus
) -> None:
    async with spawned(tmp_path, code) as (child, lines):
        assert await child.wait() == expected
        assert lines.all == ["bye"]
        assert child.signal_sender == ""
        await child.memory_gone()
        assert list(tmp_path.iterdir()) == []


async def test_a_backend_leads_a_session_and_gets_no_input_and_none_of_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGUARD_SERVER__API_KEYS", '{"a": "secret"}')
    monkeypatch.setenv("ORDINARY", "kept")
    code = (
        "import os, sys; print(os.getsid(0) == os.getpgrp() == os.getpid(), sys.stdin.read() == '', "
        "os.environ.get('KVGUARD_SERVER__API_KEYS'), os.environ['ORDINARY'], os.environ['GIVEN'], "
        "len(os.listdir('/proc/self/fd')))"
    )
    async with spawned(tmp_path, code, env=(("GIVEN", "too"),)) as (child, lines):
        await child.wait()
    assert lines.all == ["True True None kept too 4"]  # three, and the one that lists


async def test_where_memory_is_short_the_kernel_takes_the_backend_before_us(tmp_path: Path) -> None:
    code = "print('score', open('/proc/self/oom_score_adj').read().strip(), flush=True); " + SLEEP
    async with spawned(tmp_path, code) as (child, lines):
        ours, wardens = (
            int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            for pid in (os.getpid(), psutil.Process(child.pid).ppid())
        )
        assert wardens == ours
        assert await lines.until("score") == f"score {min(1000, ours + warden.OOM_SCORE)}"


async def test_what_cannot_be_started_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for argv in (("/no/such/engine",), (str(tmp_path),)):
        with pytest.raises(SpawnError, match=f"{argv[0]}: (No such file|Permission denied)"):
            await Child.spawn(
                Launch(argv=argv), memory_limit_bytes=64 * MIB, run_dir=run_dir, on_line=lambda line: None
            )
    assert list(run_dir.iterdir()) == []


async def test_stop_asks_first(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); " + SLEEP
    async with spawned(tmp_path, code) as (child, lines):
        await lines.until("up")
        await child.stop(PATIENCE_S)
        assert child.status == ExitStatus(code=7)
        await child.stop(PATIENCE_S)


async def test_stop_kills_what_does_not_listen_and_says_that_it_was_us(tmp_path: Path) -> None:
    async with spawned(tmp_path, DEAF) as (child, lines):
        await lines.until("up")
        await child.stop(0.1)
        assert child.status == ExitStatus(signal=signal.SIGKILL)
        assert child.signal_sender == "kvguard"


async def test_a_second_stop_shortens_the_patience_of_the_first(tmp_path: Path) -> None:
    async with spawned(tmp_path, DEAF) as (child, lines):
        await lines.until("up")
        first = asyncio.create_task(child.stop(3600.0))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await child.stop(0.1)
            await first


async def test_a_kill_from_outside_is_not_taken_for_ours(tmp_path: Path) -> None:
    async with spawned(tmp_path, SLEEP) as (child, lines):
        await lines.until("up")
        os.kill(child.pid, signal.SIGKILL)
        assert await child.wait() == ExitStatus(signal=signal.SIGKILL)
        assert child.signal_sender == ""


@pytest.mark.parametrize("limit", [None, pytest.param(200 * MIB, marks=[pytest.mark.cgroup, needs_v1])])
async def test_what_a_backend_left_behind_goes_with_it(tmp_path: Path, limit: int | None) -> None:
    """A process in a session of its own, deaf to SIGTERM, whose parents are gone."""
    async with spawned(tmp_path, DAEMON, limit=limit) as (child, lines):
        daemon = int((await lines.until("daemon")).split()[1])
        assert await child.wait() == ExitStatus(code=0)
        await child.memory_gone()
        assert not lives(daemon)
        assert child.cgroup is None or not child.cgroup.exists()


async def test_the_process_tree_has_the_backend_first_and_its_orphans(tmp_path: Path) -> None:
    work = "\nwhile time.process_time() < 0.1: pass\nprint('worked', flush=True); time.sleep(600)"
    async with spawned(tmp_path, DAEMON + work) as (child, lines):
        daemon = int((await lines.until("daemon")).split()[1])
        await lines.until("worked")
        assert list(child.pids()) == [child.pid, daemon]
        assert child.cpu_s() >= 0.05


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    launch = Launch(argv=python(SLEEP))
    start = asyncio.create_task(
        Child.spawn(launch, memory_limit_bytes=None, run_dir=tmp_path, on_line=lambda line: None)
    )
    assert await asyncio.to_thread(until, _has_warden)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not _has_warden()
    assert list(tmp_path.iterdir()) == []


def _has_warden() -> bool:
    return any(map(_is_warden, processes.descendants(os.getpid())))


def _is_warden(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"kvguard.warden" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_it_works_on_the_loop_that_serves(tmp_path: Path) -> None:
    async def life() -> ExitStatus:
        async with spawned(tmp_path, DEAF) as (child, lines):
            await lines.until("up")
            await child.stop(0.1)
            assert child.status is not None
            return child.status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(life()) == ExitStatus(signal=signal.SIGKILL)


# ---------------------------------------------------------------- output


async def test_output_that_is_not_text_and_lines_without_end_stay_bounded(tmp_path: Path) -> None:
    code = (
        "import sys; w = sys.stdout.buffer.write\n"
        "w(b'caf\\xe9\\n'); w(b'10%\\r20%\\r\\n'); w(b'x' * (5 << 20) + b'\\nafter\\n'); w(b'no end')"
    )
    async with spawned(tmp_path, code) as (child, lines):
        await child.wait()
    assert lines.all == ["caf\ufffd", "10%", "20%", "x" * (16 << 10), "after", "no end"]


async def test_a_line_that_is_not_taken_is_reported_and_the_backend_goes_on(tmp_path: Path) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(str(what["exception"])))
    seen: list[str] = []

    def on_line(line: str) -> None:
        seen.append(line)
        if line == "bad":
            raise ValueError("no such thing")

    code = "for line in ('good', 'bad', 'better'): print(line, flush=True)"
    child = await Child.spawn(
        Launch(argv=python(code)), memory_limit_bytes=None, run_dir=tmp_path, on_line=on_line
    )
    assert await child.wait() == ExitStatus(code=0)
    await child.memory_gone()
    assert seen == ["good", "bad", "better"]
    assert reported == ["no such thing"]


async def test_a_flood_leaves_the_event_loop_its_turns(tmp_path: Path) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    seen: dict[int, int] = {}

    def on_line(line: str) -> None:
        seen[turns] = seen.get(turns, 0) + 1

    counting = asyncio.create_task(count())
    code = "import sys\nfor _ in range(200): sys.stdout.write('z\\n' * 1000)"
    child = await Child.spawn(
        Launch(argv=python(code)), memory_limit_bytes=None, run_dir=tmp_path, on_line=on_line
    )
    await child.memory_gone()
    counting.cancel()
    assert sum(seen.values()) == 200_000
    assert max(seen.values()) < 128


# ---------------------------------------------------------------- limits


@pytest.mark.cgroup
@needs_v1
async def test_the_limit_binds_from_the_first_byte_and_the_kernels_kill_is_counted(tmp_path: Path) -> None:
    async with spawned(tmp_path, HOG, limit=100 * MIB) as (child, lines):
        assert child.limit_kind == "cgroup_v1"
        assert child.cgroup is not None
        assert child.cgroup.parent == OWN.v1
        assert await child.wait() == ExitStatus(signal=signal.SIGKILL, oom_kills=1)
        assert lines.all == []
        assert child.signal_sender == ""
        await child.memory_gone()
        assert not child.cgroup.exists()
        assert child.oom_kills() == 1


@pytest.mark.cgroup
@needs_v1
async def test_a_worker_that_the_kernel_killed_is_seen_while_the_backend_lives(tmp_path: Path) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    print('child', flush=True)\n"
        "    a = bytearray(256 << 20)\n    for i in range(0, len(a), 4096): a[i] = 1\n"
        "os.wait()\nprint('up', flush=True)\ntime.sleep(600)"
    )
    async with spawned(tmp_path, code, limit=100 * MIB) as (child, lines):
        await lines.until("up")
        assert child.status is None
        assert child.oom_kills() == 1


@pytest.mark.cgroup
@needs_v1
async def test_the_backend_is_inside_and_its_warden_is_not(tmp_path: Path) -> None:
    code = "print(open('/proc/self/cgroup').read()); " + SLEEP
    async with spawned(tmp_path, code, limit=100 * MIB) as (child, lines):
        await lines.until("up")
        assert child.cgroup is not None
        assert any(line.endswith(f"/{child.cgroup.name}") and ":memory:" in line for line in lines.all)
        assert (child.cgroup / "memory.limit_in_bytes").read_text().strip() == str(100 * MIB)
        assert list(child.pids()) == [child.pid]


# ---------------------------------------------------------------- kvguard goes


class Driver:
    """A kvguard-like process that a test may kill."""

    def __init__(
        self, run_dir: Path, code: str, *, limit: int | None = None, prefix: tuple[str, ...] = (), **env: str
    ) -> None:
        order = {"argv": python(code), "memory_limit_bytes": limit, "run_dir": str(run_dir)}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(DRIVER), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the driver did not start"
        self.guarded: dict[str, Any] = json.loads(line)
        self.pids: list[int] = [*self.guarded["pids"], self.guarded["warden"]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def drivers() -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(*args: Any, **options: Any) -> Driver:
        started.append(Driver(*args, **options))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.mark.parametrize("limit", [None, pytest.param(200 * MIB, marks=[pytest.mark.cgroup, needs_v1])])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_nothing_is_left_when_kvguard_is_killed(
    tmp_path: Path, drivers: Callable[..., Driver], number: int, limit: int | None
) -> None:
    driver = drivers(tmp_path, DAEMON + "time.sleep(600)", limit=limit)
    assert len(driver.guarded["pids"]) == 2
    assert all(map(lives, driver.pids))
    driver.process.send_signal(number)
    driver.process.wait(PATIENCE_S)
    assert until(lambda: not any(map(lives, driver.pids)))
    assert list(tmp_path.iterdir()) == []
    if limit is not None:
        assert not Path(driver.guarded["cgroup"]).exists()


@pytest.mark.parametrize("limit", [None, pytest.param(200 * MIB, marks=[pytest.mark.cgroup, needs_v1])])
async def test_a_killed_warden_takes_its_backend_along(tmp_path: Path, limit: int | None) -> None:
    async with spawned(tmp_path, DAEMON + "time.sleep(600)", limit=limit) as (child, lines):
        await lines.until("up")
        pids = list(child.pids())
        os.kill(child._warden.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            assert await child.wait() == ExitStatus(signal=signal.SIGKILL)
            await child.memory_gone()
        assert len(pids) == 2
        assert not any(map(lives, pids))
        assert list(tmp_path.iterdir()) == []
        assert child.cgroup is None or not child.cgroup.exists()


@pytest.mark.parametrize("limit", [None, pytest.param(200 * MIB, marks=[pytest.mark.cgroup, needs_v1])])
def test_a_start_sweeps_what_nobody_guards_and_nothing_else(
    tmp_path: Path, drivers: Callable[..., Driver], limit: int | None
) -> None:
    """kvguard and its warden are both killed; a second kvguard in the same directory goes on."""
    dead = drivers(tmp_path, DAEMON + "time.sleep(600)", limit=limit)
    alive = drivers(tmp_path, SLEEP, limit=limit)
    os.kill(dead.process.pid, signal.SIGSTOP)  # it must not clean up after its warden
    os.kill(dead.guarded["warden"], signal.SIGKILL)
    dead.kill()
    backend, daemon = dead.guarded["pids"]
    assert until(lambda: not lives(backend))
    assert lives(daemon)

    assert leftovers.sweep(tmp_path) == [daemon]
    assert not lives(daemon)
    if limit is not None:
        assert not Path(dead.guarded["cgroup"]).exists()
    assert all(map(lives, alive.pids))
    assert leftovers.sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1


def test_a_sweep_waits_for_a_warden_that_is_at_it(tmp_path: Path, drivers: Callable[..., Driver]) -> None:
    driver = drivers(tmp_path, SLEEP)
    driver.kill()
    assert leftovers.sweep(tmp_path) == []
    assert not any(map(lives, driver.guarded["pids"]))


def test_a_sweep_kills_no_stranger(tmp_path: Path) -> None:
    """A pid that was used again, one of another boot, a cgroup that is not the backend's, a torn file."""
    with subprocess.Popen(python(SLEEP), stdout=subprocess.PIPE) as stranger:
        process = processes.look(stranger.pid)
        assert process is not None
        exact, reused = [stranger.pid, process.started], [stranger.pid, process.started - 1]
        record = {"boot": processes.boot_id(), "kvguard": [1, 1], "warden": [1, 1], "cgroup": None}
        for name, facts in {
            "reused": {"backend": reused},
            "old-boot": {"backend": exact, "boot": "another"},
            "not-our-cgroup": {"backend": reused, "cgroup": str(OWN.v1 or OWN.v2)},
        }.items():
            leftovers.record_path(tmp_path, name).write_text(json.dumps({**record, "name": name, **facts}))
        leftovers.record_path(tmp_path, "torn").write_text('{"name": "z", "war')
        assert leftovers.sweep(tmp_path) == []
        assert stranger.poll() is None
        assert list(tmp_path.iterdir()) == []

        record |= {"name": "exact", "backend": exact}  # the same record with nothing wrong does kill
        leftovers.record_path(tmp_path, "exact").write_text(json.dumps(record))
        assert leftovers.sweep(tmp_path) == [stranger.pid]


# ---------------------------------------------------------------- where no cgroup can be made

READ_ONLY = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -o remount,bind,ro /sys/fs/cgroup/memory && exec "$@"',
    "sh",
)


def _can_unshare() -> bool:
    if OWN.v1 is None or shutil.which("unshare") is None:
        return False
    return subprocess.run([*READ_ONLY, "true"], capture_output=True, check=False).returncode == 0


needs_read_only = pytest.mark.skipif(
    not _can_unshare(), reason="a read-only cgroup mount needs root and cgroup v1"
)


@needs_read_only
def test_without_a_cgroup_the_address_space_is_limited_and_the_reason_told(
    tmp_path: Path, drivers: Callable[..., Driver]
) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, flush=True); " + SLEEP
    driver = drivers(tmp_path, code, limit=300 * MIB, prefix=READ_ONLY, PATH="/usr/bin:/bin")
    assert driver.guarded["limit_kind"] == "rlimit_as"
    assert "cgroup v1: Read-only file system" in driver.guarded["limit_reason"]
    assert "cgroup v2: no memory controller" in driver.guarded["limit_reason"]
    [pid] = driver.guarded["pids"]
    assert f"{300 * MIB}" in Path(f"/proc/{pid}/limits").read_text()
    driver.kill()
    assert until(lambda: not any(map(lives, driver.pids)))


@needs_read_only
@pytest.mark.parametrize("body", ['while [ "$1" != -- ]; do shift; done; shift; exec "$@"', "exit 1"])
def test_a_systemd_scope_is_asked_for_where_a_cgroup_needs_one_and_done_without_where_it_fails(
    tmp_path: Path, drivers: Callable[..., Driver], body: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    script = tools / "systemd-run"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{body}\n')
    script.chmod(0o755)
    driver = drivers(
        tmp_path / "run", SLEEP, limit=300 * MIB, prefix=READ_ONLY, PATH=f"{tools}:/usr/bin:/bin"
    )
    assert (tmp_path / "asked").read_text().startswith("--scope --quiet --collect -p Delegate=yes -- ")
    assert driver.guarded["limit_kind"] == "rlimit_as"
    assert all(map(lives, driver.pids))


# ---------------------------------------------------------------- cgroup v2, the real one


V2_MOUNT = (
    Path("/sys/fs/cgroup/unified") if Path("/sys/fs/cgroup/unified").exists() else Path("/sys/fs/cgroup")
)


@pytest.mark.cgroup
@pytest.mark.skipif(
    not (V2_MOUNT / "cgroup.controllers").exists() or not os.access(V2_MOUNT, os.W_OK),
    reason="needs a cgroup v2 mount that we may write",
)
def test_a_v2_cgroup_is_entered_killed_at_once_and_removed(tmp_path: Path) -> None:
    path = V2_MOUNT / f"kvg-warden-{os.getpid()}"
    path.mkdir()
    limit = Limit("cgroup_v2", OWN, path=path)
    try:
        process = subprocess.Popen(
            python("import os\n" + "os.fork(); " * 3 + SLEEP), preexec_fn=limit.enter, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(8):
            process.stdout.readline()
        assert process.pid in limit.pids()
        assert len(limit.pids()) == 8
        limit.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert until(lambda: limit.pids() == [])
    finally:
        limit.remove()
    assert not path.exists()


def test_the_warden_needs_nothing_but_the_standard_library() -> None:
    """It must start fast, and must not break with what is installed."""
    [*python_flags, code] = warden.command()
    probe = code.replace("main()", "print(*{m.partition('.')[0] for m in sys.modules})")
    loaded = set(
        subprocess.run([*python_flags, probe], capture_output=True, text=True, check=True).stdout.split()
    )
    assert loaded - set(sys.stdlib_module_names) <= {"__main__", "kvguard", "sitecustomize"}
