"""The record of one request in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvguard.continuation import Joint
from kvguard.demand import Draft
from kvguard.domain import Demand, Ending
from kvguard.lease import Lease
from kvguard.relay import Call, Reply
from kvguard.sse import End

SUSPECT_AT_CRASHES = 2
"""Memory crashes that a request must have been in flight at before it runs alone."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """Changed by the request's own task, except for what `Inflight.crashed` writes.

    body            as the client sent it; `call` holds what goes to the engine next
    must_start_by_s when its wait for a place ends, on the clock of the limiter
    demand, lease   its price, and its place while the engine has it or may have it
    sharpened       its prompt was counted, or cannot be
    generation      the backend life that it was sent to; -1 while it waits
    in_engine       it was sent there, and neither side has closed the connection
    unreached       attempts in a row that the engine has seen nothing of
    overflows       times that the engine failed it because the pool was full
    crashes         memory crashes that it was in flight at
    joint           rewrites the events of a continuation
    """

    request_id: str
    key: str
    path: str
    body: bytes
    call: Call
    draft: Draft
    reply: Reply
    arrived_at_s: float
    must_start_by_s: float
    priority: int = 0
    demand: Demand | None = None
    lease: Lease | None = None
    sharpened: bool = False
    generation: int = -1
    in_engine: bool = False
    sent_at_s: float = 0.0
    attempts: int = 0
    unreached: int = 0
    overflows: int = 0
    crashes: int = 0
    poisonous: bool = False
    taken_back: bool = False
    joint: Joint | None = None
    ending: Ending = Ending.FAILED
    end: End = field(default_factory=lambda: End(complete=False))

    @property
    def sequences(self) -> int:
        return self.demand.sequences if self.demand is not None else 1

    @property
    def suspect(self) -> bool:
        return self.crashes >= SUSPECT_AT_CRASHES
