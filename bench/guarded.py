"""kvguard's request path in front of a running engine, without a supervisor. Prints its port."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from kvguard import log
from kvguard.api.admin import AdminParts, make_admin
from kvguard.api.auth import Keys
from kvguard.api.openai import GuardApp, GuardSettings
from kvguard.demand import Dialect
from kvguard.domain import Capacity, Endpoint
from kvguard.events import Events
from kvguard.limiter import Limiter
from kvguard.metrics import Metrics
from kvguard_policies.admission import Reserve
from kvguard_policies.ordering import FairOrder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes import FakeClient, FakeSupervision, ready

CAPACITY = Capacity(pool_tokens=1 << 20, ctx_tokens=8192, sequences=256)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("--log", type=Path, help="folder for the log, as `kvguard serve` writes it")
    args = parser.parse_args()
    log.configure("warning", args.log)
    endpoint = Endpoint(base_url=args.base_url, api_key="secret")
    supervision = FakeSupervision(ready(endpoint, capacity=CAPACITY))
    engine = FakeClient(endpoint)
    limiter = Limiter(policy=Reserve(), order=FairOrder())
    limiter.resize(1, CAPACITY)
    metrics = Metrics()
    hot = GuardApp(
        supervision=supervision,
        limiter=limiter,
        engine=lambda: engine,
        settings=GuardSettings(keys=Keys({}), dialect=Dialect.VLLM),
        metrics=metrics,
    )
    app = make_admin(_parts(supervision, metrics), hot)
    config = uvicorn.Config(
        app,
        port=0,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    background = asyncio.create_task(hot.run(), name="request-path")
    serving = asyncio.create_task(server.serve(), name="server")
    while not server.started:  # noqa: ASYNC110 uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await serving
    background.cancel()
    await hot.close()


def _parts(supervision: FakeSupervision, metrics: Metrics) -> AdminParts:
    async def plan(_: dict[str, str]) -> dict[str, Any]:
        return {}

    return AdminParts(
        supervision=supervision,
        metrics=metrics,
        events=Events(),
        admin_keys=Keys({}),
        status=dict,
        configs=list,
        plan=plan,
    )


if __name__ == "__main__":
    uvloop.run(main())
