"""Value types that cross module boundaries: frozen, checked at construction, free of behaviour with effects.

Bytes and seconds everywhere; a name carries its unit. Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20


def _positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


# ---------------------------------------------------------------- what a configuration sets


class PoolKind(StrEnum):
    """How the sequences of an engine share its KV cells."""

    UNIFIED = "unified"
    SPLIT = "split"


class Rung(StrEnum):
    """The four variables that degradation may change, one a step."""

    BATCH = "batch"
    CTX = "ctx"
    QUANT = "quant"
    GPU_LAYERS = "gpu_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One form of a model's weights.

    `source` is a GGUF file, a checkpoint directory, or the name of a quantisation that the engine does
    on the fly; `bits` is the mean over all weights, so that a smaller number is a smaller model.
    """

    kind: Literal["gguf", "checkpoint", "on_the_fly"]
    source: str
    bits: float
    label: str = ""
    size_bytes: int = 0

    def __post_init__(self) -> None:
        _positive(bits=self.bits)
        _not_negative(size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """A configuration, independent of the engine.

    batch            sequences that may run at once
    ctx_tokens       the most tokens (prompt + new) that one sequence may hold
    pool_tokens      KV tokens that all sequences share; never below ctx_tokens
    prefill_tokens   tokens of one forward pass of prefill (micro-batch, max batched tokens)
    host_cache_bytes bound of the engine's prompt cache and checkpoints in host memory
    gpu_layers       layers on the card; -1 means all
    """

    batch: int
    ctx_tokens: int
    pool_tokens: int
    pool_kind: PoolKind
    quant: Variant
    kv_type: str = "f16"
    gpu_layers: int = -1
    prefill_tokens: int = 512
    host_cache_bytes: int = 0

    def __post_init__(self) -> None:
        _positive(batch=self.batch, ctx_tokens=self.ctx_tokens, prefill_tokens=self.prefill_tokens)
        _not_negative(host_cache_bytes=self.host_cache_bytes)
        if self.pool_tokens < self.ctx_tokens:
            raise ValueError(f"pool_tokens {self.pool_tokens} is below ctx_tokens {self.ctx_tokens}")
        if self.gpu_layers < -1:
            raise ValueError(f"gpu_layers must be -1 (all) or more, got {self.gpu_layers}")


# ---------------------------------------------------------------- memory


class Basis(StrEnum):
    """Where a number comes from; an account never mixes an estimate into an exact total unmarked."""

    EXACT = "exact formula"
    DRY_RUN = "engine's dry run"
    MEASURED = "measured"
    LEARNED = "learned"
    ESTIMATE = "estimate"
    LIMIT = "limit"


AccountName = Literal["weights", "kv", "overhead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of an account. `on_card` is False for what stays in host memory beside a GPU card."""

    account: AccountName
    name: str
    size_bytes: int
    basis: Basis
    on_card: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The three memory accounts of a configuration on one card, predicted or measured."""

    entries: tuple[Entry, ...]

    def total_of(self, account: AccountName, *, on_card: bool = True) -> int:
        return sum(e.size_bytes for e in self.entries if e.account == account and e.on_card == on_card)

    @property
    def weights_bytes(self) -> int:
        return self.total_of("weights")

    @property
    def kv_bytes(self) -> int:
        return self.total_of("kv")

    @property
    def overhead_bytes(self) -> int:
        return self.total_of("overhead")

    @property
    def total_bytes(self) -> int:
        return sum(e.size_bytes for e in self.entries if e.on_card)

    @property
    def host_bytes(self) -> int:
        return sum(e.size_bytes for e in self.entries if not e.on_card)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardInfo:
    """What identifies a card: two readings with equal info are of the same card."""

    kind: Literal["nvml", "cgroup", "host", "limit"]
    name: str
    total_bytes: int
    driver: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """One reading of a card. `own_bytes` is what our process tree holds, None where it cannot be known."""

    at_s: float
    total_bytes: int
    used_bytes: int
    own_bytes: int | None = None
    source: str = ""

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


class Phase(StrEnum):
    """Names of the moments at which memory is read; the same everywhere."""

    BASELINE = "baseline"
    LOADING = "loading"
    LOADED_IDLE = "loaded_idle"
    SHORT_REQUEST = "short_request"
    MICRO_BATCH = "micro_batch"
    FULL_CONTEXT = "full_context"
    SERVING = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak of one phase: the number, how it was read, how often, and when."""

    phase: Phase
    peak_bytes: int
    last_bytes: int
    source: str
    interval_s: float
    samples: int
    started_at: float
    ended_at: float


# ---------------------------------------------------------------- requests and capacity


class Work(StrEnum):
    """What a request makes the engine do."""

    GENERATE = "generate"
    PREFILL_ONLY = "prefill_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one request may cost at most.

    prompt_tokens    of one sequence; an upper bound unless `exact`
    max_new_tokens   of one sequence; None where the client gave none (the rest of the context)
    sequences        n, or the number of prompts times n
    route            the endpoint's class for length statistics, e.g. "chat", "completions"
    counted          whether its new tokens are seen as they come; if not, it is priced to its maximum
    """

    prompt_tokens: int
    max_new_tokens: int | None
    sequences: int = 1
    exact: bool = True
    work: Work = Work.GENERATE
    route: str = "chat"
    counted: bool = True

    def __post_init__(self) -> None:
        _not_negative(prompt_tokens=self.prompt_tokens, max_new_tokens=self.max_new_tokens or 0)
        _positive(sequences=self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an engine can hold, as the engine itself reports it.

    pool_tokens     KV tokens that all running sequences share (usable ones)
    ctx_tokens      the most that one sequence may hold
    sequences       the most that may run at once
    block_tokens    a sequence's tokens are rounded up to this
    prefill_tokens  prompt tokens that one forward pass takes at most
    """

    pool_tokens: int
    ctx_tokens: int
    sequences: int
    block_tokens: int = 1
    pool_kind: PoolKind = PoolKind.UNIFIED
    overflow: Literal["fails_all", "preempts", "serialises"] = "fails_all"
    prefill_tokens: int = 512

    def __post_init__(self) -> None:
        _positive(
            pool_tokens=self.pool_tokens,
            ctx_tokens=self.ctx_tokens,
            sequences=self.sequences,
            block_tokens=self.block_tokens,
            prefill_tokens=self.prefill_tokens,
        )

    def rounded(self, tokens: int) -> int:
        """Round up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens


class Verdict(StrEnum):
    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


ErrorCode = Literal[
    "context_length_exceeded",
    "overloaded",
    "rate_limited",
    "backend_starting",
    "backend_restarted",
    "backend_failed",
    "request_poisonous",
    "invalid_request",
    "unauthorized",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A policy's answer. `reason` is fixed snake_case; a refusal is a value, not an exception."""

    verdict: Verdict
    reason: str = ""
    code: ErrorCode | None = None
    message: str = ""
    peak_tokens: int = 0  # the predicted peak of the pool if admitted, for the log
    limit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request was turned away, ready for `api.errors`."""

    code: ErrorCode
    message: str
    retry_after_s: float | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request's place in the queue.

    key       whose request it is, for fairness
    priority  a higher band goes first
    tokens    the most that it may hold; what a wait is predicted from
    front     a replay: it has waited before, and goes ahead of everyone
    """

    id: int
    key: str
    priority: int
    demand: Demand
    tokens: int
    front: bool = False


class Ending(StrEnum):
    """The endings that matter to a policy.

    FINISHED   the model stopped by itself (`stop`, end of text, tool call): an observed length
    TRUNCATED  ended at max_new_tokens (`length`): a censored length
    CANCELLED  the client left, or kvguard took it back: a censored length
    FAILED     error of the engine or overload
    """

    FINISHED = "finished"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One look at a running engine; None where that engine does not tell."""

    at_s: float
    running: int | None = None
    waiting: int | None = None
    kv_used_tokens: int | None = None
    preemptions_total: int | None = None
    overflows_total: int | None = None
    busy_slots: frozenset[int] | None = None
    card_free_bytes: int | None = None  # above headroom; may be negative


# ---------------------------------------------------------------- a backend's life


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    CONFIRMING = "confirming"
    READY = "ready"
    DEGRADING = "degrading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an engine answers, and the key that only kvguard knows (empty: it takes none)."""

    base_url: str
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A child process to start: what the adapter made of the knobs."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    redacted: frozenset[str] = frozenset()  # argv values that no log may show

    def shown(self) -> tuple[str, ...]:
        """The command line as a log or a person may see it."""
        return tuple("***" if arg in self.redacted else arg for arg in self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What everyone but the supervisor knows of the backend; replaced, never changed.

    `generation` counts backend lives: a lease of an older one is void.
    """

    generation: int
    state: State
    knobs: Knobs | None = None
    capacity: Capacity | None = None
    endpoint: Endpoint | None = None
    config_id: str = ""
    degraded_by: tuple[Rung, ...] = ()
    detail: str = ""  # in words, for people: what is happening, or why it failed and what to do
    since_s: float = 0.0

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def with_(self, **changes: object) -> Snapshot:
        return replace(self, **changes)  # type: ignore[arg-type]


class Stage(StrEnum):
    LOAD = "load"
    WARMUP = "warmup"
    INFERENCE = "inference"
    IDLE = "idle"


class Cause(StrEnum):
    WEIGHTS_DONT_FIT = "weights_dont_fit"
    KV_DONT_FIT = "kv_dont_fit"
    ACTIVATION_PEAK = "activation_peak"
    HOST_RAM_OOM_KILLED = "host_ram_oom_killed"
    SHARED_MEMORY_SPILL = "shared_memory_spill"
    MEMORY_HELD_BY_OTHERS = "memory_held_by_others"
    QUANT_FORMAT_MISMATCH = "quant_format_mismatch"
    DEPENDENCY_VERSION_MISMATCH = "dependency_version_mismatch"
    CORRUPT_MODEL = "corrupt_model"
    MISSING_FILE = "missing_file"
    PORT_IN_USE = "port_in_use"
    DRIVER_ERROR = "driver_error"
    REQUEST_TOO_LONG = "request_too_long"
    BENIGN = "benign"
    UNKNOWN = "unknown"


MEMORY_CAUSES = frozenset(
    {
        Cause.WEIGHTS_DONT_FIT,
        Cause.KV_DONT_FIT,
        Cause.ACTIVATION_PEAK,
        Cause.HOST_RAM_OOM_KILLED,
        Cause.SHARED_MEMORY_SPILL,
    }
)
"""Causes that walk the ladder; every other one changes nothing and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong, from the evidence. `causes` is ordered, the likeliest first."""

    stage: Stage
    causes: tuple[Cause, ...]
    confidence: float
    evidence: tuple[str, ...]
    remedy: str = ""
    fits_ctx_tokens: int | None = None  # the longest context that the engine itself says would fit

    @property
    def cause(self) -> Cause:
        return self.causes[0] if self.causes else Cause.UNKNOWN

    @property
    def is_memory(self) -> bool:
        """Whether a smaller configuration can help: not while others hold the memory that is missing."""
        return self.cause in MEMORY_CAUSES and Cause.MEMORY_HELD_BY_OTHERS not in self.causes


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A rung that was passed over, and why, with the sum that proves it where there is one."""

    rung: Rung
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the ladder: one variable, what it leads to, why, and what it costs the user."""

    rung: Rung
    knobs: Knobs
    reason: str
    cost: str
    skipped: tuple[Skip, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """No step: the failure is not one of memory, or every rung is used up. `reason` says what to do."""

    reason: str
    skipped: tuple[Skip, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a child ended. Exactly one of `code` and `signal` is set; `oom_kills` is the kernel's count."""

    code: int | None = None
    signal: int | None = None
    oom_kills: int = 0

    def __str__(self) -> str:
        oom = f", {self.oom_kills} oom_kill" if self.oom_kills else ""
        return (f"signal {self.signal}" if self.signal is not None else f"exit {self.code}") + oom


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What diagnosis may look at. Log text comes last, structured facts first."""

    exit: ExitStatus | None = None
    milestone: str = (
        "started"  # started, weights_loading, weights_loaded, kv_allocated, warmup, ready, decoding
    )
    log_lines: tuple[str, ...] = ()
    http_status: int | None = None
    http_body: str = ""
    healthy: bool | None = None
    killed_by_us: bool = False
    card_total_bytes: int | None = None
    card_used_by_others_bytes: int | None = None
    peaks: tuple[PhasePeak, ...] = ()
    oom_kills: int | None = None  # the kernel's count for the whole cgroup; None where nobody counted
    child_signals: tuple[int, ...] = ()  # signals that ended children of the process
    signal_sender: str = ""  # who sent the signal that ended it, where that is known
    requests_in_flight: int | None = None
    canary_ok: bool | None = None  # whether a one-token request was answered
    tokens_per_s: float | None = None
    baseline_tokens_per_s: float | None = None
    card_used_bytes: int | None = None
    shared_used_bytes: int | None = None  # host memory that a GPU driver uses in place of its own
    commit_limit_reached: bool = False
    shm_free_bytes: int | None = None
    model_file_changed: bool = False
    host_event: str = ""  # suspend, driver update and the like, as the host reports it


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do, declared by its adapter."""

    rungs: frozenset[Rung]
    pool_kinds: frozenset[PoolKind]
    kv_types: tuple[str, ...]
    overflow: Literal["fails_all", "preempts", "serialises"]
    reports_kv_usage: bool = False
    reports_slots: bool = False
    cancels_streams: bool = True
    continues_completions: bool = False
    continues_chat: bool = False
    restartable: bool = True
