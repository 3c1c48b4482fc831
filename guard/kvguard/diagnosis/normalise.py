"""Turn raw log text into plain lines: no ANSI, no carriage returns, no prefixes, no text of a prompt.

A line of an engine's log arrives wrapped by up to half a dozen others (container, journal, launcher, worker,
logger). What a rule wants is the level, and the message that the engine wrote.
"""

# ruff: noqa: E501 - a wording is kept on one line, so that it can be searched for

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_LINE_CHARS = 16_384
"""What a rule sees of one line. Errors name themselves early; a longer line is a payload."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])")

_TIME = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:\ ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_LEVEL_WORD = (
    r"TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|ERR|CRITICAL|FATAL|Trace|Debug|Info|Warning|Warn|Error|Fatal"
)

_PREFIXES = re.compile(
    rf"""\s*(?:
      (?P<time>\[?{_TIME}(?:\ (?:TP|PP|DP|EP|rank\ ?)\d+)*\]?)
    | \[?[A-Z][a-z]{{2}}\ [A-Z][a-z]{{2}}\ +\d{{1,2}}\ \d\d:\d\d:\d\d\ \d{{4}}\]?      # dmesg -T
    | [A-Z][a-z]{{2}}\ +\d{{1,2}}\ \d\d:\d\d:\d\d(?:\.\d+)?(?:\ [\w.-]{{1,64}})?\ (?:[\w./@-]{{1,64}}(?:\[\d+\])?:)
    | \d\d-\d\d\ \d\d:\d\d:\d\d(?:\.\d+)?
    | \[?\d\d:\d\d:\d\d(?:[-.,:]\d+)?\]?
    | \d+\.\d\d\.\d{{3}}\.\d{{3}}(?:\ (?P<letter>[IWEDT])(?=\ ))?
    | \[\ *\d+\.\d{{3,}}\]                                                            # kernel uptime
    | \[?(?P<glog>[IWEF])\d{{4}}\ \d\d:\d\d:\d\d\.\d+(?:\ +\d+)?(?:\ [\w./-]+:\d+\])?\]?
    | (?:std(?:out|err)\ [FP]\ )
    | [\w.-]{{1,64}}\ *\|(?=\ )                                                       # compose
    | \((?:[A-Za-z][\w.-]*)\ (?:\w+=\w+\ )?pid=\d+[^)]{{0,64}}\)
    | \[(?:rank|Rank\ )\d+\](?:\[rank\d+\])?:?
    | \[\d+(?:,\d+)?\](?:<std(?:out|err)>:)?
    | \[(?:[\w./-]+\.(?:py|cpp|cc|cu|rs|go)):\d+\]
    | (?:[\w./-]+\.(?:py|cpp|cc|cu|rs|go)):\d+\]
    | <(?P<syslog>[0-7])>
    | \[TensorRT-LLM\](?:\[(?P<trt>\w+)\])?
    | \[(?P<bracketed>(?i:{_LEVEL_WORD}))\]\s*:?
    | (?P<word>{_LEVEL_WORD})(?:\ *:(?=\s|$)|(?=\s))
    | (?:text_generation_(?:launcher|router|client|server)|vllm|sglang|kernel)(?:[\w:.]*)?:(?=\s)
    | -\ [\w.]{{1,80}}\ -(?=\ )
    | -(?=\ )
    )""",
    re.VERBOSE,
)

_LEVELS = {"t": "debug", "d": "debug", "i": "info", "n": "info", "w": "warning", "e": "error"}
_LOGFMT_ERROR = re.compile(r"\b(?:error|err)=\"?\w")
_LOGFMT_LEVEL = re.compile(r"\blevel=\"?(\w+)")

_MESSAGE_KEYS = ("message", "msg", "log", "MESSAGE", "event")
_DETAIL_KEYS = (
    "error",
    "err",
    "exception",
    "exc_info",
    "traceback",
    "stack",
    "stack_trace",
    "detail",
    "reason",
)
_PROMPT_KEYS = frozenset({"prompt", "messages", "input", "inputs", "content", "completion", "choices"})


@dataclass(frozen=True, slots=True)
class Line:
    """One message. `level` is error, warning, info, debug, or empty where the line has none."""

    number: int
    text: str
    level: str = ""

    @property
    def quiet(self) -> bool:
        """True where the writer itself says that this is no problem."""
        return self.level in ("info", "debug")


def plain(raw: str) -> str:
    """Cut to a bounded size, without terminal control."""
    if len(raw) > MAX_LINE_CHARS:
        raw = raw[:MAX_LINE_CHARS]
    if "\x1b" in raw:
        raw = _ANSI.sub("", raw)
    return raw.rstrip("\r\n").replace("\x00", "")


def lines_of(number: int, raw: str) -> Iterator[Line]:
    """Give the messages of one raw line: one that a progress bar overwrote counts as several."""
    text = plain(raw)
    for part in text.split("\r") if "\r" in text else (text,):
        yield from _unwrapped(number, part)


def _unwrapped(number: int, text: str, depth: int = 0) -> Iterator[Line]:
    text, level = without_prefixes(text)
    if text.startswith("{") and text.endswith("}") and depth < 3:
        record = _json_object(text)
        if record is not None:
            yield from _from_record(number, record, depth)
            return
    if match := _LOGFMT_LEVEL.search(text):
        level = "error" if _LOGFMT_ERROR.search(text) else _level(match.group(1))
    yield Line(number, text, level)


def without_prefixes(text: str) -> tuple[str, str]:
    """Strip what loggers put in front; the innermost level wins."""
    level, position = "", 0
    for _ in range(12):
        match = _PREFIXES.match(text, position)
        if match is None or match.end() == position:
            break
        said = match.group("letter") or match.group("glog") or match.group("trt")
        said = said or match.group("bracketed") or match.group("word")
        if said:
            level = _level(said)
        elif match.group("syslog"):
            level = "error" if int(match.group("syslog")) < 4 else "info"
        position = match.end()
    return text[position:].strip() if position else text.rstrip(), level


def _level(word: str) -> str:
    return _LEVELS.get(word[:1].lower(), "error")


def _json_object(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _from_record(number: int, record: dict[str, object], depth: int) -> Iterator[Line]:
    """Give the message of a JSON log record, or of an API's error body; what a client sent is left out."""
    fields = record.get("fields")
    if isinstance(fields, dict):
        record = {**record, **fields}
    level = _level(str(record["level"])) if isinstance(record.get("level"), str) else ""
    found = False
    for key in (*_MESSAGE_KEYS, *_DETAIL_KEYS):
        value = record.get(key)
        if key in _MESSAGE_KEYS and isinstance(value, str) and _PROMPT_KEYS & record.keys():
            continue
        for part in _texts(value):
            found = True
            for line in part.splitlines() or ("",):
                for inner in _unwrapped(number, line, depth + 1):
                    yield inner if inner.level else Line(number, inner.text, level)
    if not found:
        yield Line(number, "", level)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (f"{value[key]}" for key in ("message", "type", "code") if isinstance(value.get(key), str))
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, str))
