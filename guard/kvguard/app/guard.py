"""One running kvguard: the three loops wired around a Site, and what its admin routes show."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
import structlog
import uvicorn

from kvguard.api.admin import AdminParts, make_admin
from kvguard.api.auth import Keys
from kvguard.api.openai import GuardApp, GuardSettings
from kvguard.app.site import Site, card_of, client_keys
from kvguard.attached import AttachedLife
from kvguard.demand import Dialect
from kvguard.diagnosis import diagnose
from kvguard.domain import Accounts, Endpoint, Knobs, Refusal, Rung, Snapshot, State, Step
from kvguard.lengths import Lengths
from kvguard.life import BackendLife, Life, LifeSettings
from kvguard.limiter import Limiter
from kvguard.log import ENGINE_LOGGER
from kvguard.metrics import Metrics
from kvguard.priority import Priorities
from kvguard.quota import Quota
from kvguard.record import to_builtins
from kvguard.recovery import Recovery, RecoveryParts
from kvguard.report import dry_run_json, ready_message
from kvguard.settings import Settings
from kvguard.supervisor import Supervisor, SupervisorParts
from kvguard.watch import Watch
from kvguard.webhook import Webhook
from kvguard_policies.admission import make_policy
from kvguard_policies.degradation.climbing import CoolDown, climb
from kvguard_policies.degradation.ladder import DegradationLadder, parse_order
from kvguard_policies.ordering import FairOrder

_DIALECTS = {
    "llama-server": Dialect.LLAMA_SERVER,
    "embedded": Dialect.LLAMA_SERVER,
    "llama-cpp-python": Dialect.LLAMA_CPP_PYTHON,
    "vllm": Dialect.VLLM,
}

REFUTED_MARGIN = 2
"""A failure refutes a configuration while others hold about as much as then: so many percent of the card."""

METRICS_TIMEOUT_S = 2.0
LAST_WORDS_S = 3.0
"""How long answers may take to leave once the engine is gone."""

_SHUTTING_DOWN = Refusal(
    code="overloaded", message="kvguard is shutting down: try again soon.", retry_after_s=5.0
)

_engine_log = structlog.get_logger(ENGINE_LOGGER)


class Guard:
    """One running kvguard: the supervisor, the limiter and the HTTP surface around one Site."""

    def __init__(self, site: Site, listening: socket.socket) -> None:
        settings = site.settings
        self.site = site
        self._listening = listening
        self._events = site.events
        self._ladder = _ladder(settings, site.first.knobs)
        self.supervisor = Supervisor(self._supervisor_parts())
        policy = make_policy(settings.admission.policy)
        self.lengths = Lengths(policy, settings.state.directory, site.model_name)
        self.limiter = Limiter(
            policy=policy,
            order=FairOrder(settings.admission.weights),
            max_queue_requests=settings.admission.queue_requests,
            max_queue_bytes=settings.admission.queue_bytes,
            default_wait_s=settings.admission.deadline_s,
            quotas={name: Quota(**dict(quota)) for name, quota in settings.admission.quotas.items()},
        )
        self.metrics = Metrics()
        keys = client_keys(settings)
        self.hot = GuardApp(
            supervision=self.supervisor,
            limiter=self.limiter,
            engine=self._engine,
            settings=GuardSettings(
                keys=keys,
                dialect=self._dialect,
                wait_s=settings.admission.deadline_s,
                max_body_bytes=settings.server.max_body_bytes,
                ping_waiting=settings.admission.queue_keepalive,
                priorities=Priorities(settings.admission.priorities),
            ),
            metrics=self.metrics,
        )
        self.supervisor.set_blame(self.hot.inflight)
        self.supervisor.listen(self._on_snapshot)
        self.watch = Watch(
            supervision=self.supervisor,
            life=lambda: self.supervisor.life,
            card_free_bytes=self._card_free_bytes,
            observe=self.limiter.observe,
            overflows=lambda: self.hot.inflight.overflows,
        )
        self.recovery = Recovery(self._recovery_parts())
        admin_key = settings.server.admin_key
        self.http = make_admin(
            AdminParts(
                supervision=self.supervisor,
                metrics=self.metrics,
                events=self._events,
                admin_keys=Keys({"admin": admin_key} if admin_key else {}),
                status=self._status,
                configs=self._configs,
                plan=self._plan,
                engine_metrics=self._engine_metrics,
            ),
            hot=self.hot,
        )
        self._server = _Server(
            uvicorn.Config(
                self.http,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(settings.server.drain_timeout_s + 2 * LAST_WORDS_S) + 1,
            )
        )
        self._announced = False

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code. Raises StartFailed."""
        self.lengths.recall()
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self.supervisor.retry)
        url = self.site.settings.state.on_event
        supervision = asyncio.create_task(self.supervisor.run(), name="supervisor")
        helpers = [
            asyncio.create_task(self._server.serve(sockets=[self._listening]), name="http"),
            asyncio.create_task(self.hot.run(), name="request-path"),
            asyncio.create_task(self.watch.run(), name="watch"),
            asyncio.create_task(self.lengths.run(), name="lengths"),
            *([asyncio.create_task(self.recovery.run(), name="recovery")] if self.site.models else []),
            *([asyncio.create_task(Webhook(url, self._events).run(), name="webhook")] if url else []),
        ]
        waiting: asyncio.Task[Any] = asyncio.create_task(stopping.wait(), name="signals")
        try:
            everything: set[asyncio.Task[Any]] = {supervision, waiting, *helpers}
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            self._events.publish("stopping", inflight=len(self.hot.inflight))
            self.limiter.refuse_all(_SHUTTING_DOWN)
            self._server.should_exit = True
            drain_s = self.site.settings.server.drain_timeout_s
            await asyncio.wait(  # what runs may finish
                {helpers[0], supervision}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
            )
            self.supervisor.stop()
            await supervision  # raises what ended it; whoever still waits for the engine now hears of the end
            await asyncio.wait({helpers[0]}, timeout=LAST_WORDS_S)
            for task in helpers:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
        finally:
            self.supervisor.stop()
            self._server.should_exit = self._server.force_exit = True
            for task in (*helpers[1:], waiting):
                task.cancel()
            await asyncio.gather(supervision, *helpers, waiting, return_exceptions=True)
            self.lengths.keep()
            await self.hot.close()
        return 0

    # ------------------------------------------------------------ wiring

    def _supervisor_parts(self) -> SupervisorParts:
        site = self.site
        return SupervisorParts(
            first=site.first,
            wanted=site.wanted,
            make_life=self._make_life,
            options=self._options,
            predict=site.predict,
            diagnose=diagnose,
            ladder=self._ladder,
            recorder=site.recorder,
            events=site.events,
            usable_bytes=lambda: site.usable_bytes,
            restartable=site.backend.capabilities.restartable,
        )

    def _recovery_parts(self) -> RecoveryParts:
        site = self.site
        climber = _Climber(site)
        return RecoveryParts(
            supervisor=self.supervisor,
            ladder=self._ladder,
            options=self._options,
            predict=site.predict,
            refuted=lambda: site.recorder.refuted(
                self._others_bytes() + REFUTED_MARGIN * site.usable_bytes // 100
            ),
            busy=lambda: bool(self.limiter.running or self.limiter.waiting),
            card_free_bytes=self._card_free_bytes,
            up=climber.step,
            fell=climber.fell,
            quiet_s=site.settings.degrade.quiet_s,
        )

    def _others_bytes(self) -> int:
        """What other processes hold now; what they held at the start where nobody can tell."""
        life = self.supervisor.life
        if life is None:
            return 0
        now_bytes = getattr(getattr(life, "meter", None), "others_bytes", None)
        return life.others_bytes if now_bytes is None else int(now_bytes)

    def _options(self, knobs: Knobs) -> dict[Rung, Any]:
        return {rung: self.site.backend.next_steps(knobs, rung) for rung in self._ladder.order}

    def _make_life(self, knobs: Knobs) -> BackendLife:
        settings, backend = self.site.settings, self.site.backend
        if not backend.capabilities.restartable:
            return AttachedLife(
                backend,
                Endpoint(
                    base_url=settings.backend.attach.rstrip("/"), api_key=settings.backend.attach_api_key
                ),
                knobs,
                patience_s=settings.backend.start_stall_timeout_s,
                hang_timeout_s=30.0,
            )
        return Life(life_settings(self.site), knobs)

    def _engine(self) -> Any:
        life = self.supervisor.life
        return life.engine if life is not None and self.supervisor.snapshot.ready else None

    def _dialect(self) -> Dialect:
        """That of the engine that answers; an attached one has said what it is by then."""
        backend = self.site.backend
        return _DIALECTS.get(backend.name) or _DIALECTS.get(backend.version(), Dialect.UNKNOWN)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        """Tell the limiter what the backend can hold now, and people when it is ready."""
        if snapshot.ready and snapshot.capacity is not None:
            self.limiter.resize(snapshot.generation, snapshot.capacity)
            self._announce(snapshot)
        else:
            self.limiter.pause()
        if snapshot.state is State.FAILED:
            self.limiter.refuse_all(Refusal(code="backend_failed", message=snapshot.detail))

    def _announce(self, snapshot: Snapshot) -> None:
        if self._announced:
            return
        self._announced = True
        host, port = self._listening.getsockname()[:2]
        models = self.site.models
        print(
            ready_message(
                f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}",
                self.site.model_name,
                snapshot.knobs if models else None,
                needs_key=bool(client_keys(self.site.settings)),
                chat=not models or models[0].chat_template is not None,
            ),
            flush=True,
        )

    # ------------------------------------------------------------ what the admin routes show

    def _card_free_bytes(self) -> int | None:
        meter = getattr(self.supervisor.life, "meter", None)
        if meter is None:
            return None
        return int(meter.total_bytes - meter.used_bytes - self.site.headroom_bytes)

    def _status(self) -> dict[str, Any]:
        snapshot, site = self.supervisor.snapshot, self.site
        life = self.supervisor.life
        measured = site.backend.measured(life.load_lines()) if life is not None else None
        predicted = site.predict(snapshot.knobs or site.first.knobs)
        plain: dict[str, Any] = msgspec.to_builtins(
            {
                "state": snapshot.state.value,
                "generation": snapshot.generation,
                "detail": snapshot.detail,
                "config_id": snapshot.config_id,
                "degraded_by": [rung.value for rung in snapshot.degraded_by],
                "model": site.model_name,
                "backend": {"name": site.backend.name, "version": site.fingerprint.backend.version},
                "knobs": snapshot.knobs,
                "capacity": snapshot.capacity,
                "card": {
                    "kind": site.card.info.kind,
                    "name": site.card.info.name,
                    "total_bytes": site.card.info.total_bytes,
                    "headroom_bytes": site.headroom_bytes,
                    "free_above_headroom_bytes": self._card_free_bytes(),
                },
                "predicted": _totals(predicted),
                "measured": _totals(measured),
                "memory": life.peaks() if life is not None else (),
                "engine": self.watch.last
                and {"running": self.watch.last.running, "waiting": self.watch.last.waiting},
                "admission": self.limiter.status(),
                "last_failure": self.supervisor.last_failure,
            }
        )
        return plain

    def _configs(self) -> list[dict[str, Any]]:
        return [to_builtins(record) for record in self.site.recorder.records()]

    async def _engine_metrics(self) -> bytes | None:
        """The engine's own metrics; None where it has none or is too busy to tell."""
        endpoint = self.supervisor.snapshot.endpoint
        if endpoint is None:
            return None
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)) as session,
                session.get(endpoint.base_url + "/metrics", headers=headers) as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def _plan(self, query: dict[str, str]) -> dict[str, Any]:
        return plan_of(self.site)


def life_settings(site: Site) -> LifeSettings:
    """What is the same for every life of this site's backend."""
    settings = site.settings
    return LifeSettings(
        backend=site.backend,
        run_dir=settings.state.directory / "run",
        memory_limit_bytes=settings.memory.limit_bytes,
        card_of=lambda child: card_of(child, site.card),
        embedding=bool(site.models) and site.models[0].is_embedding,
        stall_timeout_s=settings.backend.start_stall_timeout_s,
        sample_interval_s=settings.memory.sample_interval_s,
        on_line=lambda line: _engine_log.info("engine_output", line=line),
        on_progress=lambda milestone: site.events.publish("backend_progress", milestone=milestone),
        on_limit=lambda kind, reason: _tell_limit(site, kind, reason),
    )


def _tell_limit(site: Site, kind: str, reason: str) -> None:
    """Say which memory limit is in force; a weaker one than was asked for is a warning with its reason."""
    if site.settings.memory.limit_bytes is not None:
        site.events.publish(
            "memory_limit", level="warning" if kind == "rlimit_as" else "info", kind=kind, reason=reason
        )


def _ladder(settings: Settings, first: Knobs) -> DegradationLadder:
    degrade = settings.degrade
    return DegradationLadder(
        parse_order(degrade.order),
        strict=degrade.strict,
        never=frozenset(Rung(name) for name in degrade.never),
        min_ctx_tokens=min(degrade.min_ctx, first.ctx_tokens),
        min_batch=degrade.min_batch,
    )


class _Climber:
    """The climbing policy with its cool-down."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._cool_down = CoolDown()

    def step(self, now: Knobs, refuted: Sequence[Knobs], now_s: float) -> Step | None:
        site = self._site
        return climb(
            parse_order(site.settings.degrade.order),
            site.wanted,
            now,
            self._fits,
            refuted,
            cool_down=self._cool_down,
            now_s=now_s,
            variants=[meta.variant() for meta in site.models],
        )

    def _fits(self, knobs: Knobs) -> bool:
        accounts = self._site.predict(knobs)
        return accounts is not None and accounts.total_bytes <= self._site.usable_bytes

    def fell(self, now_s: float) -> None:
        self._cool_down = self._cool_down.fell(now_s)


class _Server(uvicorn.Server):
    """Signals are ours: a stop drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _totals(accounts: Accounts | None) -> dict[str, int] | None:
    if accounts is None:
        return None
    return {
        "weights_bytes": accounts.weights_bytes,
        "kv_bytes": accounts.kv_bytes,
        "overhead_bytes": accounts.overhead_bytes,
    }


def why(site: Site) -> str:
    """Where the first configuration comes from, in words."""
    return f"from the journal: {site.first.why.from_id}" if site.first.why.from_id else "planned"


def command_of(site: Site) -> tuple[str, ...]:
    """The engine's command line for the first configuration, as a log may show it."""
    return site.backend.launch(site.first.knobs, port=0, api_key="").shown()


def plan_of(site: Site) -> dict[str, Any]:
    """The accounts of the first configuration, as JSON."""
    accounts = site.predict(site.first.knobs)
    if accounts is None:
        return {"why": "an attached backend has no accounts of ours"}
    return dry_run_json(
        accounts=accounts,
        card=site.card.info,
        usable_bytes=site.usable_bytes,
        knobs=site.first.knobs,
        command=command_of(site),
        why=why(site),
        fits=accounts.total_bytes <= site.usable_bytes,
    )
