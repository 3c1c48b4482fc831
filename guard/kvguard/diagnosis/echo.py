"""Take out of a log what a user wrote: a pasted error in a prompt is not evidence.

Request loggers put a prompt, or an answer, into the log in two ways: quoted in one line, or raw over many
lines between the marks of a chat template.
"""

# ruff: noqa: E501 - a wording is kept on one line, so that it can be searched for

from __future__ import annotations

import re

_QUOTED = re.compile(
    r"""(?:Received\ request\b|Generated\ (?:response|output)|(?i:\brequest\ body|\bprompt\s*[:=]|\bprompts?['"]\s*[:=])
        |\bformatted_prompt|\bmessages['"]?\s*[:=]\s*\[
        |['"]content['"]\s*:|\bcontent=['"]|['"]text['"]\s*:|\binputs?['"]\s*:|\binputs?=['"]
        |\buser_?(?:input|message|prompt)\b|\boutput_?text\b|\bchat\ history|['"]delta['"]
        |\bGenerateReqInput\(|<\|im_start\||<\|start_header_id\||<start_of_turn>|\[INST\]
        |^(?i:user|human|question)\s*[:>])""",
    re.VERBOSE,
)
_HINTS: tuple[str, ...] = (
    *("prompt", "request", "generat", "message", "content", "text", "input", "user", "human", "question"),
    *("chat history", "delta", "<|", "<start_of_turn>", "[inst]"),
)
_RAW_OPEN = re.compile(
    r"<\|im_start\|>(?:user|system|tool)|<\|start_header_id\|>(?:user|system)"
    r"|<\|(?:user|system)\|>|<start_of_turn>user|\[INST\]"
)
_RAW_CLOSE = re.compile(
    r"<\|(?:im_end|eot_id|end|endoftext|assistant)\|>|<end_of_turn>|\[/INST\]|</s>"
    r"|<\|im_start\|>assistant|<\|start_header_id\|>assistant|<start_of_turn>model"
)
_ENGINE_SPEAKS = re.compile(
    r"HTTP/1\.[01]\" \d{3}|params: SamplingParams|\bslot +\w+: id|\bsrv +\w+:|POST /v1/|Finished request"
)
_MAX_RAW_LINES = 400
"""An echo without its closing mark ends here, so that it cannot hide the rest of a log."""


class EchoFilter:
    """Cuts each line where a user's text begins. Keeps state over the lines of one log."""

    def __init__(self) -> None:
        self._raw_lines_left = 0

    @property
    def inside(self) -> bool:
        return self._raw_lines_left > 0

    def cut(self, text: str, low: str) -> str:
        """Give the part of a line that is the engine's own; empty inside a prompt."""
        if self._raw_lines_left:
            return self._inside(text)
        if not any(hint in low for hint in _HINTS):
            return text
        match = _QUOTED.search(text)
        if match is None:
            return text
        self._open(text, match.start())
        return text[: match.start()]

    def _open(self, text: str, start: int) -> None:
        opening = None
        for opening in _RAW_OPEN.finditer(text, start):  # noqa: B007 - the last one counts
            pass
        # An escaped newline tells that the logger quoted the prompt: it ends with its line.
        if opening is not None and "\\n" not in text and not _RAW_CLOSE.search(text, opening.end()):
            self._raw_lines_left = _MAX_RAW_LINES

    def _inside(self, text: str) -> str:
        self._raw_lines_left -= 1
        if _ENGINE_SPEAKS.search(text):
            self._raw_lines_left = 0
            return text
        if _RAW_CLOSE.search(text):
            self._raw_lines_left = 0
        return ""
