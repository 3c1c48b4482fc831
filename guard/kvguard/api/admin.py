"""kvguard's own routes as a FastAPI application, with the engine's routes inside it.

    /health          200 only while the backend is ready
    /metrics         Prometheus
    /guard/status    what runs, who waits, the three accounts
    /guard/configs   the journal's configurations
    /guard/events    what happens, as server-sent events
    /guard/plan      what would fit on the card
    /guard/docs      this, for people; /guard/openapi.json for machines

What each of the four middle ones shows is made by whoever owns it and handed over as a callable.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvguard.api.asgi import App, Receive, Scope, Send
from kvguard.api.auth import Keys, is_loopback
from kvguard.api.errors import ErrorReply
from kvguard.domain import State
from kvguard.events import Events
from kvguard.metrics import Metrics
from kvguard.ports import Supervision

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

HEARTBEAT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """What the composition root hands over.

    admin_keys   keys of `/guard/*` and `/metrics`; none: only this machine may ask
    engine_metrics  the engine's own `/metrics` text, or None where it has none
    """

    supervision: Supervision
    metrics: Metrics
    events: Events
    admin_keys: Keys
    status: Callable[[], dict[str, Any]]
    configs: Callable[[], list[dict[str, Any]]]
    plan: Callable[[dict[str, str]], Awaitable[dict[str, Any]]]
    engine_metrics: Callable[[], Awaitable[bytes | None]] | None = None


class HotRoutes:
    """Pure-ASGI middleware that takes every path but kvguard's own past the router of the framework."""

    def __init__(self, app: App, hot: App) -> None:
        self._app = app
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_own(scope["path"]):
            await self._app(scope, receive, send)
        else:
            await self._hot(scope, receive, send)


def is_own(path: str) -> bool:
    """Whether a path is kvguard's own and not the engine's."""
    return path in ("/health", "/metrics", "/guard") or path.startswith("/guard/")


def make_admin(parts: AdminParts, hot: App, lifespan: Lifespan | None = None) -> FastAPI:
    """Build the application that kvguard serves: its own routes, and `hot` for all others."""
    app = FastAPI(
        title="kvguard",
        docs_url="/guard/docs",
        redoc_url=None,
        openapi_url="/guard/openapi.json",
        lifespan=lifespan,
    )
    app.add_middleware(HotRoutes, hot=hot)
    app.add_exception_handler(StarletteHTTPException, _as_openai)
    app.add_exception_handler(RequestValidationError, _as_openai)
    _add_health(app, parts)
    _add_guard(app, parts)
    return app


def _add_health(app: FastAPI, parts: AdminParts) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """200 only while the backend is ready; the state and the reason in words at every moment."""
        snapshot = parts.supervision.snapshot
        body = {
            "status": "ok" if snapshot.ready else snapshot.state.value,
            "generation": snapshot.generation,
            "config_id": snapshot.config_id,
            "degraded_by": [rung.value for rung in snapshot.degraded_by],
            "detail": snapshot.detail,
        }
        headers = {} if snapshot.ready or snapshot.state is State.FAILED else {"retry-after": "2"}
        return JSONResponse(body, status_code=200 if snapshot.ready else 503, headers=headers)

    @app.get("/metrics", dependencies=[Depends(_need_key(parts.admin_keys))])
    async def metrics() -> Response:
        """kvguard's own metrics, and the engine's behind them."""
        snapshot = parts.supervision.snapshot
        parts.metrics.ready = snapshot.ready
        parts.metrics.generation = snapshot.generation
        text = parts.metrics.render()
        if parts.engine_metrics is not None and snapshot.ready:
            text += await parts.engine_metrics() or b""
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_guard(app: FastAPI, parts: AdminParts) -> None:
    need_key = [Depends(_need_key(parts.admin_keys))]

    @app.get("/guard/status", dependencies=need_key)
    async def status() -> dict[str, Any]:
        """What runs, who waits, predicted and measured accounts."""
        return parts.status()

    @app.get("/guard/configs", dependencies=need_key)
    async def configs() -> list[dict[str, Any]]:
        """Provisional, confirmed and failed configurations of this card."""
        return await asyncio.to_thread(parts.configs)

    @app.get("/guard/events", dependencies=need_key)
    async def events(request: Request, recent: int = Query(50, ge=0, le=500)) -> StreamingResponse:
        """What happened lately and what happens from now on, as server-sent events."""
        return StreamingResponse(_event_lines(parts.events, recent), media_type="text/event-stream")

    @app.get("/guard/plan", dependencies=need_key)
    async def plan(request: Request) -> dict[str, Any]:
        """What would fit on the card."""
        return await parts.plan(dict(request.query_params))


async def _event_lines(events: Events, recent: int) -> AsyncIterator[bytes]:
    for event in events.recent()[-recent:] if recent else []:
        yield _sse(event)
    subscription = events.subscribe()
    upcoming = asyncio.ensure_future(anext(subscription))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=HEARTBEAT_S)
            if not done:
                yield b": keep-alive\n\n"
                continue
            yield _sse(upcoming.result())
            upcoming = asyncio.ensure_future(anext(subscription))
    finally:
        upcoming.cancel()


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, default=str).encode() + b"\n\n"


def _need_key(keys: Keys) -> Callable[[Request], None]:
    """The admin key; where there is none, only this machine may ask."""

    def check(request: Request) -> None:
        peer = request.client.host if request.client is not None else "127.0.0.1"
        if keys.name_of(request.scope["headers"]) is None or not (keys or is_loopback(peer)):
            raise HTTPException(401)

    return check


async def _as_openai(request: Request, exc: Exception) -> Response:
    if isinstance(exc, RequestValidationError):
        where = "; ".join(f"{error['loc'][-1]}: {error['msg']}" for error in exc.errors())
        error = ErrorReply(code="invalid_request", message=f"The request is not valid: {where}.")
    elif isinstance(exc, StarletteHTTPException) and exc.status_code == 401:
        error = ErrorReply(code="unauthorized", message="This route needs kvguard's admin key.")
    else:
        status = getattr(exc, "status_code", 500)
        error = ErrorReply(code="invalid_request", status=status, message=str(getattr(exc, "detail", exc)))
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, headers=headers)
