"""demand: what a body asks for, in every dialect, and a bound on tokens that holds."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.demand import ROUTES, DemandError, Dialect, Draft, bound, check_n, draft, price, price_unknown
from kvguard.domain import Capacity, Work

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LLAMA, VLLM, PYTHON, UNKNOWN = (
    Dialect.LLAMA_SERVER,
    Dialect.VLLM,
    Dialect.LLAMA_CPP_PYTHON,
    Dialect.UNKNOWN,
)
CAPACITY = Capacity(pool_tokens=4096, ctx_tokens=2048, sequences=4)


def read(path: str, dialect: Dialect = LLAMA, **body: Any) -> Draft:
    return draft(ROUTES[path], json.dumps(body).encode(), dialect)


def chat(**body: Any) -> Draft:
    return read(CHAT, messages=[{"role": "user", "content": "hi"}], **body)


class TestLength:
    @pytest.mark.parametrize(
        ("dialect", "path", "fields", "expected"),
        [
            (LLAMA, CHAT, {}, None),
            (LLAMA, CHAT, {"n_predict": 1, "max_completion_tokens": 2, "max_tokens": 3}, 1),
            (LLAMA, CHAT, {"max_completion_tokens": 2, "max_tokens": 3}, 2),
            (LLAMA, CHAT, {"max_completion_tokens": None, "max_tokens": 3}, 3),
            (LLAMA, CHAT, {"max_tokens": -1}, None),
            (LLAMA, CHAT, {"max_tokens": 0}, 0),
            (LLAMA, "/v1/messages", {}, 4096),
            (LLAMA, "/v1/responses", {"max_output_tokens": 7}, 7),
            (VLLM, CHAT, {}, None),
            (VLLM, CHAT, {"n_predict": 1, "max_completion_tokens": 2, "max_tokens": 3}, 2),
            (VLLM, COMPLETIONS, {}, 16),
            (VLLM, COMPLETIONS, {"max_tokens": None}, 16),
            (VLLM, COMPLETIONS, {"max_tokens": 5}, 5),
            (PYTHON, CHAT, {"max_completion_tokens": 2}, None),
            (PYTHON, CHAT, {"max_tokens": 0}, None),
            (PYTHON, COMPLETIONS, {}, 16),
            (UNKNOWN, CHAT, {"n_predict": 1, "max_tokens": 3}, 3),
            (UNKNOWN, CHAT, {"n_predict": -1, "max_tokens": 3}, None),
            (UNKNOWN, COMPLETIONS, {}, None),
            (VLLM, CHAT, {"max_tokens": "12"}, 12),
            (VLLM, CHAT, {"max_tokens": 12.0}, 12),
            (VLLM, CHAT, {"max_tokens": "many"}, None),
            (VLLM, CHAT, {"max_tokens": 10**30}, 10**30),
        ],
    )
    def test_each_engine_names_it_its_own_way(
        self, dialect: Dialect, path: str, fields: dict[str, Any], expected: int | None
    ) -> None:
        assert read(path, dialect, prompt="x", messages=[], **fields).max_new_tokens == expected

    @pytest.mark.parametrize(("dialect", "number"), [(LLAMA, -2), (VLLM, -1)])
    def test_a_negative_one_is_refused_by_name_and_number(self, dialect: Dialect, number: int) -> None:
        with pytest.raises(DemandError, match=f"max_tokens must be .* got {number}") as caught:
            read(CHAT, dialect, messages=[], max_tokens=number)
        assert caught.value.param == "max_tokens"

    def test_an_embedding_generates_nothing(self) -> None:
        item = read("/v1/embeddings", input="text", max_tokens=99)
        assert (item.max_new_tokens, item.route.work) == (0, Work.PREFILL_ONLY)


class TestSequences:
    def test_prompts_times_n(self) -> None:
        item = read(COMPLETIONS, prompt=["one", "two", "three"], n=2)
        assert (item.prompts, item.n) == (3, 2)

    def test_llamas_own_name_for_n_wins(self) -> None:
        assert chat(n=2, n_cmpl=3).n == 3

    def test_prompts_of_a_list_never_hold_more_sequences_than_there_are(self) -> None:
        item = read("/v1/embeddings", input=["text"] * 100)
        assert price(item, 5, CAPACITY, exact=True).sequences == 4

    def test_n_over_the_slots_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(DemandError, match="n is 5, but this server runs 4"):
            check_n(chat(n=5), CAPACITY, LLAMA)
        check_n(chat(n=4), CAPACITY, LLAMA)
        check_n(chat(n=5), CAPACITY, VLLM)  # it queues the fifth inside

    @pytest.mark.parametrize("n", [0, -3, None, "x", True, {}])
    def test_an_n_that_means_nothing_is_left_to_the_engine(self, n: Any) -> None:
        assert chat(n=n).n == 1


class TestPrompt:
    def test_token_ids_are_counted_exactly(self) -> None:
        item = read(COMPLETIONS, prompt=[1, 2, 3])
        assert (item.token_ids, item.prompts) == (3, 1)

    def test_lists_of_token_ids_are_prompts_each(self) -> None:
        item = read(COMPLETIONS, prompt=[[1, 2, 3], [4, 5, 6, 7, 8]])
        assert (item.token_ids, item.prompts) == (5, 2)

    def test_ids_mixed_with_texts_are_one_prompt_of_unknown_length(self) -> None:
        item = read(COMPLETIONS, prompt=[12, "text", 34])
        assert (item.token_ids, item.prompts, item.bounded) == (None, 1, True)

    def test_the_longest_prompt_of_a_list_is_the_one_that_counts(self) -> None:
        item = read(COMPLETIONS, prompt=["a", "b" * 500])
        assert 500 <= item.text_bytes < 520

    def test_a_multimodal_prompt_has_no_bound(self) -> None:
        assert not read(COMPLETIONS, prompt={"prompt_string": "x", "multimodal_data": ["AA=="]}).bounded

    @pytest.mark.parametrize(
        "content", ["text", None, [{"type": "text", "text": "x"}], ["text"], [{"type": "input_text"}]]
    )
    def test_text_is_bounded(self, content: Any) -> None:
        assert read(CHAT, messages=[{"role": "user", "content": content}]).bounded

    @pytest.mark.parametrize(
        "content",
        [
            [{"type": "image_url", "image_url": {"url": "data:..."}}],
            [{"type": "text", "text": "x"}, {"type": "input_audio"}],
            {"type": "image"},
            [3],
        ],
    )
    def test_what_is_not_text_is_not(self, content: Any) -> None:
        assert not read(CHAT, messages=[{"role": "user", "content": content}]).bounded

    @pytest.mark.parametrize(
        "field", [{"tools": [{"type": "function"}]}, {"chat_template": "{{ x }}"}, {"documents": [{"a": 1}]}]
    )
    def test_a_template_told_to_add_text_voids_the_bound(self, field: dict[str, Any]) -> None:
        assert not chat(**field).bounded
        assert chat(**dict.fromkeys(field)).bounded

    def test_a_template_adds_what_the_engine_said(self) -> None:
        item = chat()
        assert bound(item, 30) == item.text_bytes + 30

    @given(st.lists(st.text(max_size=50), max_size=5))
    def test_the_bound_never_falls_below_the_utf8_text(self, texts: list[str]) -> None:
        """However the client escapes it: a token covers at least one byte of text."""
        body = {"messages": [{"role": "user", "content": text} for text in texts]}
        whole = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        for encoded in (json.dumps(body).encode(), msgspec.json.encode(body) if _clean(texts) else b""):
            if encoded:
                try:
                    item = draft(ROUTES[CHAT], encoded, LLAMA)
                except DemandError:
                    assert not _clean(texts)  # a lone surrogate is no text
                else:
                    assert item.text_bytes >= whole

    def test_a_prompt_that_nobody_can_count_is_priced_as_a_whole_context(self) -> None:
        demand = price_unknown(chat(max_tokens=5), CAPACITY)
        assert (demand.max_new_tokens, demand.exact) == (None, False)


class TestBadInput:
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"", "not valid JSON.*byte 0"),
            (b'{"messages": [', "not valid JSON.*byte 14"),
            (b'{"messages": nope}', "not valid JSON.*byte 14"),
            (b"[]", "must be a JSON object"),
            (b'"text"', "must be a JSON object"),
            (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
            (b"\xff\xfe", "not valid JSON"),
        ],
    )
    def test_it_is_named_with_its_position(self, body: bytes, message: str) -> None:
        with pytest.raises(DemandError, match=message):
            draft(ROUTES[CHAT], body, LLAMA)

    def test_unknown_fields_and_odd_types_are_the_engines_business(self) -> None:
        item = read(CHAT, messages="not a list", zork={"deep": [1]}, stream="yes", n=[1])
        assert not item.bounded

    def test_an_opaque_body_is_not_read(self) -> None:
        item = draft(ROUTES["/v1/audio/transcriptions"], b"--boundary\r\n...", LLAMA)
        assert (item.bounded, item.max_new_tokens) == (False, None)


def _clean(texts: list[str]) -> bool:
    return not any(0xD800 <= ord(char) < 0xE000 for text in texts for char in text)
