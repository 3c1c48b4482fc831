"""Every Prometheus name of kvguard's own, in one place.

The request path counts into plain numbers, and Prometheus' objects are made when somebody reads them: its own
counters, with a lock and a label look-up each, cost a third of what all the rest of a request costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Seconds:
    """A histogram of durations."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(_BOUNDS_S, value_s)] += 1
        self.sum_s += value_s

    def buckets(self) -> list[tuple[str, float]]:
        bounds = [*map(str, _BOUNDS_S), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Metrics:
    """What the request path counts. Written in the event loop alone.

    A registry of its own, so that two guards in one process do not mix.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # route, ending
        self.refused: Counter[tuple[str, str]] = Counter()  # route, code
        self.replayed: Counter[str] = Counter()  # how
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.waited_s = Seconds()
        self.first_byte_s: defaultdict[str, Seconds] = defaultdict(Seconds)  # route
        self.duration_s: defaultdict[str, Seconds] = defaultdict(Seconds)  # route
        self.inflight = 0
        self.ready = False
        self.generation = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield _counter(
            "requests", "Admitted requests by how they ended", ("route", "ending"), self.requests.items()
        )
        yield _counter("refusals", "Requests refused by kvguard", ("route", "code"), self.refused.items())
        replayed = [((how,), count) for how, count in self.replayed.items()]
        yield _counter("replays", "Requests sent again after a restart", ("how",), replayed)
        yield CounterMetricFamily("kvguard_prompt_tokens", "Prompt tokens served", self.prompt_tokens)
        yield CounterMetricFamily("kvguard_new_tokens", "Tokens generated", self.new_tokens)
        yield _seconds("queue_wait", "Time in the queue", {"": self.waited_s})
        yield _seconds("first_byte", "Time from arrival to the answer's first byte", self.first_byte_s)
        yield _seconds("request", "Time from arrival to the end", self.duration_s)
        yield GaugeMetricFamily("kvguard_inflight_requests", "Requests held now", self.inflight)
        yield GaugeMetricFamily("kvguard_backend_ready", "1 while the backend serves", self.ready)
        yield GaugeMetricFamily("kvguard_backend_generation", "Backend lives so far", self.generation)


def _counter(
    name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[tuple[str, ...], int]]
) -> Metric:
    family = CounterMetricFamily(f"kvguard_{name}", text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def _seconds(name: str, text: str, by_route: dict[str, Seconds]) -> Metric:
    """Histograms by route; the empty route stands for one without that label."""
    labels = () if "" in by_route else ("route",)
    family = HistogramMetricFamily(f"kvguard_{name}_seconds", text, labels=labels)
    for route, seconds in by_route.items():
        family.add_metric((route,) if labels else (), seconds.buckets(), seconds.sum_s)
    return family
