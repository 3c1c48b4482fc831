"""The tables of patterns: the test by words loses no match, and no line makes a pattern slow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvguard.diagnosis import context_rules, milestones, rules
from kvguard.diagnosis.normalise import MAX_LINE_CHARS, lines_of
from kvguard.diagnosis.pattern_table import PatternTable
from kvguard.diagnosis.reading import Reader, read

DATA = Path(__file__).parent / "data"
TABLES = {
    "rules": rules._TABLE,
    "phases": milestones._PHASES,
    "frames": milestones._FRAME_TABLE,
    "marks": context_rules._MARKS,
    "exits": context_rules._EXITS,
}
LINES = sorted(
    {
        line.text
        for name in ("failures.jsonl", "wordings.jsonl")
        for record in (DATA / name).read_text(encoding="utf-8").splitlines()
        for raw in json.loads(record)["log"].splitlines()
        for line in lines_of(1, raw)
    }
)


@pytest.mark.parametrize("name", TABLES)
def test_words_lose_no_match(name: str) -> None:
    table = TABLES[name]
    for text in LINES:
        every = [i for i, pattern in enumerate(table._patterns) if pattern.search(text)]
        assert list(table.matches(text)) == every, text


@pytest.mark.parametrize("name", TABLES)
def test_every_pattern_has_words_that_spare_it(name: str) -> None:
    assert TABLES[name]._always == []


def test_without_the_parser_every_pattern_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvguard.diagnosis.pattern_table._parser", None)
    slow = PatternTable(rules._TABLE._patterns)
    for text in LINES[:60]:
        assert list(slow.matches(text)) == list(rules._TABLE.matches(text))


def test_a_reader_gives_what_reading_each_message_gives() -> None:
    reader = Reader()
    for _ in range(2):
        for text in LINES:
            for level in ("", "info", "error"):
                assert reader.read(text, level) == read(text, level)


@pytest.mark.parametrize(
    "piece",
    ["a", " ", "error ", "KV cache ", "out of memory ", "CUDA error: ", "1", "KeyError: 'a.", "{", "File ",
     "model ", "weights ", "memory for ", "\x1b[", "prompt", "exit code: ", "failed to allocate "],
)  # fmt: skip
def test_no_line_makes_reading_slow(piece: str) -> None:
    """Time per character stays within reach of linear: a pattern that backtracks would take minutes here."""
    text = piece * (MAX_LINE_CHARS // len(piece))
    began_s = time.process_time()
    for line in lines_of(1, text):
        read(line.text, line.level)
    assert time.process_time() - began_s < 20
