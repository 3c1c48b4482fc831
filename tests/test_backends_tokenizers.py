"""Token counters that need no engine: a checkpoint's own tokenizer, and llama-cpp-python's in a child."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from backend_fixtures import engine_path, tiny_checkpoint, tiny_gguf
from kvguard.ports import NotReady, ProtocolError
from kvguard_adapters.tokenizers.huggingface import CheckedCounter, Checkpoint, Unusable
from kvguard_adapters.tokenizers.llama_vocab import VocabularyCounter

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
HELLO_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


class EngineCounter:
    """An engine that counts as the checkpoint does, or off by some tokens."""

    def __init__(self, folder: Path, off_by: int = 0) -> None:
        self._checkpoint = Checkpoint(folder)
        self._off_by = off_by
        self.asked: list[Mapping[str, Any]] = []

    async def count(self, path: str, body: Mapping[str, Any]) -> int:
        self.asked.append(body)
        count = (
            self._checkpoint.chat(body["messages"]) if path == CHAT else self._checkpoint.text(body["prompt"])
        )
        return count + self._off_by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


async def test_once_checked_plain_texts_are_counted_without_the_engine(folder: Path) -> None:
    engine = EngineCounter(folder)
    counter = CheckedCounter(folder, engine, "m")
    assert await counter.count(CHAT, HELLO) == len(HELLO_TEXT)  # this tokenizer knows bytes alone
    checked = len(engine.asked)
    assert checked > 0
    assert all(body["model"] == "m" for body in engine.asked)
    assert await counter.count("/v1/completions", {"prompt": ["ab", "abcd"]}) == 4
    assert await counter.count("/v1/completions", {"prompt": "é"}) == 2
    assert len(engine.asked) == checked
    await counter.close()


async def test_where_they_differ_the_engine_counts(folder: Path) -> None:
    engine = EngineCounter(folder, off_by=1)
    counter = CheckedCounter(folder, engine, "m")
    assert await counter.count(CHAT, HELLO) == len(HELLO_TEXT) + 1
    assert engine.asked[-1] is HELLO
    await counter.close()


@pytest.mark.parametrize(
    "body",
    [
        {**HELLO, "tools": [{"type": "function"}]},
        {**HELLO, "chat_template_kwargs": {"thinking": True}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]},
    ],
)
async def test_what_is_not_plain_text_is_the_engines_to_count(folder: Path, body: dict[str, Any]) -> None:
    class Asked(Exception):
        pass

    class Strict:
        async def count(self, path: str, given: Mapping[str, Any]) -> int:
            raise Asked

    with pytest.raises(Asked):
        await CheckedCounter(folder, Strict(), "m").count(CHAT, body)


async def test_a_template_that_refuses_leaves_the_answer_to_the_engine(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    refusing = "{% if messages[0]['content'] == 'hello' %}{{ raise_exception('no') }}{% endif %}" + template
    (folder / "chat_template.jinja").write_text(refusing)

    class Engine(EngineCounter):
        async def count(self, path: str, body: Mapping[str, Any]) -> int:
            return 77 if body is HELLO else await super().count(path, body)

    counter = CheckedCounter(folder, Engine(folder), "m")
    assert await counter.count(CHAT, HELLO) == 77
    await counter.close()


def test_a_template_among_several_and_tokens_with_flags_are_read(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = {"content": "<end>", "lstrip": False}
    config["chat_template"] = [
        {"name": "tool_use", "template": "nothing"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0]['content'] }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Checkpoint(folder).chat(HELLO["messages"]) == 1 + len("hello")


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_a_checkpoint_without_a_readable_tokenizer_is_unusable(folder: Path, broken: str) -> None:
    (folder / broken).write_text("{")
    with pytest.raises(Unusable, match=str(folder)):
        Checkpoint(folder)


# ---------------------------------------------------------------- in a child


def child(folder: Path, script: str) -> str:
    """An interpreter that answers as the script does."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_child_that_dies_is_not_ready_and_is_started_again(tmp_path: Path) -> None:
    script = (
        f'echo x >> {tmp_path}/starts; read line; [ -e {tmp_path}/ok ] && echo \'{{"id":2,"tokens":5}}\'; cat'
    )
    counter = VocabularyCounter(child(tmp_path, script.replace("; cat", "")), "m.gguf")
    with pytest.raises(NotReady):
        await counter.count(CHAT, HELLO)
    (tmp_path / "ok").touch()
    assert await counter.count(CHAT, HELLO) == 5
    assert (tmp_path / "starts").read_text() == "x\nx\n"
    await counter.close()


async def test_an_answer_to_someone_who_left_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    asked, go = tmp_path / "asked", tmp_path / "go"
    os.mkfifo(asked)
    os.mkfifo(go)
    first_answer = """echo '{"id":1,"tokens":111}'"""
    second_answer = """echo '{"id":2,"tokens":222}'"""
    script = (
        f"read one; echo > {asked}; read word < {go}; {first_answer}; read two; {second_answer}; exec cat"
    )
    counter = VocabularyCounter(child(tmp_path, script), "m.gguf")
    first = asyncio.create_task(counter.count(CHAT, HELLO))
    await asyncio.to_thread(asked.read_text)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(counter.count(CHAT, HELLO))
    await asyncio.to_thread(go.write_text, "\n")
    assert await second == 222
    await counter.close()


@pytest.mark.engine
async def test_llama_cpp_pythons_own_code_counts_without_weights(tmp_path: Path) -> None:
    counter = VocabularyCounter(engine_path("llama-cpp-python"), str(tiny_gguf(tmp_path)))
    assert await counter.count("/v1/completions", {"prompt": "x y"}) == 4  # BOS and three bytes
    assert await counter.count("/v1/completions", {"prompt": "x" * 20_000}) == 20_001
    assert await counter.count("/v1/embeddings", {"input": ["x", "xyz"]}) == 4
    with pytest.raises(ProtocolError, match="ValueError"):
        await counter.count("/v1/completions", {"prompt": ["two", "prompts"]})
    await counter.close()
