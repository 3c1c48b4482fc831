"""A discrete-event model of an engine's scheduler, driven by the real limiter in virtual time.

Two kinds of engine. `preempts`, like vLLM: continuous batching, chunked prefill, KV in blocks, the youngest
sequence preempted and recomputed when blocks run out. `fails_all`, like llama-server with a unified pool:
slots, one pool of cells, and at overflow every running request fails.

Time is virtual: the event loop's clock is the model's, so that the limiter's timers fire when the model says.
Pure decode is advanced many steps at once; what the limiter sees of it (tokens streamed, ends) is the same.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvguard.domain import Capacity, Demand, Ending, EngineSample, Refusal
from kvguard.lease import Lease
from kvguard.limiter import Limiter

SAMPLE_INTERVAL_S = 0.5
MOST_STEPS_AT_ONCE = 16
SETTLE_TURNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """What an engine can hold and how long a step takes it.

    step_s = base_s + decode_s * sequences that decode + kv_s * tokens held + prefill_s * prompt tokens
    watermark is the share of blocks that the engine itself keeps free when it starts a request.
    """

    pool_tokens: int
    ctx_tokens: int
    sequences: int = 256
    block_tokens: int = 16
    prefill_tokens: int = 2048
    overflow: Literal["preempts", "fails_all"] = "preempts"
    watermark: float = 0.0
    base_s: float = 0.012
    decode_s: float = 0.0001
    kv_s: float = 5e-8
    prefill_s: float = 0.00005

    def capacity(self) -> Capacity:
        return Capacity(
            pool_tokens=self.pool_tokens, ctx_tokens=self.ctx_tokens, sequences=self.sequences,
            block_tokens=self.block_tokens, overflow=self.overflow, prefill_tokens=self.prefill_tokens,
        )  # fmt: skip

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a workload; `length` is what the model would say if nothing cut it off."""

    at_s: float
    prompt_tokens: int
    length: int
    max_new_tokens: int | None
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDemand(Demand):
    """A demand that carries the true length, for the oracle alone."""

    length: int = 0


@dataclass(slots=True, eq=False)
class Run:
    """What became of one request."""

    arrival: Arrival
    outcome: str = "waiting"
    code: str = ""
    started_at_s: float | None = None
    first_token_at_s: float | None = None
    ended_at_s: float | None = None
    new_tokens: int = 0
    longest_gap_s: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    replays: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at_s is None else self.first_token_at_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        if self.first_token_at_s is None or self.ended_at_s is None or self.new_tokens < 2:
            return 0.0
        return (self.ended_at_s - self.first_token_at_s) / (self.new_tokens - 1)


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One request inside the engine. `target` tokens are to be computed before it decodes (on)."""

    run: Run
    length: int
    target: int
    done: Callable[[Ending], None]
    progress: Callable[[int], None]
    computed: int = 0
    new_tokens: int = 0
    last_token_at_s: float | None = None

    @property
    def decodes(self) -> bool:
        return self.computed >= self.target


class Engine:
    """The scheduler's loop, one step or many equal ones at a time."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.now_s = 0.0
        self.running: list[EngineSequence] = []
        self.waiting: deque[EngineSequence] = deque()
        self.preemptions = 0
        self.overflows = 0
        self.used_token_seconds = 0.0
        self.peak_tokens = 0

    # ------------------------------------------------------------ what others see

    def used_tokens(self) -> int:
        block = self.model.block_tokens
        return sum(-(-seq.computed // block) for seq in self.running) * block

    def sample(self) -> EngineSample:
        tells = self.model.overflow == "preempts"
        return EngineSample(
            at_s=self.now_s,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_used_tokens=self.used_tokens() if tells else None,
            preemptions_total=self.preemptions if tells else None,
            overflows_total=None if tells else self.overflows,
        )

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def submit(self, seq: EngineSequence) -> None:
        self.waiting.append(seq)

    def cancel(self, run: Run) -> None:
        for place in (self.running, self.waiting):
            for seq in [seq for seq in place if seq.run is run]:
                place.remove(seq)
                seq.done(Ending.CANCELLED)

    # ------------------------------------------------------------ the loop

    def advance(self, until_s: float) -> None:
        """Do some work, at most until shortly after `until_s`."""
        steps = self._equal_steps(until_s)
        if steps > 1:
            self._decode_many(steps)
        else:
            self._step()

    def _equal_steps(self, until_s: float) -> int:
        """How many steps will be decode of the same sequences and nothing else."""
        running = self.running
        if not running or not all(seq.decodes for seq in running) or (self.waiting and self._may_start()):
            return 0
        spare = (self._free_blocks() // len(running) - 1) * self.model.block_tokens
        step_s = self._step_s(len(running), 0)
        return min(
            MOST_STEPS_AT_ONCE, min(seq.length - seq.new_tokens for seq in running), spare,
            math.ceil((until_s - self.now_s) / step_s),
        )  # fmt: skip

    def _decode_many(self, steps: int) -> None:
        took_s = steps * self._step_s(len(self.running), 0)
        self._spend(took_s)
        for seq in self.running:
            seq.computed += steps
            self._emit(seq, steps, took_s / steps)
        self._finish()

    def _step(self) -> None:
        work = self._schedule()
        decoding = [seq for seq, _ in work if seq.decodes]
        prefilled = sum(tokens for seq, tokens in work if not seq.decodes)
        self._spend(self._step_s(len(decoding), prefilled))
        for seq, tokens in work:
            seq.computed += tokens
            if seq.decodes:
                self._emit(seq, 1, 0.0)
        self._finish()

    def _spend(self, took_s: float) -> None:
        used = self.used_tokens()
        self.peak_tokens = max(self.peak_tokens, used)
        self.used_token_seconds += used * took_s
        self.now_s += took_s

    def _step_s(self, decoding: int, prefilled: int) -> float:
        m = self.model
        held = sum(seq.computed for seq in self.running)
        return m.base_s + m.decode_s * decoding + m.kv_s * held + m.prefill_s * prefilled

    def _emit(self, seq: EngineSequence, tokens: int, gap_s: float) -> None:
        run = seq.run
        if run.first_token_at_s is None:
            run.first_token_at_s = self.now_s
        elif seq.last_token_at_s is not None:
            since_s = self.now_s - seq.last_token_at_s
            run.longest_gap_s = max(run.longest_gap_s, since_s if tokens == 1 else gap_s)
        seq.last_token_at_s = self.now_s
        seq.new_tokens += tokens
        run.new_tokens = max(run.new_tokens, seq.new_tokens)

    def _finish(self) -> None:
        finished = [seq for seq in self.running if seq.new_tokens >= seq.length]
        self.running = [seq for seq in self.running if seq.new_tokens < seq.length]
        for (
            seq
        ) in finished:  # none of them can be cancelled any more, whatever the limiter says to its progress
            seq.run.ended_at_s = self.now_s
            seq.progress(seq.new_tokens)
            seq.done(Ending.TRUNCATED if seq.length < seq.run.arrival.length else Ending.FINISHED)
        for seq in list(self.running):
            seq.progress(seq.new_tokens)

    # ------------------------------------------------------------ scheduling

    def _free_blocks(self) -> int:
        m = self.model
        return m.pool_tokens // m.block_tokens - sum(m.blocks(seq.computed) for seq in self.running)

    def _may_start(self) -> bool:
        m = self.model
        if len(self.running) >= m.sequences or not self.waiting:
            return False
        kept = int(m.watermark * (m.pool_tokens // m.block_tokens)) if self.running else 0
        first = min(self.waiting[0].target, m.prefill_tokens)
        return self._free_blocks() - kept >= m.blocks(first)

    def _schedule(self) -> list[tuple[EngineSequence, int]]:
        return self._schedule_slots() if self.model.overflow == "fails_all" else self._schedule_blocks()

    def _schedule_blocks(self) -> list[tuple[EngineSequence, int]]:
        """Running sequences first, in order of arrival; the last one gives way; then new ones."""
        m, budget, free = self.model, self.model.prefill_tokens, self._free_blocks()
        work: list[tuple[EngineSequence, int]] = []
        preempted = False
        at = 0
        while at < len(self.running):
            seq = self.running[at]
            tokens = 1 if seq.decodes else min(budget, seq.target - seq.computed)
            need = m.blocks(seq.computed + tokens) - m.blocks(seq.computed)
            while need > free and self.running[-1] is not seq:
                free += self._preempt()
                preempted = True
            if need > free:
                self._preempt()
                preempted = True
                break
            if tokens > 0:
                work.append((seq, tokens))
                free -= need
                budget -= tokens
            at += 1
        work = [(seq, tokens) for seq, tokens in work if seq in self.running]
        kept = int(m.watermark * (m.pool_tokens // m.block_tokens))
        while not preempted and self.waiting and budget > 0 and len(self.running) < m.sequences:
            seq = self.waiting[0]
            tokens = min(budget, seq.target)
            if m.blocks(tokens) > free - (kept if self.running else 0):
                break
            self.running.append(self.waiting.popleft())
            work.append((seq, tokens))
            free -= m.blocks(tokens)
            budget -= tokens
        return work

    def _preempt(self) -> int:
        seq = self.running.pop()
        freed = self.model.blocks(seq.computed)
        seq.run.preemptions += 1
        seq.run.recomputed_tokens += seq.computed
        self.preemptions += 1
        seq.target, seq.computed = seq.run.arrival.prompt_tokens + seq.new_tokens, 0
        self.waiting.appendleft(seq)
        return freed

    def _schedule_slots(self) -> list[tuple[EngineSequence, int]]:
        """Decode of all slots and prompts in one batch; at overflow everyone fails."""
        m = self.model
        while self.waiting and len(self.running) < m.sequences:
            self.running.append(self.waiting.popleft())
        work = [(seq, 1) for seq in self.running if seq.decodes]
        budget = m.prefill_tokens - len(work)
        for seq in self.running:
            if not seq.decodes and budget > 0:
                tokens = min(budget, seq.target - seq.computed)
                work.append((seq, tokens))
                budget -= tokens
        if sum(seq.computed for seq in self.running) + sum(tokens for _, tokens in work) > m.pool_tokens:
            self.overflows += 1
            failed, self.running = self.running, []
            for seq in failed:
                seq.done(Ending.FAILED)
            return []
        return work


# ---------------------------------------------------------------- the request path, in virtual time


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is the model's."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Report:
    """Everything that a simulation saw."""

    runs: list[Run]
    duration_s: float
    preemptions: int
    overflows: int
    mean_used_share: float
    peak_used_share: float
    taken_back: int
    policy: dict[str, float] = field(default_factory=dict)


class Simulation:
    """One policy in front of one engine, for one workload."""

    def __init__(
        self, engine: Engine, limiter: Limiter, arrivals: Sequence[Arrival], *, ttft_s: float,
        loop: VirtualLoop, take_back: bool,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._limiter = limiter
        self._arrivals = deque(arrivals)
        self._ttft_s = ttft_s
        self._loop = loop
        self._take_back = take_back
        self._tasks: set[asyncio.Task[None]] = set()
        self.runs = [Run(arrival) for arrival in arrivals]

    async def run(self) -> Report:
        """Drive until the last arrival; what is unfinished then counts for nobody."""
        engine, pending = self._engine, deque(self.runs)
        end_s = pending[-1].arrival.at_s
        self._limiter.resize(1, engine.model.capacity())
        next_sample_s = 0.0
        while engine.now_s < end_s:
            while pending and pending[0].arrival.at_s <= engine.now_s:
                self._spawn(pending.popleft())
            if engine.now_s >= next_sample_s:
                self._limiter.observe(engine.sample())
                next_sample_s = engine.now_s + SAMPLE_INTERVAL_S
            await self._settle()
            until_s = min(pending[0].arrival.at_s if pending else end_s, next_sample_s)
            if engine.idle:
                engine.now_s = max(engine.now_s, until_s)
            else:
                engine.advance(until_s)
            self._loop.now_s = engine.now_s
        status = self._limiter.status()
        for task in list(self._tasks):
            task.cancel()
        await self._settle()
        return Report(
            runs=self.runs, duration_s=end_s, preemptions=engine.preemptions, overflows=engine.overflows,
            mean_used_share=engine.used_token_seconds / (engine.model.pool_tokens * max(end_s, 1e-9)),
            peak_used_share=engine.peak_tokens / engine.model.pool_tokens,
            taken_back=status.taken_back_total, policy=dict(status.policy_report),
        )  # fmt: skip

    async def _settle(self) -> None:
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    def _spawn(self, run: Run) -> None:
        task = self._loop.create_task(self._serve(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, run: Run) -> None:
        """The request path in small: wait for a place, be replayed where kvguard takes it back."""
        arrival = run.arrival
        demand = KnownDemand(
            prompt_tokens=arrival.prompt_tokens, max_new_tokens=arrival.max_new_tokens, length=arrival.length
        )
        while True:
            answer = await self._limiter.acquire(
                demand, key=arrival.key, deadline_s=arrival.at_s + self._ttft_s, front=run.replays > 0
            )
            if isinstance(answer, Refusal):
                run.outcome, run.code = "refused", answer.code
                return
            run.started_at_s = run.started_at_s or self._engine.now_s
            ending = await self._in_engine(run, answer)
            if ending is not Ending.CANCELLED:
                run.outcome = "failed" if ending is Ending.FAILED else "done"
                return
            run.replays += 1

    async def _in_engine(self, run: Run, lease: Lease) -> Ending:
        arrival, ended = run.arrival, self._loop.create_future()
        room = self._engine.model.ctx_tokens - arrival.prompt_tokens
        most = room if arrival.max_new_tokens is None else min(room, arrival.max_new_tokens)

        def done(ending: Ending) -> None:
            run.recomputed_tokens += run.new_tokens if ending is Ending.CANCELLED else 0
            lease.release(ending, run.new_tokens)
            if not ended.done():
                ended.set_result(ending)

        if self._take_back:
            lease.allow_take_back(lambda: self._engine.cancel(run))
        self._engine.submit(
            EngineSequence(
                run=run, length=max(1, min(arrival.length, most)), target=arrival.prompt_tokens, done=done,
                progress=lease.progress,
            )
        )  # fmt: skip
        ending: Ending = await ended
        return ending


MakeLimiter = Callable[[Engine, Callable[[], float]], Limiter]


def simulate(
    model: EngineModel, make_limiter: MakeLimiter, arrivals: Sequence[Arrival], *, ttft_s: float,
    take_back: bool = True,
) -> Report:  # fmt: skip
    """Run one simulation on a loop of its own."""
    loop, engine = VirtualLoop(), Engine(model)
    try:
        limiter = make_limiter(engine, loop.time)
        simulation = Simulation(engine, limiter, arrivals, ttft_s=ttft_s, loop=loop, take_back=take_back)
        return loop.run_until_complete(simulation.run())
    finally:
        loop.close()
