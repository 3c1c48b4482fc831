"""What a request may hold at most on a given engine, or why it can never be held."""

from __future__ import annotations

from dataclasses import dataclass

from kvguard.domain import Capacity, Decision, Demand, PoolKind, Verdict, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The most that a request may hold: `tokens` of the pool at its end, all sequences, in whole blocks.

    `prompt_tokens` and `new_tokens` are of one sequence.
    """

    prompt_tokens: int
    new_tokens: int
    sequences: int
    tokens: int


def price(demand: Demand, capacity: Capacity) -> Price | Decision:
    """Price a demand, or refuse what can never be held.

    1. A prompt that fills the context leaves no room for a token.
    2. More new tokens than the context has left: an engine that preempts refuses that itself, the others
       stop at the context's end.
    3. More sequences than there are slots: an engine that preempts keeps the rest waiting inside.
    4. More than the whole pool: an engine that preempts can still work it off alone, one sequence at a time.
    """
    queues_inside = capacity.overflow == "preempts"
    prompt_tokens, ctx_tokens = demand.prompt_tokens, capacity.ctx_tokens
    needs_room = 0 if demand.work is Work.PREFILL_ONLY else 1
    if prompt_tokens + needs_room > ctx_tokens:  # 1
        return _too_long(demand, ctx_tokens)
    new_tokens = ctx_tokens - prompt_tokens if needs_room else 0
    if needs_room and demand.max_new_tokens is not None:
        if demand.max_new_tokens > new_tokens and queues_inside:  # 2
            return _too_long(demand, ctx_tokens)
        new_tokens = min(new_tokens, demand.max_new_tokens)
    sequences = min(demand.sequences, capacity.sequences) if queues_inside else demand.sequences
    if sequences > capacity.sequences:  # 3
        return _too_many(demand, capacity)
    tokens = sequences * capacity.rounded(prompt_tokens + new_tokens)
    if capacity.pool_kind is PoolKind.UNIFIED and tokens > capacity.pool_tokens:  # 4
        if not queues_inside:
            return _too_big(demand, capacity, prompt_tokens + new_tokens)
        tokens = capacity.pool_tokens
    return Price(prompt_tokens=prompt_tokens, new_tokens=new_tokens, sequences=sequences, tokens=tokens)


def _too_long(demand: Demand, ctx_tokens: int) -> Decision:
    """The wording is the one that clients of OpenAI's API already match."""
    new_tokens = demand.max_new_tokens or 0
    most = "" if demand.exact else "up to "
    return _refuse(
        "context_too_short",
        f"This model's maximum context length is {ctx_tokens} tokens. However, you requested {most}"
        f"{demand.prompt_tokens + new_tokens} tokens ({demand.prompt_tokens} in the prompt, {new_tokens} "
        "in the completion). Please reduce the length of the prompt or completion.",
        ctx_tokens,
    )


def _too_many(demand: Demand, capacity: Capacity) -> Decision:
    return _refuse(
        "too_many_sequences",
        f"The request asks for {demand.sequences} sequences at once, and this server runs at most "
        f"{capacity.sequences}. Ask for fewer, or send several requests.",
        capacity.sequences,
    )


def _too_big(demand: Demand, capacity: Capacity, each_tokens: int) -> Decision:
    return _refuse(
        "pool_too_small",
        f"The request may need {demand.sequences} times {each_tokens} tokens ({demand.prompt_tokens} in the "
        f"prompt), and this server holds {capacity.pool_tokens} tokens at once. Ask for fewer sequences, or "
        f"for at most {capacity.pool_tokens // demand.sequences - demand.prompt_tokens} tokens in each.",
        capacity.pool_tokens,
    )


def _refuse(reason: str, message: str, limit_tokens: int) -> Decision:
    return Decision(
        verdict=Verdict.REFUSE,
        reason=reason,
        code="context_length_exceeded",
        message=message,
        limit_tokens=limit_tokens,
    )
