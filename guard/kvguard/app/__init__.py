"""Composition root: the only package that names concrete adapters and policies, and wires the three loops.

`serve` runs a guarded backend, `dry_run` says what it would run. `site` looks around, `guard` wires and runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine
from typing import Any

import uvloop
from rich.console import Console

from kvguard import log
from kvguard.api.auth import AuthError, check_listen
from kvguard.app.guard import Guard, command_of, plan_of, why
from kvguard.app.site import Site, client_keys, survey
from kvguard.app.tune import run_tune
from kvguard.events import Events
from kvguard.leftovers import sweep
from kvguard.model import ModelError
from kvguard.ports import BackendError, CardLost
from kvguard.report import print_dry_run
from kvguard.selection import CannotServe
from kvguard.settings import Settings
from kvguard.supervisor import StartFailed

__all__ = ["dry_run", "serve", "tune"]


def dry_run(settings: Settings, *, as_json: bool) -> int:
    """Print the accounts and the engine's command line; start nothing. Returns the exit code."""
    site = _surveyed(settings, Events())
    if site is None:
        return 1
    if as_json:
        print(json.dumps(plan_of(site), indent=2))
        return 0
    accounts = site.predict(site.first.knobs)
    if accounts is not None:
        print_dry_run(
            Console(),
            accounts=accounts,
            card=site.card.info,
            usable_bytes=site.usable_bytes,
            knobs=site.first.knobs,
            command=command_of(site),
            why=why(site),
        )
    return 0


def serve(settings: Settings) -> int:
    """Serve until told to stop. Returns the exit code: 0 after a stop, 1 when it could not start, 2 usage."""
    log_file = log.configure(settings.state.log_level, settings.state.directory / "log")
    events = Events()
    try:
        keys = client_keys(settings)
        check_listen(
            settings.server.host, has_keys=bool(keys), insecure_listen=settings.server.insecure_listen
        )
        listening = _listen(settings.server.host, settings.server.port)
    except (AuthError, CannotServe, OSError) as exc:
        return _complain(exc, 2 if isinstance(exc, AuthError) else 1)
    with contextlib.closing(listening):
        for pid in sweep(settings.state.directory / "run"):
            events.publish("leftover_killed", pid=pid)
        site = _surveyed(settings, events)
        if site is None:
            return 1
        events.publish(
            "starting",
            model=site.model_name,
            backend=f"{site.backend.name} {site.fingerprint.backend.version}",
            card=site.card.info.name,
            usable_bytes=site.usable_bytes,
            why=why(site),
            log_file=str(log_file),
        )
        try:
            return _run(_guard(site, listening))
        except StartFailed as exc:
            return _complain(exc, 1)


def tune(
    settings: Settings,
    *,
    repeats: int,
    budget_s: float,
    ctx_ladder: tuple[int, ...] = (),
    matrix: bool = False,
    as_json: bool = False,
) -> int:
    """Tune this card for this model. Returns the exit code."""
    log.configure("error", settings.state.directory / "log")
    sweep(settings.state.directory / "run")
    site = _surveyed(settings, Events())
    if site is None:
        return 1
    return run_tune(
        site, repeats=repeats, budget_s=budget_s, ctx_ladder=ctx_ladder, matrix=matrix, as_json=as_json
    )


async def _guard(site: Site, listening: socket.socket) -> int:
    return await Guard(site, listening).run()


def _run(work: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _surveyed(settings: Settings, events: Events) -> Site | None:
    try:
        return survey(settings, events)
    except (CannotServe, ModelError, BackendError, CardLost, ValueError) as exc:
        _complain(exc, 1)
        return None


def _complain(exc: Exception, code: int) -> int:
    Console(stderr=True).print(f"[bold red]error:[/] {exc}", highlight=False, soft_wrap=True)
    return code


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything is started. Raises CannotServe naming it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as exc:
        raise CannotServe(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}. "
            "Choose another port with --port, or 0 for a free one"
        ) from exc
    listening.setblocking(False)
    return listening
