"""Continue a broken stream on another backend life, so that the client sees one unbroken answer.

The new request is the old one with what was already sent put behind its prompt: the text of a completion, or
an assistant message that the engine takes up (prefill). Token ids are used where the engine gave them. The
events of the second stream are rewritten to belong to the first: its id and created, usage that counts both
parts, no second role, and without the prefilled text where the engine repeats it.

Sources of what engines do: llama-server b1-0c1e570 repeats a prefilled assistant message at the start of its
answer, streamed or not; vLLM 0.32 does not, and wants `continue_final_message`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvguard.demand import Dialect
from kvguard.sse import payloads

Json = dict[str, Any]

_CHAT_PATHS = frozenset({"/v1/chat/completions", "/chat/completions"})
_NATIVE_PATHS = frozenset({"/completion", "/completions"})  # llama-server's own shape
_OPENAI_PATHS = frozenset({"/v1/completions"})

_STATE_IN_THE_ENGINE = (
    "tools", "functions", "logprobs", "top_logprobs", "prompt_logprobs", "n_probs", "grammar", "json_schema",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "echo", "suffix",
    "use_beam_search", "mirostat", "return_progress",
)  # fmt: skip
"""Fields whose effect depends on what was generated before, which the new engine would take for a prompt."""

_LENGTH_FIELDS = ("n_predict", "max_completion_tokens", "max_tokens")


class CannotContinue(Exception):
    """The stream can only end with an error event; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What the client has of an answer. `head` is its first event."""

    head: Json
    text: str
    events: int
    token_ids: list[int] | None
    prompt_ids: list[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to go on: the request's new body, and what makes its events fit behind those already sent."""

    body: bytes
    joint: Joint


def check(path: str, body: Mapping[str, Any], dialect: Dialect) -> None:
    """Raise CannotContinue where the request itself rules a continuation out."""
    if path not in _CHAT_PATHS | _NATIVE_PATHS | _OPENAI_PATHS:
        raise CannotContinue(f"{path} has no continuation")
    for name in _STATE_IN_THE_ENGINE:
        if body.get(name) not in (None, False, 0, "", [], {}):
            raise CannotContinue(f"{name} was asked for")
    if any((body.get(name) or 1) != 1 for name in ("n", "n_cmpl", "best_of")):
        raise CannotContinue("more than one answer was asked for")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise CannotContinue("response_format was asked for")
    if dialect is Dialect.VLLM and (body.get("presence_penalty") or body.get("frequency_penalty")):
        raise CannotContinue("vLLM applies penalties to generated tokens only")


def may_continue(path: str, body: bytes, dialect: Dialect) -> bool:
    """Whether a stream of this request could be continued as far as the request is concerned."""
    try:
        check(path, msgspec.json.decode(body), dialect)
    except CannotContinue:
        return False
    return True


def read_sent(path: str, transcript: Iterable[bytes]) -> Sent:
    """Read what was sent. Raises CannotContinue for a part that no prompt can carry."""
    head: Json = {}
    text: list[str] = []
    token_ids: list[int] | None = []
    prompt_ids: list[int] | None = None
    events = 0
    for event in _events(transcript):
        head = head or event
        piece, ids = _piece(path, event)
        prompt_ids = prompt_ids or event.get("prompt_token_ids") or _choice(event).get("prompt_token_ids")
        if piece or ids:
            events += 1
            text.append(piece)
            token_ids = [*token_ids, *ids] if token_ids is not None and ids is not None else None
    return Sent(
        head=head, text="".join(text), events=events, token_ids=token_ids or None, prompt_ids=prompt_ids
    )


def plan(
    path: str, body: Json, sent: Sent, *, produced: int, max_new_tokens: int | None, dialect: Dialect
) -> Plan:
    """Make the request that goes on. `produced` are the tokens in `sent`. Raises CannotContinue."""
    check(path, body, dialect)
    _check_stop(body, sent.text)
    changed = _shorter(body, produced, max_new_tokens)
    repeats = ""
    if path in _CHAT_PATHS:
        changed["messages"], whole = _with_prefill(body, sent.text, dialect)
        if dialect is Dialect.VLLM:
            changed |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            repeats = whole
    else:
        changed["prompt"] = _longer_prompt(body, sent, dialect)
    joint = Joint(path=path, head=sent.head, produced=produced, repeats=repeats)
    return Plan(body=msgspec.json.encode(changed), joint=joint)


def length_end(path: str, body: Mapping[str, Any], sent: Sent, *, produced: int, prompt_tokens: int) -> bytes:
    """The last events of an answer that had reached its limit when the engine died."""
    head: Json = {name: sent.head[name] for name in ("id", "object", "created", "model") if name in sent.head}
    empty: Json = {"delta": {}} if path in _CHAT_PATHS else {"text": ""}
    events: list[Json] = [{**head, "choices": [{"index": 0, **empty, "finish_reason": "length"}]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": produced,
            "total_tokens": prompt_tokens + produced,
        }
        events.append({**head, "choices": [], "usage": usage})
    return b"".join(_event(event) for event in events) + b"data: [DONE]\n\n"


class Joint:
    """Rewrites the events of a continuation; fed with whole events, in order."""

    def __init__(self, *, path: str, head: Json, produced: int, repeats: str) -> None:
        self._path = path
        self._same = {name: head[name] for name in ("id", "created") if name in head}
        self._produced = produced
        self._repeats = repeats
        self._seen = ""

    def __call__(self, events: bytes) -> bytes:
        out = []
        for payload in payloads(events):
            if payload == b"[DONE]":
                out.append(b"data: [DONE]\n\n")
                continue
            try:
                event = self._rewrite(_decoded(payload))
            except CannotContinue:  # nothing in it could be rewritten
                out.append(b"data: " + payload + b"\n\n")
                continue
            if event is not None:
                out.append(_event(event))
        return b"".join(out)

    def _rewrite(self, event: Json) -> Json | None:
        event |= {name: value for name, value in self._same.items() if name in event}
        if isinstance(event.get("usage"), dict):
            _move_tokens(event["usage"], self._produced)
        if self._path in _NATIVE_PATHS:
            for name, sign in (("tokens_predicted", 1), ("tokens_evaluated", -1)):
                if isinstance(event.get(name), int):
                    event[name] += sign * self._produced
        delta = _choice(event).get("delta")
        return event if not isinstance(delta, dict) or self._fit(event, delta) else None

    def _fit(self, event: Json, delta: Json) -> bool:
        """Make a chat event follow the text already sent; False when nothing of it is left."""
        opened = delta.pop("role", None) is not None
        content = delta.get("content")
        if isinstance(content, str) and self._repeats:
            content = self._without_repeat(content)
            delta["content"] = content
        return bool(content) or (not opened and (content is None or "finish_reason" in _finish(event)))

    def _without_repeat(self, content: str) -> str:
        """Drop the repeated text, which may come in several pieces, and which a template may have trimmed."""
        self._seen += content
        if len(self._seen) < len(self._repeats) and self._repeats.startswith(self._seen):
            return ""
        trimmed = self._repeats.rstrip()
        new = self._seen
        if self._seen.startswith(trimmed):
            blank = self._repeats[len(trimmed) :]
            new = self._seen[len(trimmed) :].removeprefix(blank)
        self._repeats = ""
        return new


def _events(transcript: Iterable[bytes]) -> Iterator[Json]:
    for payload in payloads(b"".join(transcript)):
        if payload != b"[DONE]":
            yield _decoded(payload)


def _decoded(payload: bytes) -> Json:
    try:
        event = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise CannotContinue("the engine sent an event that is not JSON") from exc
    if not isinstance(event, dict):
        raise CannotContinue("the engine sent an event that is not a JSON object")
    return event


def _choice(event: Json) -> Json:
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _finish(event: Json) -> Json:
    choice = _choice(event)
    return {"finish_reason": choice["finish_reason"]} if choice.get("finish_reason") else {}


def _piece(path: str, event: Json) -> tuple[str, list[int] | None]:
    """Text and token ids (None: not given) of one event."""
    if path in _NATIVE_PATHS:
        return event.get("content") or "", event.get("tokens")
    choice = _choice(event)
    if path in _OPENAI_PATHS:
        return choice.get("text") or "", choice.get("token_ids")
    delta = choice.get("delta") or {}
    for name in ("tool_calls", "function_call", "reasoning", "reasoning_content", "audio", "refusal"):
        if delta.get(name):
            raise CannotContinue(f"{name} had begun")
    return delta.get("content") or "", choice.get("token_ids")


def _check_stop(body: Mapping[str, Any], text: str) -> None:
    """An engine keeps back what may become a stop string; what it had sent of one cannot be taken back."""
    stops = body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        if any(text.endswith(stop[:length]) for length in range(1, len(stop))):
            raise CannotContinue("a stop string had begun")


def _shorter(body: Json, produced: int, max_new_tokens: int | None) -> Json:
    """The body with what is left of its limits."""
    changed = dict(body)
    if max_new_tokens is not None:
        given = [name for name in _LENGTH_FIELDS if body.get(name) is not None] or ["max_tokens"]
        changed |= dict.fromkeys(given, max_new_tokens - produced)
    if isinstance(body.get("min_tokens"), int):
        changed["min_tokens"] = max(0, body["min_tokens"] - produced)
    return changed


def _with_prefill(body: Json, text: str, dialect: Dialect) -> tuple[list[Any], str]:
    """Messages that end with what the assistant said so far, and that text."""
    messages = list(body["messages"])
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if last.get("role") == "assistant":
        own = last.get("content")
        if not isinstance(own, str):
            raise CannotContinue("the client's own prefill is not plain text")
        messages.pop()
        text = text if dialect is not Dialect.VLLM else own + text
    return [*messages, {"role": "assistant", "content": text}], text


def _longer_prompt(body: Json, sent: Sent, dialect: Dialect) -> Any:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if sent.token_ids and dialect is Dialect.LLAMA_SERVER and isinstance(prompt, str | list):
        return [*(prompt if isinstance(prompt, list) else [prompt]), *sent.token_ids]
    if sent.token_ids and (isinstance(prompt, list) or sent.prompt_ids):
        return [*(prompt if isinstance(prompt, list) else sent.prompt_ids or []), *sent.token_ids]
    if isinstance(prompt, str):
        return prompt + sent.text
    if isinstance(prompt, list) and dialect is Dialect.LLAMA_SERVER:
        return [*prompt, sent.text]
    raise CannotContinue("the prompt is not a text, and the engine gave no token ids")


def _move_tokens(usage: Json, produced: int) -> None:
    for name, sign in (("prompt_tokens", -1), ("completion_tokens", 1)):
        if isinstance(usage.get(name), int):
            usage[name] += sign * produced


def _event(event: Json) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
