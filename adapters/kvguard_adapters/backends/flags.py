"""Command-line flags of an engine: which ones its version has, and which ones the user has set himself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_SPELLING = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing to set: the knob it belongs to ("" for none), and how engines of different age spell it.

    The first alternative whose flag is known wins; with none known the option is left out.
    """

    knob: str
    alternatives: tuple[tuple[str, ...], ...]


class Flags:
    """The flags of one installed engine, by all their spellings."""

    def __init__(self, spellings: Mapping[str, frozenset[str]]) -> None:
        self._spellings = spellings

    @classmethod
    def of_spellings(cls, flags: Iterable[Iterable[str]]) -> Flags:
        groups = [frozenset(names) for names in flags]
        return cls({name: names for names in groups for name in names})

    @classmethod
    def of_help(cls, text: str) -> Flags:
        """Read a `--help` text: a line that starts with a dash names all spellings of one flag."""
        spellings: dict[str, frozenset[str]] = {}
        for line in text.splitlines():
            line = line.strip()
            if line.startswith("-"):
                names = frozenset(_SPELLING.findall(re.split(r"\s{2,}(?![\s-])", line)[0]))
                spellings |= {name: names | spellings.get(name, frozenset()) for name in names}
        return cls(spellings)

    def knows(self, flag: str) -> bool:
        return flag in self._spellings

    def arguments(
        self, options: Iterable[Option], extra: Sequence[str], pinned: frozenset[str] = frozenset()
    ) -> list[str]:
        """Spell the options; whatever the user set in `extra`, or a knob that it pins, is left to him."""
        given = _flags_in(extra)
        return [
            word
            for option in options
            if option.knob not in pinned and not self._given(option, given)
            for word in next((a for a in option.alternatives if self.knows(a[0])), ())
        ]

    def pinned(self, options: Iterable[Option], extra: Sequence[str]) -> frozenset[str]:
        """Knobs that `extra` sets."""
        given = _flags_in(extra)
        return frozenset(option.knob for option in options if option.knob and self._given(option, given))

    def _given(self, option: Option, given: frozenset[str]) -> bool:
        return any(
            (self._spellings.get(flag, frozenset()) | {flag}) & given for flag, *_ in option.alternatives
        )


def _flags_in(arguments: Iterable[str]) -> frozenset[str]:
    return frozenset(_flag_names(arguments))


def _flag_names(arguments: Iterable[str]) -> Iterator[str]:
    for argument in arguments:
        if argument.startswith("-"):
            yield argument.split("=", 1)[0]
