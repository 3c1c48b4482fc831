"""Server-sent events as bytes: cut a stream at whole events, count them, and read its end.

Nothing here parses the events of a running stream; the last few are parsed once, when it is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvguard.domain import Ending

MAX_EVENT_BYTES = 4 << 20
"""A longer piece without an event's end is passed on as it is: the engine does not speak SSE."""

_ERROR_MARKS = (b'data: {"error"', b'data:{"error"', b"error: {", b"event: error")
_LATER_ERROR_MARKS = tuple(b"\n" + mark for mark in _ERROR_MARKS)
_TAIL_CHUNKS = 6


class Cutter:
    """Cuts a byte stream behind its last whole event and keeps the rest for the next call."""

    def __init__(self) -> None:
        self._rest = b""
        self.events = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the whole events that are now complete, bytes unchanged."""
        if self._rest:
            chunk = self._rest + chunk
            self._rest = b""
        separator = b"\r\n\r\n" if chunk.endswith(b"\r\n\r\n") else b"\n\n"
        if not chunk.endswith(separator):
            cut, separator = _last_end(chunk)
            if cut == 0 and len(chunk) > MAX_EVENT_BYTES:
                return chunk
            chunk, self._rest = chunk[:cut], chunk[cut:]
        self.events += chunk.count(separator)
        return chunk

    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest


def _last_end(chunk: bytes) -> tuple[int, bytes]:
    unix = chunk.rfind(b"\n\n")
    web = chunk.rfind(b"\r\n\r\n")
    if unix < 0 and web < 0:
        return 0, b"\n\n"
    return (web + 4, b"\r\n\r\n") if web > unix else (unix + 2, b"\n\n")


def has_error(events: bytes) -> bool:
    """Whether one of these events is an error of the engine's.

    Sure without parsing: a mark counts at the start of a line only, and JSON has no line break within a text.
    """
    return events.startswith(_ERROR_MARKS) or any(mark in events for mark in _LATER_ERROR_MARKS)


class Tail:
    """The last chunks of a stream, kept as they are."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=_TAIL_CHUNKS)
        self.add = self._chunks.append

    def end(self) -> End:
        return read_end(b"".join(self._chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an answer ended. `complete` is False for a stream that stopped without saying so."""

    complete: bool
    ending: Ending = Ending.FINISHED
    new_tokens: int | None = None
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct):
    """The fields by which the APIs say that an answer is over, and how long it was; of any type, as engines
    differ."""

    type: Any = None
    choices: Any = None
    usage: Any = None
    delta: Any = None
    stop_reason: Any = None
    response: Any = None
    stop: Any = None
    stop_type: Any = None
    tokens_predicted: Any = None
    tokens_evaluated: Any = None
    error: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_TRUNCATED = frozenset({"length", "max_tokens", "limit", "incomplete", "max_output_tokens"})


def read_end(tail: bytes) -> End:
    """Read how a stream ended from its last events, in any of the APIs that engines speak."""
    reasons: list[str] = []
    usage: dict[str, Any] = {}
    done = failed = False
    for payload in payloads(tail):
        if payload == b"[DONE]":
            done = True
            continue
        answer = _answer_of(payload)
        if answer is None:
            continue
        failed = failed or _failed(answer)
        reasons += _reasons(answer)
        usage = usage | _usage_of(answer)
        done = done or answer.type in ("message_stop", "response.completed", "response.incomplete")
    return _end(complete=done or failed or bool(reasons), failed=failed, reasons=reasons, usage=usage)


def read_body_end(body: bytes) -> End:
    """The same for an answer in one piece, which is complete by its length."""
    answer = _answer_of(body)
    if answer is None:
        return End(complete=True)
    return _end(complete=True, failed=_failed(answer), reasons=_reasons(answer), usage=_usage_of(answer))


def payloads(events: bytes) -> Iterator[bytes]:
    """The data of each event line."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _answer_of(payload: bytes) -> _Answer | None:
    try:
        return _decode_answer(payload)
    except (msgspec.DecodeError, RecursionError):
        return None


def _failed(answer: _Answer) -> bool:
    return answer.error is not None or answer.type in ("error", "response.failed")


def _reasons(answer: _Answer) -> list[str]:
    choices = answer.choices if isinstance(answer.choices, list) else []
    found = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
    found += [answer.stop_reason, _get(answer.delta, "stop_reason")]
    if answer.stop is True:
        found.append(answer.stop_type or "stop")
    if answer.type in ("response.completed", "response.incomplete"):
        found.append(_get(answer.response, "status"))
    return [reason for reason in found if isinstance(reason, str)]


def _usage_of(answer: _Answer) -> dict[str, Any]:
    if answer.stop is True and answer.tokens_predicted is not None:
        return {"completion_tokens": answer.tokens_predicted, "prompt_tokens": answer.tokens_evaluated}
    usage = answer.usage or _get(answer.response, "usage")
    return usage if isinstance(usage, dict) else {}


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _end(*, complete: bool, failed: bool, reasons: list[str], usage: dict[str, Any]) -> End:
    ending = Ending.FINISHED
    if failed:
        ending = Ending.FAILED
    elif any(reason in _TRUNCATED for reason in reasons):
        ending = Ending.TRUNCATED
    return End(
        complete=complete,
        ending=ending,
        new_tokens=_count(usage, "completion_tokens", "output_tokens"),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
    )


def _count(usage: dict[str, Any], *names: str) -> int | None:
    return next((usage[name] for name in names if isinstance(usage.get(name), int)), None)
