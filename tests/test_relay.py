"""relay and sse: whole events, unchanged, and an end that is read right in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.domain import Ending
from kvguard.sse import MAX_EVENT_BYTES, Cutter, End, has_error, read_body_end, read_end

EVENTS = [
    b'data: {"x": "a\\n\\nb"}\n\n',
    b": keep-alive\n\n",
    b"event: message\ndata: 1\n\n",
    b"data: [DONE]\n\n",
]


def event(fields: dict[str, Any], name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(fields).encode() + b"\n\n"


class TestCutter:
    @given(st.lists(st.sampled_from(EVENTS), max_size=20), st.data())
    def test_however_it_arrives_it_leaves_in_whole_events_and_unchanged(
        self, events: list[bytes], data: st.DataObject
    ) -> None:
        stream = b"".join(events)
        cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
        cutter = Cutter()
        parts = zip([0, *cuts], [*cuts, len(stream)], strict=True)
        pieces = [cutter.feed(stream[start:end]) for start, end in parts]
        assert b"".join(pieces) == stream
        assert all(piece.endswith(b"\n\n") for piece in pieces if piece)
        assert cutter.events == len(events)
        assert cutter.rest() == b""

    def test_it_knows_the_other_line_ends(self) -> None:
        cutter = Cutter()
        assert cutter.feed(b"data: 1\r\n\r") == b""
        assert cutter.feed(b"\ndata: 2\r\n\r\ndata: 3") == b"data: 1\r\n\r\ndata: 2\r\n\r\n"
        assert (cutter.events, cutter.rest()) == (2, b"data: 3")

    def test_an_event_without_end_is_not_hoarded(self) -> None:
        cutter = Cutter()
        piece = b"x" * (1 << 20)
        kept = [cutter.feed(piece) for _ in range(6)]
        assert any(kept)
        assert len(cutter.rest()) <= MAX_EVENT_BYTES


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (b'data: {"error": {"code": 500}}\n\n', True),
        (b'data: {"x": 1}\n\ndata: {"error": 1}\n\n', True),
        (b'error: {"code": 500}\n\n', True),
        (b"event: error\ndata: {}\n\n", True),
        (b'data: {"x": "data: {\\"error\\": 1}"}\n\n', False),
        (b'data: {"content": "event: error"}\n\n', False),
    ],
)
def test_an_error_event_is_told_from_text_that_looks_like_one(events: bytes, expected: bool) -> None:
    assert has_error(events) is expected


MESSAGE_END = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 4}}
RESPONSE = {"status": "completed", "usage": {"output_tokens": 2}}
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


@pytest.mark.parametrize(
    ("events", "ending", "new_tokens"),
    [
        ([event({"choices": [{"finish_reason": "stop"}], "usage": USAGE}), DONE], "finished", 5),
        ([event({"choices": [{"finish_reason": "length"}]}), event({"usage": USAGE}), DONE], "truncated", 5),
        ([event({"choices": [{"finish_reason": None}]}), DONE], "finished", None),
        ([event({"stop": True, "stop_type": "limit", "tokens_predicted": 7})], "truncated", 7),
        ([event({"stop": True, "stop_type": "eos", "tokens_predicted": 7})], "finished", 7),
        ([event(MESSAGE_END), event({"type": "message_stop"}, "message_stop")], "truncated", 4),
        ([event({"type": "response.completed", "response": RESPONSE})], "finished", 2),
        ([event({"type": "response.incomplete", "response": {"status": "incomplete"}})], "truncated", None),
        ([event({"error": {"message": "no"}})], "failed", None),
    ],
)
def test_the_end_of_a_stream_in_every_api(events: list[bytes], ending: str, new_tokens: int | None) -> None:
    end = read_end(b"".join(events))
    assert (end.complete, end.ending, end.new_tokens) == (True, Ending(ending), new_tokens)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]})],
        [event({"content": "x", "stop": False})],
        [event({"type": "response.created", "response": {"status": "in_progress"}})],
        [b"data: not json\n\n", b"data: [1, 2]\n\n"],
    ],
)
def test_a_stream_that_does_not_say_how_it_ended_has_not(events: list[bytes]) -> None:
    assert not read_end(b"".join(events)).complete


def test_an_answer_in_one_piece() -> None:
    body = {"choices": [{"finish_reason": "length", "message": {"content": "x"}}], "usage": USAGE}
    assert read_body_end(json.dumps(body).encode()) == End(
        complete=True, ending=Ending.TRUNCATED, new_tokens=5, prompt_tokens=3
    )
    assert read_body_end(b"\x00 not json").complete
