"""A stand-in for kvguard as a process: guards one backend until it is killed or its stdin is closed.

Usage: warden_driver.py '{"argv": [...], "memory_limit_bytes": N or null, "run_dir": "..."}'
Prints one JSON line with what it guards, and at the end one with how that ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from kvguard.child import Child
from kvguard.domain import Launch


async def main(order: dict[str, Any]) -> None:
    marker = asyncio.Event()
    child = await Child.spawn(
        Launch(argv=tuple(order["argv"])),
        memory_limit_bytes=order["memory_limit_bytes"],
        run_dir=Path(order["run_dir"]),
        on_line=lambda line: marker.set() if line == "up" else None,
    )
    await asyncio.wait({asyncio.create_task(marker.wait()), asyncio.create_task(child.memory_gone())},
                       return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    guarded = {
        "pids": list(child.pids()),
        "warden": child._warden.pid,
        "cgroup": str(child.cgroup) if child.cgroup else None,
        "limit_kind": child.limit_kind,
        "limit_reason": child.limit_reason,
    }
    print(json.dumps(guarded), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await child.stop(1.0)
    print(json.dumps({"ended": str(child.status)}), flush=True)


asyncio.run(main(json.loads(sys.argv[1])))
