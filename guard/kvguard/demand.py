"""Request body -> Draft: what a request may cost, read from the few fields that price it.

The bound on prompt tokens is the size of the prompt's JSON text. It holds because every token covers at least
one byte of text, JSON text is never shorter than the UTF-8 text that it encodes (an escape is longer than
its character), and the JSON around a chat message is longer than what a template puts around it. What a
template adds once (BOS, a default system prompt, the opening of the answer) is counted on the engine and
added by the caller. It does not hold for images and audio, for templates that are told to add text of their
own (tools, documents), and for tokenizers whose normaliser expands text; `bounded` is False there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import msgspec

from kvguard.domain import Capacity, Demand, Work

Shape = Literal["chat", "completions", "infill", "responses", "messages", "embeddings", "rerank", "opaque"]


class Dialect(StrEnum):
    """How an engine names the length of an answer, and what it takes when none is named."""

    LLAMA_SERVER = "llama_server"
    LLAMA_CPP_PYTHON = "llama_cpp_python"
    VLLM = "vllm"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route that makes the engine work. `name`: its class in statistics; `shape`: where its text is."""

    name: str
    shape: Shape
    work: Work = Work.GENERATE


_CHAT = Route(name="chat", shape="chat")
_COMPLETIONS = Route(name="completions", shape="completions")
_INFILL = Route(name="infill", shape="infill")
_RESPONSES = Route(name="responses", shape="responses")
_MESSAGES = Route(name="messages", shape="messages")
_EMBEDDINGS = Route(name="embeddings", shape="embeddings", work=Work.PREFILL_ONLY)
_RERANK = Route(name="rerank", shape="rerank", work=Work.PREFILL_ONLY)
_POOLING = Route(name="pooling", shape="opaque", work=Work.PREFILL_ONLY)
_AUDIO = Route(name="audio", shape="opaque")
_OTHER = Route(name="other", shape="opaque")

ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/completions": _COMPLETIONS,
    "/completions": _COMPLETIONS,
    "/completion": _COMPLETIONS,
    "/v1/engines/copilot-codex/completions": _COMPLETIONS,
    "/infill": _INFILL,
    "/v1/responses": _RESPONSES,
    "/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/embedding": _EMBEDDINGS,
    "/v1/rerank": _RERANK,
    "/v1/reranking": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/reranking": _RERANK,
    "/pooling": _POOLING,
    "/classify": _POOLING,
    "/score": _POOLING,
    "/v1/score": _POOLING,
    "/v1/audio/transcriptions": _AUDIO,
    "/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/chat/completions/batch": _OTHER,
    "/cohere/v2/chat": _OTHER,
    "/inference/v1/generate": _OTHER,
    "/invocations": _OTHER,
    "/generate": _OTHER,
}
"""POST routes of llama-server, llama_cpp.server and vLLM that occupy a sequence; all others pass on."""

_ADDED_BY_FRAMING = 64
"""Tokens around a prompt that is not a chat: BOS, EOS, a leading space, fill-in-the-middle markers."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class DemandError(ValueError):
    """The request cannot be served by any engine of this kind; `param` is the field that says so."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What the body alone tells.

    text_bytes     bound on the prompt tokens of the longest sequence, framing of a chat template left out
    token_ids      exact prompt tokens, where the prompt is given as ids
    bounded        whether `text_bytes` bounds anything
    templated      whether the engine puts a chat template around the text
    prompts, n     sequences are prompts times n
    max_new_tokens of one sequence; None: the rest of the context
    """

    route: Route
    text_bytes: int
    token_ids: int | None = None
    bounded: bool = True
    prompts: int = 1
    n: int = 1
    max_new_tokens: int | None = None
    stream: bool = False

    @property
    def templated(self) -> bool:
        return self.route.shape in ("chat", "responses", "messages")


class _Body(msgspec.Struct):
    """The fields that price a request; what is `Raw` is measured and not decoded."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    input_prefix: msgspec.Raw = msgspec.Raw()
    input_suffix: msgspec.Raw = msgspec.Raw()
    input_extra: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    n_predict: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    n_cmpl: Any = None
    stream: Any = None


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct):
    type: str = "text"


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_parts = msgspec.json.Decoder(list[_Part | str]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

_LENGTH_FIELDS: Mapping[Dialect, tuple[str, ...]] = {
    Dialect.LLAMA_SERVER: ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"),
    Dialect.LLAMA_CPP_PYTHON: ("max_tokens",),
    Dialect.VLLM: ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    Dialect.UNKNOWN: ("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"),
}
_LENGTH_DEFAULTS: Mapping[tuple[Dialect, Shape], int] = {
    (Dialect.VLLM, "completions"): 16,
    (Dialect.LLAMA_CPP_PYTHON, "completions"): 16,
    (Dialect.LLAMA_SERVER, "messages"): 4096,
}


def draft(route: Route, body: bytes, dialect: Dialect) -> Draft:
    """Read what a body asks for. Raises DemandError where it is not JSON or asks for the impossible."""
    if route.shape == "opaque":
        return _opaque(route, body)
    try:
        fields = _decode_body(body)
    except msgspec.ValidationError as exc:
        raise DemandError(f"The request body must be a JSON object: {exc}") from exc
    except RecursionError as exc:
        raise DemandError("The request body is not usable: its JSON is nested too deeply") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        where = "" if "byte" in str(exc) else f" (byte {len(body)})"
        raise DemandError(f"The request body is not valid JSON: {exc}{where}") from exc
    prompts, text_bytes, token_ids, bounded = _prompt_of(route, fields)
    return Draft(
        route=route,
        text_bytes=text_bytes,
        token_ids=token_ids,
        bounded=bounded,
        prompts=prompts,
        n=max(1, _integer(fields.n_cmpl) or _integer(fields.n) or 1),
        max_new_tokens=_max_new_tokens(route, fields, dialect),
        stream=bool(fields.stream),
    )


def price(item: Draft, prompt_tokens: int, capacity: Capacity | None, *, exact: bool) -> Demand:
    """Make a Demand of a draft whose prompt was bounded or counted.

    Prompts in a list wait for each other inside the engine, so they never hold more sequences than it has.
    """
    sequences = item.prompts * item.n
    if capacity is not None:
        sequences = min(sequences, capacity.sequences)
    return Demand(
        prompt_tokens=prompt_tokens,
        max_new_tokens=item.max_new_tokens,
        sequences=sequences,
        exact=exact,
        work=item.route.work,
        route=item.route.name,
        counted=item.stream and sequences == 1,
    )


def price_unknown(item: Draft, capacity: Capacity | None) -> Demand:
    """Price a prompt that nobody can count as a whole context; the engine itself refuses what is longer."""
    whole = replace(item, max_new_tokens=None)
    return price(whole, 0, capacity, exact=False)


def bound(item: Draft, template_tokens: int) -> int | None:
    """Upper bound on the prompt tokens of one sequence; None where there is none."""
    if not item.bounded:
        return None
    return item.text_bytes + (template_tokens if item.templated else _ADDED_BY_FRAMING)


def check_n(item: Draft, capacity: Capacity, dialect: Dialect) -> None:
    """Raise DemandError for more parallel answers than a slot engine has slots: it would refuse them, too."""
    if dialect is Dialect.LLAMA_SERVER and item.n > capacity.sequences:
        raise DemandError(
            f"n is {item.n}, but this server runs {capacity.sequences} sequences at once: "
            f"ask for n <= {capacity.sequences}, or send several requests",
            "n",
        )


def _opaque(route: Route, body: bytes) -> Draft:
    new_tokens = 0 if route.work is Work.PREFILL_ONLY else None
    return Draft(route=route, text_bytes=len(body), bounded=False, max_new_tokens=new_tokens)


def _prompt_of(route: Route, fields: _Body) -> tuple[int, int, int | None, bool]:
    """Prompts, bytes of the longest one, its tokens if given as ids, and whether the bytes are a bound."""
    match route.shape:
        case "chat":
            text_bytes = len(fields.messages) + len(fields.response_format)
            return 1, text_bytes, None, _plain_messages(fields.messages) and not _adds_text(fields)
        case "messages":
            text_bytes = len(fields.messages) + len(fields.system)
            plain = _plain_messages(fields.messages) and _plain_content(fields.system)
            return 1, text_bytes, None, plain and not _adds_text(fields)
        case "responses":
            text_bytes = len(fields.input) + len(fields.instructions)
            plain = _first(fields.input) == b'"' or _plain_messages(fields.input)
            return 1, text_bytes, None, plain and not _adds_text(fields)
        case "infill":
            parts = (fields.input_prefix, fields.input_suffix, fields.input_extra, fields.prompt)
            return 1, sum(map(len, parts)), None, True
        case "rerank":
            documents = _items(fields.documents or fields.texts)
            longest = max(map(len, documents), default=0)
            return max(1, len(documents)), len(fields.query) + longest, None, True
        case _:
            prompt = fields.prompt or fields.input or fields.content
            prompts, text_bytes, token_ids, bounded = _prompt_list(bytes(prompt))
            return prompts, text_bytes + len(fields.suffix), token_ids, bounded and not fields.prompt_embeds


def _prompt_list(prompt: bytes) -> tuple[int, int, int | None, bool]:
    """The same for a `prompt`: a text, token ids, ids mixed with texts, an object, or a list of all these."""
    if not prompt.startswith(b"["):
        return 1, len(prompt), None, not prompt.startswith(b"{")
    items = _items(msgspec.Raw(prompt))
    if any(item[:1] in b"-0123456789" for item in items):  # one prompt of ids, perhaps mixed with texts
        only_ids = all(item[:1] in b"-0123456789" for item in items)
        return 1, len(prompt), len(items) if only_ids else None, True
    each = [_prompt_list(item) for item in items] or [(1, 0, None, True)]
    ids = [token_ids for _, _, token_ids, _ in each]
    return (
        max(1, len(items)),
        max(text_bytes for _, text_bytes, _, _ in each),
        None if None in ids else max(i for i in ids if i is not None),
        all(bounded for *_, bounded in each),
    )


def _items(raw: msgspec.Raw) -> list[bytes]:
    try:
        return [bytes(item).lstrip() for item in _decode_items(raw)]
    except msgspec.DecodeError:
        return []


def _adds_text(fields: _Body) -> bool:
    """Whether a template was told to put text of its own into the prompt."""
    additions = (
        fields.tools,
        fields.functions,
        fields.documents,
        fields.chat_template,
        fields.chat_template_kwargs,
        fields.previous_response_id,
        fields.prompt_embeds,
    )
    return any(len(raw) > len("null") for raw in additions)  # null, [] and {} add nothing


def _first(raw: msgspec.Raw) -> bytes:
    return memoryview(raw)[:1].tobytes() if raw else b""


def _plain_messages(raw: msgspec.Raw) -> bool:
    """Whether every message holds text alone."""
    try:
        return all(_plain_content(message.content) for message in _decode_messages(raw))
    except msgspec.DecodeError:
        return False


def _plain_content(raw: msgspec.Raw) -> bool:
    if _first(raw) != b"[":
        return _first(raw) != b"{"
    try:
        parts = _decode_parts(raw)
    except msgspec.DecodeError:
        return False
    return all(isinstance(part, str) or part.type in _TEXT_PARTS for part in parts)


def _max_new_tokens(route: Route, fields: _Body, dialect: Dialect) -> int | None:
    """The limit that the engine will obey. Raises DemandError for a negative one where that means nothing."""
    if route.work is Work.PREFILL_ONLY:
        return 0
    given = [(name, _integer(getattr(fields, name))) for name in _LENGTH_FIELDS[dialect]
             if getattr(fields, name) is not None]  # fmt: skip
    if not given:
        return _LENGTH_DEFAULTS.get((dialect, route.shape))
    if dialect is Dialect.UNKNOWN:
        numbers = [number for _, number in given]
        return None if any(n is None or n < 0 for n in numbers) else max(n for n in numbers if n is not None)
    name, number = given[0]
    least = {Dialect.VLLM: 0, Dialect.LLAMA_SERVER: -1}.get(dialect)
    if number is not None and least is not None and number < least:
        meaning = " (-1 means until the context is full)" if least == -1 else ""
        raise DemandError(f"{name} must be {least} or more{meaning}, got {number}", name)
    if dialect is Dialect.LLAMA_CPP_PYTHON and number == 0:  # it takes 0 for "no limit"
        return None
    return None if number is None or number < 0 else number


def _integer(value: Any) -> int | None:
    """The number as engines read it, some of which take "12" and 12.0 for 12; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None
