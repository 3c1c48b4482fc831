"""continuation: the second request carries the first answer, and its events follow without a seam."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.continuation import CannotContinue, Joint, Sent, check, may_continue, plan, read_sent
from kvguard.demand import Dialect

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
LLAMA, VLLM = Dialect.LLAMA_SERVER, Dialect.VLLM


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat_event(content: str | None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content, **delta}, "finish_reason": None}
    return event(id="second", created=2, choices=[choice])


def sent(text: str, **fields: Any) -> Sent:
    fields = {"token_ids": None, "prompt_ids": None, **fields}
    return Sent(head={"id": "first", "created": 1}, text=text, events=3, **fields)


def text_of(events: bytes) -> str:
    decoded = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in decoded if e["choices"])


class TestCheck:
    @pytest.mark.parametrize(
        "field",
        [
            {"tools": [{}]}, {"logprobs": True}, {"n": 2}, {"grammar": "root ::= x"}, {"echo": True},
            {"response_format": {"type": "json_schema"}}, {"json_schema": {"type": "object"}},
        ],
    )  # fmt: skip
    def test_what_the_engine_keeps_in_its_head_cannot_be_carried_over(self, field: dict[str, Any]) -> None:
        with pytest.raises(CannotContinue):
            check(CHAT, {"messages": [], **field}, LLAMA)

    @pytest.mark.parametrize(
        "field",
        [{"tools": None}, {"n": 1}, {"logprobs": False}, {"response_format": {"type": "text"}}, {"seed": 1}],
    )
    def test_the_same_fields_with_nothing_in_them_do_not_matter(self, field: dict[str, Any]) -> None:
        check(CHAT, {"messages": [], **field}, LLAMA)

    def test_penalties_count_the_prompt_on_one_engine_only(self) -> None:
        body = json.dumps({"prompt": "x", "presence_penalty": 0.5}).encode()
        assert may_continue(TEXT, body, LLAMA)
        assert not may_continue(TEXT, body, VLLM)

    def test_a_stop_string_that_had_begun(self) -> None:
        with pytest.raises(CannotContinue, match="stop string"):
            plan(
                TEXT,
                {"prompt": "x", "stop": ["END"]},
                sent("abc E"),
                produced=1,
                max_new_tokens=9,
                dialect=LLAMA,
            )

    @pytest.mark.parametrize("name", ["tool_calls", "reasoning_content"])
    def test_a_part_that_no_prompt_can_carry(self, name: str) -> None:
        with pytest.raises(CannotContinue, match=name):
            read_sent(CHAT, [chat_event(None, **{name: ["x"]})])

    @pytest.mark.parametrize("payload", [b"no json", b"[1]"])
    def test_events_that_nobody_understands(self, payload: bytes) -> None:
        with pytest.raises(CannotContinue, match="not"):
            read_sent(CHAT, [b"data: " + payload + b"\n\n"])


class TestRequest:
    def test_a_text_is_put_behind_its_prompt_and_its_limits_shrink(self) -> None:
        body = {"prompt": "one", "max_tokens": 10, "min_tokens": 5, "stream": True}
        again = json.loads(plan(TEXT, body, sent(" two"), produced=3, max_new_tokens=10, dialect=VLLM).body)
        assert again == {"prompt": "one two", "max_tokens": 7, "min_tokens": 2, "stream": True}

    def test_a_default_length_becomes_explicit(self) -> None:
        again = json.loads(
            plan(TEXT, {"prompt": "a"}, sent("b"), produced=3, max_new_tokens=16, dialect=VLLM).body
        )
        assert again["max_tokens"] == 13

    @pytest.mark.parametrize(
        ("dialect", "prompt", "ids", "prompt_ids", "expected"),
        [
            (LLAMA, "one", [7, 8], None, ["one", 7, 8]),
            (LLAMA, [1, 2], [7, 8], None, [1, 2, 7, 8]),
            (LLAMA, [1, 2], None, None, [1, 2, " two"]),
            (VLLM, "one", [7, 8], [1, 2], [1, 2, 7, 8]),
            (VLLM, [1, 2], [7, 8], None, [1, 2, 7, 8]),
            (VLLM, "one", [7, 8], None, "one two"),
        ],
    )
    def test_token_ids_are_better_than_text(
        self, dialect: Dialect, prompt: Any, ids: Any, prompt_ids: Any, expected: Any
    ) -> None:
        before = sent(" two", token_ids=ids, prompt_ids=prompt_ids)
        again = plan(TEXT, {"prompt": prompt}, before, produced=2, max_new_tokens=9, dialect=dialect)
        assert json.loads(again.body)["prompt"] == expected

    def test_ids_without_ids_to_follow_them_cannot_go_on(self) -> None:
        with pytest.raises(CannotContinue, match="token ids"):
            plan(TEXT, {"prompt": [1, 2]}, sent(" two"), produced=2, max_new_tokens=9, dialect=VLLM)

    def test_a_chat_ends_with_what_the_assistant_said(self) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        again = json.loads(plan(CHAT, body, sent("Hel"), produced=1, max_new_tokens=None, dialect=VLLM).body)
        assert again["messages"][-1] == {"role": "assistant", "content": "Hel"}
        assert (again["continue_final_message"], again["add_generation_prompt"]) == (True, False)

    @pytest.mark.parametrize(("dialect", "text"), [(LLAMA, "One two"), (VLLM, " two")])
    def test_the_clients_own_prefill_stays_in_front(self, dialect: Dialect, text: str) -> None:
        """llama-server has already repeated it in what it sent."""
        body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "One"}]}
        again = json.loads(
            plan(CHAT, body, sent(text), produced=1, max_new_tokens=None, dialect=dialect).body
        )
        assert again["messages"][1:] == [{"role": "assistant", "content": "One two"}]

    def test_native_events_carry_their_token_ids(self) -> None:
        events = [event(content=" a", tokens=[5]), event(content=" b", tokens=[6, 7])]
        assert read_sent(NATIVE, events).token_ids == [5, 6, 7]


class TestJoint:
    @given(st.text("ab \n", min_size=1, max_size=12), st.text("ab \n", max_size=12), st.data())
    def test_repeated_text_is_dropped_however_it_is_cut(
        self, before: str, after: str, data: st.DataObject
    ) -> None:
        whole = before + after
        cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=4).map(sorted))
        joint = Joint(path=CHAT, head={"id": "first"}, produced=2, repeats=before)
        out = b"".join(
            joint(chat_event(whole[start:end]))
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)
        )
        assert text_of(out) == after

    def test_a_template_that_trims_doubles_no_blank(self) -> None:
        joint = Joint(path=CHAT, head={}, produced=2, repeats="One two ")
        assert text_of(joint(chat_event("One two three"))) == "three"

    def test_an_engine_that_repeats_nothing_loses_nothing(self) -> None:
        joint = Joint(path=CHAT, head={}, produced=2, repeats="")
        assert text_of(joint(chat_event("One")) + joint(chat_event(" two"))) == "One two"

    def test_identity_and_usage_are_the_first_streams(self) -> None:
        joint = Joint(path=CHAT, head={"id": "first", "created": 1}, produced=4, repeats="")
        usage = {"prompt_tokens": 14, "completion_tokens": 6, "total_tokens": 20}
        out = joint(event(id="second", created=2, choices=[], usage=usage))
        assert json.loads(out[6:]) == {
            "id": "first", "created": 1, "choices": [],
            "usage": {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
        }  # fmt: skip

    def test_a_second_opening_is_dropped_and_the_end_is_kept(self) -> None:
        joint = Joint(path=CHAT, head={"id": "first"}, produced=1, repeats="")
        end = event(id="second", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        assert joint(chat_event(None, role="assistant")) == b""
        assert json.loads(joint(end)[6:])["choices"][0]["finish_reason"] == "stop"
        assert joint(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"

    def test_native_counts_move_from_the_prompt_to_the_answer(self) -> None:
        joint = Joint(path=NATIVE, head={}, produced=4, repeats="")
        out = json.loads(joint(event(content="x", tokens_predicted=1, tokens_evaluated=9))[6:])
        assert (out["tokens_predicted"], out["tokens_evaluated"]) == (5, 5)
