"""Tables of patterns, tried on a line only where a word that they need is in it.

Trying some two hundred patterns on each line of a long log takes minutes; looking for words takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

try:  # the parser of `re` has no public name
    from re import _constants as _code  # type: ignore[attr-defined]
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # without it every pattern is tried on every line: slower, and as right
    _parser = None

_SHORTEST = 3


class PatternTable:
    """Patterns in their order of precedence."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = tuple(patterns)
        self._always: list[int] = []
        self._by_word: dict[str, list[int]] = {}
        for index, pattern in enumerate(patterns):
            words = required_literals(pattern)
            if not words:
                self._always.append(index)
            for word in words:
                self._by_word.setdefault(word, []).append(index)

    def matches(self, text: str) -> Iterator[int]:
        """Give the indices of the patterns that match, first things first."""
        low = text.lower()
        possible = set(self._always)
        for word in [word for word in self._by_word if word in low]:
            possible.update(self._by_word[word])
        return (index for index in sorted(possible) if self._patterns[index].search(text))


def required_literals(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Give lower-case words of which each match has at least one; none if unknown."""
    if _parser is None:
        return ()
    found = _of_sequence(_parser.parse(pattern.pattern, pattern.flags))
    return tuple(sorted(found)) if found and min(map(len, found)) >= _SHORTEST else ()


def _of_sequence(tree: Any) -> frozenset[str]:
    """Choose, of all parts that must be there, the one whose shortest word is longest."""
    candidates: list[frozenset[str]] = []
    run = ""
    for code, argument in tree:
        letter = _letter(code, argument)
        if letter:
            run += letter
            continue
        candidates.append(frozenset({run}))
        run = ""
        candidates.append(_of_node(code, argument))
    candidates.append(frozenset({run}))
    return max(candidates, key=lambda words: min(map(len, words), default=0))


def _letter(code: Any, argument: Any) -> str:
    """Give the character that a node stands for, whatever its case; empty for anything else."""
    if code is _code.LITERAL:
        return chr(argument).lower()
    if code is _code.IN and all(kind is _code.LITERAL for kind, _ in argument):
        letters = {chr(value).lower() for _, value in argument}
        return letters.pop() if len(letters) == 1 else ""
    return ""


def _of_node(code: Any, argument: Any) -> frozenset[str]:
    if code is _code.SUBPATTERN:
        return _of_sequence(argument[3])
    if code in (_code.MAX_REPEAT, _code.MIN_REPEAT) and argument[0] > 0:
        return _of_sequence(argument[2])
    if code is _code.BRANCH:
        words = [_of_sequence(branch) for branch in argument[1]]
        return (
            frozenset().union(*words) if all(words) and all(min(map(len, w)) for w in words) else frozenset()
        )
    return frozenset()
