"""Backends that outlived both kvguard and their warden: noted at every spawn, swept at the next start.

A note names pid, start time and cgroup, so that a pid that was given to somebody else is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil

START_TIME_TOLERANCE_S = 0.05
PATIENCE_S = 5.0


def note(run_dir: Path, pid: int, cgroup: Path | None) -> Path:
    """Write down a backend that was just spawned. Returns the note, to be removed when it is gone."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = run_dir / f"backend-{pid}.json"
    started_s = 0.0
    with contextlib.suppress(psutil.Error):
        started_s = psutil.Process(pid).create_time()
    facts = {
        "pid": pid,
        "started_s": started_s,
        "cgroup": str(cgroup) if cgroup else None,
        "guard_pid": os.getpid(),
        "guard_started_s": psutil.Process().create_time(),
    }
    path.write_text(json.dumps(facts))
    return path


def sweep(run_dir: Path) -> list[int]:
    """Kill the noted backends whose kvguard is gone, and remove their cgroups. Returns the pids killed."""
    killed = []
    for path in run_dir.glob("backend-*.json"):
        try:
            facts = json.loads(path.read_text())
            pid, guard = int(facts["pid"]), int(facts["guard_pid"])
        except (OSError, ValueError, KeyError):
            path.unlink(missing_ok=True)
            continue
        if _is(guard, facts["guard_started_s"]):
            continue  # another kvguard on this state directory, and alive
        if _is(pid, facts["started_s"]):
            _kill_group(pid)
            killed.append(pid)
        if facts.get("cgroup"):
            _empty(Path(facts["cgroup"]))
        path.unlink(missing_ok=True)
    return killed


def _is(pid: int, started_s: float) -> bool:
    """Whether the process of that pid is the one that was noted, and runs."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started_s) < START_TIME_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _kill_group(pid: int) -> None:
    """A backend leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _empty(cgroup: Path) -> None:
    """Kill what is left in a cgroup that we made, and remove it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and cgroup.name.startswith("kvguard-"):
        with contextlib.suppress(OSError, ValueError):
            for pid in (cgroup / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return
