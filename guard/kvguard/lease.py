"""A place in the engine: held by one request, of one backend life, given back exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvguard.domain import Demand, Ending


class Keeper(Protocol):
    """What a lease needs of the limiter."""

    def progressed(self, lease: Lease) -> None: ...

    def repriced(self, lease: Lease) -> None: ...

    def drains(self, lease: Lease) -> None: ...

    def released(self, lease: Lease, ending: Ending, new_tokens: int | None) -> None: ...


class Lease:
    """Written by the task of its request alone, read by the limiter.

    waited_s   how long the request stood in the queue
    drained_s  how long the engine took to free the place after `drain`; None until it was released
    taken_back kvguard has cancelled it to make room; it stops within a few steps
    void       its backend life is over: whatever is reported of it changes nothing
    """

    __slots__ = (
        "_keeper",
        "_take_back",
        "demand",
        "drained_s",
        "draining_since_s",
        "generation",
        "id",
        "key",
        "new_tokens",
        "released",
        "request_id",
        "started_s",
        "taken_back",
        "void",
        "waited_s",
    )

    def __init__(
        self, keeper: Keeper, *, id: int, generation: int, demand: Demand, key: str, request_id: str,
        started_s: float, waited_s: float,
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._take_back: Callable[[], None] | None = None
        self.id = id
        self.generation = generation
        self.demand = demand
        self.key = key
        self.request_id = request_id
        self.started_s = started_s
        self.waited_s = waited_s
        self.new_tokens = 0
        self.released = False
        self.taken_back = False
        self.void = False
        self.draining_since_s: float | None = None
        self.drained_s: float | None = None

    @property
    def live(self) -> bool:
        return not (self.released or self.void)

    @property
    def may_be_taken_back(self) -> bool:
        return self.live and self._take_back is not None and self.draining_since_s is None

    def progress(self, new_tokens: int) -> None:
        """Tokens that the longest sequence has streamed so far; more than one chunk may hold."""
        if new_tokens > self.new_tokens and self.live:
            self.new_tokens = new_tokens
            self._keeper.progressed(self)

    def reprice(self, demand: Demand) -> None:
        """The exact demand, where it was admitted on a bound."""
        if self.live:
            self.demand = demand
            self._keeper.repriced(self)

    def drain(self) -> None:
        """The client is gone, the engine has not freed the place yet: it is priced to its maximum."""
        if self.live and self.draining_since_s is None:
            self._keeper.drains(self)

    def release(self, ending: Ending, new_tokens: int | None = None) -> None:
        """The engine has freed the place. A second call, or one for a backend life that is over, is void."""
        if not self.released:
            self.released = True
            if not self.void:
                self._keeper.released(self, ending, new_tokens)

    def allow_take_back(self, take_back: Callable[[], None]) -> None:
        """Say that this request can be cancelled and replayed unnoticed; `take_back` is called at most once.

        It is called in the event loop, must not block, and sees that the engine is cancelled; the lease is
        released as soon as the engine has freed it, and the request goes to the head of the queue.
        """
        self._take_back = take_back

    def forbid_take_back(self) -> None:
        self._take_back = None

    def take_back(self) -> None:
        """Called by the limiter."""
        callback, self._take_back = self._take_back, None
        if callback is not None:
            self.taken_back = True
            callback()
