"""Counts prompt tokens with llama-cpp-python's own code, without loading a weight. Needs nothing of kvguard.

    PYTHON llama_vocab_child.py MODEL.gguf

reads one JSON object a line, {"id", "path", "body"}, and answers {"id", "tokens"} or {"id", "error"}, where
the error is the name of an exception: its text could quote the prompt. Ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import llama_cpp

_UNBOUNDED_CTX = 1 << 30
_CHAT_FIELDS = ("messages", "functions", "function_call", "tools", "tool_choice")


class _Counted(Exception):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens


class _Vocabulary(llama_cpp.Llama):  # type: ignore[misc]
    """A Llama that stops where it would begin to generate: template and tokens are then done."""

    def generate(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Counted(len(tokens))


def count(llama: Any, path: str, body: dict[str, Any]) -> int:
    if path.endswith("/embeddings"):
        given = body["input"]
        texts = given if isinstance(given, list) else [given]
        return max(len(llama.tokenize(text.encode())) for text in texts)
    try:
        if path.endswith("/chat/completions"):
            asked = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
            llama.create_chat_completion(**asked, max_tokens=1)
        else:
            prompt = body["prompt"]
            if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
                (prompt,) = prompt or [""]  # the server takes one prompt a request
            llama.create_completion(prompt, suffix=body.get("suffix"), max_tokens=1)
    except _Counted as counted:
        return counted.tokens
    raise RuntimeError("the model was not asked to generate")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints is not an answer
    llama = _Vocabulary(sys.argv[1], vocab_only=True, verbose=False)
    llama._n_ctx = _UNBOUNDED_CTX  # it would refuse a long prompt instead of counting it
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"tokens": count(llama, request["path"], request["body"])}
        except Exception as exc:
            answer = {"error": type(exc).__name__}
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")


if __name__ == "__main__":
    main()
