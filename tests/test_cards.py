"""Cgroups as they are laid out on real machines, the machine's own memory, and which of them binds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvguard.cgroups import Limit, OwnCgroups, can_make, make_limit, own_cgroups
from kvguard.domain import GIB, MIB
from kvguard.ports import CardLost
from kvguard_adapters.cards import CgroupCard, HostCard, ProcessCard, binding_card, detect_cards

V1_UNLIMITED = 9223372036854771712
OWN = own_cgroups()

needs_v1 = pytest.mark.skipif(
    OWN.v1 is None or not os.access(OWN.v1, os.W_OK), reason="no memory cgroup can be made here: needs root"
)


def v1_cgroup(
    path: Path,
    *,
    limit: int = V1_UNLIMITED,
    usage: int = 0,
    inactive: int = 0,
    active: int = 0,
    mapped: int = 0,
) -> Path:
    """The files that a card reads, as kernel 6 writes them."""
    path.mkdir(parents=True, exist_ok=True)
    stat = (
        "cache 7\nrss 5\ninactive_file 3\nactive_file 3\nmapped_file 3\ntotal_cache 9\n"
        f"total_inactive_file {inactive}\ntotal_active_file {active}\ntotal_mapped_file {mapped}\n"
    )
    for name, text in {
        "cgroup.procs": "",
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": stat,
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }.items():
        (path / name).write_text(text)
    return path


def v2_cgroup(
    path: Path,
    *,
    limit: int | None = None,
    usage: int = 0,
    inactive: int = 0,
    active: int = 0,
    mapped: int = 0,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    stat = (
        f"anon 5\nfile 9\nkernel 1\nfile_mapped {mapped}\ninactive_anon 2\nactive_anon 3\n"
        f"inactive_file {inactive}\nactive_file {active}\n"
    )
    for name, text in {
        "cgroup.procs": "",
        "cgroup.controllers": "cpu memory pids\n",
        "cgroup.subtree_control": "",
        "memory.max": "max\n" if limit is None else f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": stat,
        "memory.events": "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n",
        "memory.swap.max": "max\n",
        "memory.oom.group": "0\n",
        "cgroup.kill": "",
    }.items():
        (path / name).write_text(text)
    return path


def v2_root(path: Path) -> Path:
    """The root has no limit, no usage and no kill of its own."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").write_text("1\n2\n")
    (path / "cgroup.controllers").write_text("cpu memory pids\n")
    (path / "cgroup.subtree_control").write_text("")
    return path


# ---------------------------------------------------------------- reading

Make = Callable[..., Path]
BOTH = pytest.mark.parametrize("make", [v1_cgroup, v2_cgroup])


@BOTH
def test_used_leaves_out_page_cache_and_all_of_it_is_the_backends(tmp_path: Path, make: Make) -> None:
    card = CgroupCard(make(tmp_path / "a", limit=GIB, usage=700 * MIB, inactive=500 * MIB), name="limit")
    reading = card.read()
    assert (card.info.kind, card.info.name, card.info.total_bytes) == ("cgroup", "limit", GIB)
    assert (reading.used_bytes, reading.own_bytes, reading.free_bytes) == (200 * MIB, 200 * MIB, 824 * MIB)
    assert reading.source == f"cgroup {card.info.driver} less unmapped page cache"
    assert card.info.driver == ("v1" if make is v1_cgroup else "v2")


@BOTH
@pytest.mark.parametrize(
    ("mapped", "used"),
    [(0, 200), (100, 300), (500, 700), (600, 700)],  # shared memory counts as mapped, and is no page cache
)
def test_page_cache_is_in_use_as_far_as_it_is_mapped(
    tmp_path: Path, make: Make, mapped: int, used: int
) -> None:
    path = make(tmp_path / "a", limit=1000, usage=700, inactive=200, active=300, mapped=mapped)
    assert CgroupCard(path).read().used_bytes == used


@BOTH
def test_the_tightest_limit_above_binds(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "pod", limit=2 * GIB, usage=1900 * MIB, inactive=100 * MIB)
    card = CgroupCard(make(tmp_path / "pod" / "container", limit=GIB, usage=500 * MIB))
    reading = card.read()
    assert card.info.total_bytes == GIB
    assert reading.free_bytes == 248 * MIB  # of the pod: 2048 - 1800
    assert reading.own_bytes == 500 * MIB

    make(tmp_path / "pod", limit=512 * MIB, usage=500 * MIB)
    card = CgroupCard(tmp_path / "pod" / "container")
    assert (card.info.total_bytes, card.read().free_bytes) == (512 * MIB, 12 * MIB)


@BOTH
def test_a_cgroup_without_any_limit_is_no_card(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "a")
    with pytest.raises(CardLost, match="has a memory limit"):
        CgroupCard(make(tmp_path / "a" / "b"))
    with pytest.raises(CardLost, match="is not a memory cgroup"):
        CgroupCard(tmp_path)


@BOTH
def test_only_the_level_above_may_have_the_limit(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "a", limit=GIB, usage=100 * MIB)
    card = CgroupCard(make(tmp_path / "a" / "b", usage=60 * MIB))
    reading = card.read()
    assert (reading.total_bytes, reading.used_bytes, reading.own_bytes) == (GIB, 100 * MIB, 60 * MIB)


def test_more_than_the_limit_is_all_used(tmp_path: Path) -> None:
    """The kernel may charge a little over it, and a limit may be lowered under the usage."""
    reading = CgroupCard(v2_cgroup(tmp_path / "a", limit=100, usage=120)).read()
    assert (reading.used_bytes, reading.free_bytes) == (120, 0)


def test_a_shared_cgroup_counts_our_processes(tmp_path: Path) -> None:
    card = CgroupCard(v2_cgroup(tmp_path / "a", limit=64 * GIB, usage=32 * GIB), shared=True)
    rss = psutil.Process().memory_info().rss
    assert card.read().own_bytes is None
    assert card.read([os.getpid()]).own_bytes == pytest.approx(rss, rel=0.2)


@BOTH
def test_a_cgroup_that_is_removed_is_lost(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path / "a", limit=GIB)
    card = CgroupCard(path)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    with pytest.raises(CardLost, match=f"{path} is gone"):
        card.read()


@pytest.mark.cgroup
@needs_v1
def test_a_real_cgroup_shows_what_a_process_takes() -> None:
    assert OWN.v1 is not None
    limit = make_limit(256 * MIB, f"kvg-cards-{os.getpid()}", OWN)
    assert limit.path is not None
    try:
        card = CgroupCard(limit.path)
        before = card.read().used_bytes
        code = (
            "a = bytearray(100 << 20)\nfor i in range(0, len(a), 4096): a[i] = 1\nprint(flush=True)\ninput()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code],
            preexec_fn=limit.enter,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            grown = card.read().used_bytes - before
            process.kill()
        assert 100 * MIB <= grown < 130 * MIB
        assert card.info.total_bytes == 256 * MIB
    finally:
        limit.remove()
    with pytest.raises(CardLost):
        card.read()


# ---------------------------------------------------------------- which binds


def test_the_smaller_of_container_and_machine_binds(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    small = v2_cgroup(tmp_path / "small", limit=GIB)
    large = v1_cgroup(tmp_path / "large", limit=total + GIB)
    assert binding_card([small], gpu=False).info.name == "container memory"
    assert binding_card([large], gpu=False).info.kind == "host"
    assert binding_card([v1_cgroup(tmp_path / "none"), tmp_path], gpu=False).info.kind == "host"
    assert [c.info.total_bytes for c in detect_cards([large, small], gpu=False)] == [GIB, total, total + GIB]


def test_gpus_of_others_are_named_and_host_memory_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = v2_cgroup(tmp_path / "a", limit=GIB)
    cards = detect_cards([container], amd_driver=tmp_path)
    assert {card.info.kind for card in cards} <= {"host", "cgroup", "nvml"}
    for card in cards:
        if card.info.kind != "nvml":
            assert card.info.detail.endswith("AMD GPUs are not supported yet, host memory used")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert "Apple GPUs are not supported yet" in detect_cards([], amd_driver=tmp_path / "no")[-1].info.detail


def test_the_machine_counts_what_is_not_available() -> None:
    reading = HostCard().read([os.getpid()])
    assert reading.total_bytes == psutil.virtual_memory().total
    assert 0 < reading.used_bytes < reading.total_bytes
    assert reading.own_bytes is not None
    assert reading.own_bytes > 0


def test_a_bare_limit_counts_resident_memory_and_no_dead_process() -> None:
    card = ProcessCard(GIB)
    with subprocess.Popen(["true"]) as dead:
        pass
    both, alone = card.read([os.getpid(), dead.pid]), card.read([os.getpid()])
    assert both.used_bytes == pytest.approx(alone.used_bytes, rel=0.2)
    assert (alone.total_bytes, alone.own_bytes) == (GIB, alone.used_bytes)


# ---------------------------------------------------------------- where this process is


def proc(path: Path, cgroup: str, mountinfo: str) -> Path:
    path.mkdir()
    (path / "cgroup").write_text(cgroup)
    (path / "mountinfo").write_text(mountinfo)
    return path


def test_on_a_hybrid_machine_v1_has_the_memory(tmp_path: Path) -> None:
    v1, v2 = tmp_path / "memory", tmp_path / "unified"
    (v1 / "user" / "me").mkdir(parents=True)
    v2.mkdir()
    own = own_cgroups(
        proc(
            tmp_path / "proc",
            "5:cpu,cpuacct:/x\n4:memory:/user/me\n1:name=systemd:/\n0::/\n",
            f"32 31 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"35 31 0:32 / {v1} rw,relatime shared:9 master:1 - cgroup cgroup rw,memory\n"
            f"41 31 0:38 / {v2} rw - cgroup2 cgroup2 rw\n",
        )
    )
    assert own == OwnCgroups(v1 / "user" / "me", v2)
    assert own.paths() == (v1 / "user" / "me", v2)


@pytest.mark.parametrize(
    ("root", "path", "inside"),
    [
        ("/", "/user.slice/app.scope", "user.slice/app.scope"),
        ("/", "/", "."),  # a container with a namespace of its own
        ("/docker/abc", "/docker/abc/sub", "sub"),  # one that sees its part of the tree
        ("/docker/abc", "/docker/abc", "."),
        ("/", "/docker/not-mounted-here", "."),
        ("/..", "/../elsewhere", "."),
    ],
)
def test_a_v2_path_is_found_through_its_mount(tmp_path: Path, root: str, path: str, inside: str) -> None:
    mount = tmp_path / "cgroup"
    (mount / inside).mkdir(parents=True, exist_ok=True)
    own = own_cgroups(
        proc(
            tmp_path / "proc",
            f"0::{path}\n",
            f"30 23 0:26 {root} {mount} rw - cgroup2 cgroup rw,nsdelegate\n",
        )
    )
    assert own == OwnCgroups(None, mount / inside)


def test_a_process_without_cgroups_is_in_none(tmp_path: Path) -> None:
    assert own_cgroups(proc(tmp_path / "proc", "", "")) == OwnCgroups(None, None)


def test_this_process_is_where_the_kernel_lists_it() -> None:
    for path in own_cgroups().paths():
        assert str(os.getpid()) in (path / "cgroup.procs").read_text().split()


# ---------------------------------------------------------------- making a limit under v2


def kernel_mkdir(path: Path) -> None:
    """The kernel fills a new cgroup with the files of the controllers that its parent hands down."""
    path.mkdir()
    handed_down = "memory" in (path.parent / "cgroup.subtree_control").read_text()
    v2_cgroup(path)
    if not handed_down:
        for file in path.glob("memory.*"):
            file.unlink()


def test_under_v2_a_backend_gets_a_cgroup_beside_ours(tmp_path: Path) -> None:
    """Not below: a cgroup that has processes may not hand a controller down."""
    root = v2_root(tmp_path / "root")
    own = v2_cgroup(root / "session.scope")
    (own / "cgroup.procs").write_text("11\n12\n")
    limit = make_limit(GIB, "kvg-x", OwnCgroups(None, own), mkdir=kernel_mkdir)
    path = root / "kvg-x"
    assert (limit.kind, limit.path) == ("cgroup_v2", path)
    assert "+memory" in (root / "cgroup.subtree_control").read_text()
    assert (path / "memory.max").read_text().startswith(str(GIB))
    assert (path / "memory.swap.max").read_text().startswith("0")
    assert (path / "memory.oom.group").read_text().startswith("1")
    assert limit.oom_kills() == 0  # those before it do not count
    (path / "memory.events").write_text("oom 3\noom_kill 4\n")
    assert limit.oom_kills() == 2


def test_at_the_root_it_is_below(tmp_path: Path) -> None:
    root = v2_root(tmp_path / "root")
    limit = make_limit(GIB, "kvg-x", OwnCgroups(None, root), mkdir=kernel_mkdir)
    assert limit.path == root / "kvg-x"


def test_in_a_scope_of_its_own_the_warden_moves_to_a_leaf(tmp_path: Path) -> None:
    root = v2_root(tmp_path / "root")
    scope = v2_cgroup(root / "run-u7.scope")
    (scope / "cgroup.procs").write_text(f"{os.getpid()}\n")
    limit = make_limit(GIB, "kvg-x", OwnCgroups(None, scope), mkdir=kernel_mkdir)
    assert limit.path == scope / "kvg-x"
    assert (scope / "warden" / "cgroup.procs").read_text().startswith(str(os.getpid()))


@pytest.mark.parametrize(
    ("controllers", "reason"),
    [
        ("cpu pids\n", "cgroup v2: no memory controller"),
        ("memory\n", "cgroup v2: No such file or directory at "),
    ],
)
def test_where_no_memory_controller_is_handed_down_the_reason_is_told(
    tmp_path: Path, controllers: str, reason: str
) -> None:
    root = v2_root(tmp_path / "root")
    own = v2_cgroup(root / "own")
    (own / "cgroup.controllers").write_text(controllers)

    def mkdir(path: Path) -> None:
        path.mkdir()

    limit = make_limit(GIB, "kvg-x", OwnCgroups(None, own), mkdir=mkdir)
    assert (limit.kind, limit.path) == ("rlimit_as", None)
    assert limit.reason.startswith(reason)
    assert limit.reason.endswith("; cgroup v1: not mounted")
    assert not (root / "kvg-x").exists()


def test_what_may_be_made_follows_permissions(tmp_path: Path) -> None:
    root = v2_root(tmp_path / "root")
    assert can_make(OwnCgroups(None, v2_cgroup(root / "own")))
    assert can_make(OwnCgroups(v1_cgroup(tmp_path / "v1"), None))
    assert not can_make(OwnCgroups(None, None))
    (root / "cgroup.controllers").write_text("cpu\n")
    assert not can_make(OwnCgroups(None, root))


def test_no_limit_asked_for_is_none() -> None:
    limit: Limit = make_limit(None, "kvg-x", OWN)
    assert (limit.kind, limit.path, limit.reason) == ("none", None, "")
