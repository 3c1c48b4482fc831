"""Every Prometheus name of kvguard's own, in one place."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of the request path. A registry of its own, so that two guards in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "kvguard_requests_total", "Admitted requests by how they ended", ("route", "ending"), registry=r
        )
        self.refused = Counter(
            "kvguard_refusals_total", "Requests refused by kvguard", ("route", "code"), registry=r
        )
        self.replayed = Counter(
            "kvguard_replays_total", "Requests sent again after a restart", ("how",), registry=r
        )
        self.prompt_tokens = Counter("kvguard_prompt_tokens_total", "Prompt tokens served", registry=r)
        self.new_tokens = Counter("kvguard_new_tokens_total", "Tokens generated", registry=r)
        self.waited_s = Histogram(
            "kvguard_queue_wait_seconds", "Time in the queue", buckets=_SECONDS, registry=r
        )
        self.first_byte_s = Histogram(
            "kvguard_first_byte_seconds",
            "Time from arrival to the answer's first byte",
            ("route",),
            buckets=_SECONDS,
            registry=r,
        )
        self.duration_s = Histogram(
            "kvguard_request_seconds",
            "Time from arrival to the end",
            ("route",),
            buckets=_SECONDS,
            registry=r,
        )
        self.inflight = Gauge("kvguard_inflight_requests", "Requests that kvguard holds now", registry=r)
        self.ready = Gauge("kvguard_backend_ready", "1 while the backend serves", registry=r)
        self.generation = Gauge("kvguard_backend_generation", "Backend lives so far", registry=r)

    def render(self) -> bytes:
        return generate_latest(self.registry)
