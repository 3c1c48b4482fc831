"""Protocols that adapters and policies implement; each says who calls it, and what it may not do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvguard.domain import (
    Accounts,
    Capabilities,
    Capacity,
    CardInfo,
    CardReading,
    Decision,
    Demand,
    Ending,
    Endpoint,
    EngineSample,
    Exhausted,
    Failure,
    Knobs,
    Launch,
    Rung,
    Snapshot,
    Step,
    Ticket,
)


class Card(Protocol):
    """A memory device. Called by the meter at 20 Hz or faster: a read is short and never raises for pressure.

    Raises CardLost when the device is gone.
    """

    info: CardInfo

    def read(self, own_pids: Sequence[int] = ()) -> CardReading:
        """Read total, used and (where possible) our own bytes now."""


class CardLost(RuntimeError):
    """The memory device does not answer any more."""


class BackendError(RuntimeError):
    """Base of what an engine adapter raises."""


class NotReady(BackendError):
    """The engine is not up yet, or does not answer."""


class ProtocolError(BackendError):
    """The engine answered something that its adapter does not understand."""


class Engine(Protocol):
    """A live engine at an endpoint. Called from the event loop; every method is bounded in time.

    Raises NotReady when it cannot be reached, ProtocolError when its answer makes no sense.
    """

    async def healthy(self) -> bool:
        """True when it would serve a request now; False while it is loading. Never raises."""

    async def capacity(self, knobs: Knobs, log_lines: Sequence[str]) -> Capacity:
        """What it holds, from its own endpoints and start-up log."""

    async def sample(self) -> EngineSample:
        """One look at running, waiting, KV usage and slots."""

    async def count_tokens(self, path: str, body: Mapping[str, Any]) -> int:
        """Exact prompt tokens of one sequence of a request body on `path`, chat template and BOS included."""

    async def model_names(self) -> Sequence[str]:
        """Ids under `/v1/models`, the engine's own first."""

    async def close(self) -> None:
        """Release connections; the engine itself lives on."""


class Backend(Protocol):
    """A kind of engine. Used by the supervisor, planner and tuner."""

    name: str
    capabilities: Capabilities
    pinned: frozenset[str]
    """Fields of Knobs that the user's own engine arguments set: nobody changes them, no rung goes below."""

    def version(self) -> str:
        """Version of the installed engine; may run it once. Raises BackendError with the remedy."""

    def launch(self, knobs: Knobs, *, port: int, api_key: str) -> Launch:
        """The command line for these knobs on 127.0.0.1:port."""

    def connect(self, endpoint: Endpoint) -> Engine:
        """A client for a running engine."""

    def milestone(self, line: str) -> str | None:
        """Name of the start-up milestone that a log line marks (see Evidence.milestone), or None."""

    def measured(self, log_lines: Sequence[str]) -> Accounts | None:
        """The accounts that the engine printed at start-up; None if it printed none."""

    def log_filter(self) -> Callable[[str], str | None]:
        """A filter for one life's output: what of a line a log may show, None for nothing.

        Engines quote prompts, keys and bodies, so a line that the filter does not know is never shown.
        """

    def next_steps(self, knobs: Knobs, rung: Rung) -> Sequence[Knobs]:
        """Smaller configurations that differ from `knobs` in this rung alone, nearest first."""

    def dry_run(self, knobs: Knobs) -> Accounts | None:
        """Ask the engine what these knobs would take, without allocating; None where it cannot tell."""


class AdmissionPolicy(Protocol):
    """Decides who may run. Called by the limiter alone, in one task.

    Pure: no I/O, no clock, no logging. The questions change nothing; the limiter tells what came of them.
    """

    name: str

    def resize(self, capacity: Capacity) -> None:
        """A new backend life: forget all leases, keep what was learned. Called before anything else."""

    def never_fits(self, demand: Demand) -> Decision | None:
        """REFUSE what this capacity can never hold, with the numbers; None if it can be held."""

    def cost_tokens(self, demand: Demand) -> int:
        """The most KV tokens that a request may hold; a wait is predicted from it."""

    def decide(self, demand: Demand, key: str = "", *, now_s: float = 0.0) -> Decision:
        """ADMIT if it may start now, WAIT if later, REFUSE if it can never fit this capacity."""

    def may_pass(self, head: Demand, candidate: Demand) -> bool:
        """Whether `candidate`, which fits now, can start before `head` without moving the head's start."""

    def admit(self, lease_id: int, demand: Demand, key: str) -> None:
        """The limiter started this request."""

    def reprice(self, lease_id: int, demand: Demand) -> None:
        """Its demand is known better now."""

    def progress(self, lease_id: int, new_tokens: int) -> None:
        """Tokens that one lease has streamed so far (of its longest sequence)."""

    def drain(self, lease_id: int) -> None:
        """Nobody watches it any more: hold it at its maximum until its release."""

    def release(self, lease_id: int, ending: Ending, new_tokens: int | None) -> None:
        """The engine has freed it; `new_tokens` None where it never told."""

    def observe(self, sample: EngineSample) -> None:
        """What the engine and the card say of themselves."""

    def excess_tokens(self) -> int:
        """Tokens to take back now, before the pool overflows; 0 in all but the rarest moments."""

    def held_tokens(self, lease_id: int) -> int:
        """What taking this lease back would free."""

    def learned(self) -> Iterable[str]:
        """What was learned, as the pieces of a text to keep across restarts; none where there is nothing.

        Each piece is quick to make. The policy may go on learning between two of them.
        """

    def recall(self, text: str) -> None:
        """Take over what was learned before. Raises ValueError where it makes no sense."""

    def report(self) -> Mapping[str, float]:
        """Numbers for status and metrics: predicted peak, limit, and what else the policy goes by."""


class QueueOrder(Protocol):
    """Says whose turn it is. Called by the limiter alone, in one task. Pure: no I/O, no clock, no logging."""

    def push(self, ticket: Ticket) -> None:
        """A request joins the queue."""

    def remove(self, ticket: Ticket) -> None:
        """It left without a start."""

    def head(self) -> Ticket | None:
        """Whose turn it is."""

    def passers(self, limit: int) -> Sequence[Ticket]:
        """Those behind the head that may be looked at; none once the head was passed too often."""

    def started(self, ticket: Ticket) -> None:
        """It starts now: it leaves the queue, and its key pays for the prompt."""

    def served(self, key: str, new_tokens: int) -> None:
        """New tokens that a key's requests were given; negative: fewer prompts or tokens than charged."""

    def refund(self, demand: Demand, key: str) -> None:
        """A request that got no token at all: its key gets the prompt's charge back."""

    def ahead_tokens(self, ticket: Ticket) -> int:
        """Tokens of those that will start before this one."""

    def in_order(self) -> Sequence[Ticket]:
        """All that wait, in the order in which they would start."""

    def __len__(self) -> int: ...


class Ladder(Protocol):
    """Chooses the next smaller configuration. Called by the supervisor alone. Pure."""

    def next(
        self,
        failure: Failure,
        current: Knobs,
        options: Mapping[Rung, Sequence[Knobs]],
        refuted: Sequence[Knobs],
        *,
        need_bytes: int | None = None,
        frees: Callable[[Knobs], int] | None = None,
    ) -> Step | Exhausted:
        """The step to take from `current`; Exhausted where no step is left or none is called for.

        options     per rung what `Backend.next_steps(current, rung)` gave
        refuted     configurations that are known to fail here; none of them is ever returned
        need_bytes  what is missing on the card that ran out, if known
        frees       what a configuration frees there against `current` (negative: it takes more)
        """


class Supervision(Protocol):
    """What the request path sees of the supervisor (`kvguard.supervisor`); read-only."""

    @property
    def snapshot(self) -> Snapshot:
        """The present one; immutable."""

    async def changed(self, than: Snapshot) -> Snapshot:
        """Wait until the snapshot is another one, and return it."""

    async def verdict(self, generation: int) -> Snapshot:
        """Tell a relay whose upstream broke what became of that backend life.

        Returns a READY snapshot of the same generation (the engine lives: the error is the request's own),
        a READY one of a later generation (replay there), or one in FAILED or STOPPED (give up).
        """
