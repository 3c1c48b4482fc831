"""Draft -> Demand: the cheap bound where it is enough, an exact count where a decision hangs on it.

Counts are kept in memory under the hash of the body, so a retry or a regeneration is never counted twice.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec
import structlog

from kvguard.demand import Draft, bound, price, price_unknown
from kvguard.domain import Capacity, Demand
from kvguard.ports import BackendError, Engine

MAX_COUNTS = 4096
_SMALLEST_CHAT = {"messages": [{"role": "user", "content": "a"}]}
_MARGIN_TOKENS = 16
"""For what a template adds to some messages only, such as a date or a default system prompt."""

_log = structlog.get_logger("kvguard.pricing")


class Pricer:
    """Prices requests with the help of the engine that lives now."""

    def __init__(self, engine: Callable[[], Engine | None], *, bound_holds: Callable[[], bool]) -> None:
        self._engine = engine
        self._bound_holds = bound_holds
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._template_tokens: int | None = None

    def forget(self) -> None:
        """Another model or template may be served now."""
        self._counts.clear()
        self._template_tokens = None

    async def quick(self, item: Draft, capacity: Capacity | None) -> Demand | None:
        """Price without counting this prompt; None where nothing bounds it."""
        if item.token_ids is not None:
            return price(item, item.token_ids, capacity, exact=True)
        if not self._bound_holds():
            return None
        template_tokens = await self._template() if item.templated else 0
        if template_tokens is None:
            return None
        prompt_tokens = bound(item, template_tokens)
        return None if prompt_tokens is None else price(item, prompt_tokens, capacity, exact=False)

    async def exact(self, item: Draft, path: str, body: bytes, capacity: Capacity | None) -> Demand:
        """Price by counting; a prompt that the engine cannot count (images, audio) takes a whole context."""
        prompt_tokens = await self._count(path, body) if item.route.shape != "opaque" else None
        if prompt_tokens is None:
            return price_unknown(item, capacity)
        return price(item, prompt_tokens, capacity, exact=True)

    async def tokens_of(self, text: str) -> int | None:
        """Tokens of generated text, which has no beginning-of-text token in front of it."""
        with_text = await self._ask("/v1/completions", {"prompt": text})
        without = await self._ask("/v1/completions", {"prompt": ""})
        return None if with_text is None or without is None else max(0, with_text - without)

    async def _count(self, path: str, body: bytes) -> int | None:
        digest = hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()
        known = self._counts.get(digest)
        if known is not None:
            self._counts.move_to_end(digest)
            return known
        counted = await self._ask(path, msgspec.json.decode(body))
        if counted is not None:
            self._counts[digest] = counted
            if len(self._counts) > MAX_COUNTS:
                self._counts.popitem(last=False)
        return counted

    async def _ask(self, path: str, body: Mapping[str, object]) -> int | None:
        engine = self._engine()
        if engine is None:
            return None
        try:
            return await engine.count_tokens(path, body)
        except BackendError as exc:
            _log.debug("count_failed", path=path, reason=type(exc).__name__)
            return None

    async def _template(self) -> int | None:
        """What the chat template adds to the smallest chat, asked of the engine once a life."""
        if self._template_tokens is None:
            counted = await self._ask("/v1/chat/completions", _SMALLEST_CHAT)
            if counted is None:
                return None
            self._template_tokens = counted + _MARGIN_TOKENS
        return self._template_tokens
