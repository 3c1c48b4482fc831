"""An engine that costs next to nothing: what is left in a measurement is the proxy.

A process of its own. Answers any POST with a short completion, or with `max_tokens` chunks of a stream, one
each `--interval-s` (0: as fast as the connection takes them). Prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import cast

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_USAGE = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}


def _frame(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _event(fields: dict[str, object]) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    return _frame(b"data: " + json.dumps({**head, **fields}).encode() + b"\n\n")


WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "fake",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        ],
        "usage": _USAGE,
    }
).encode()
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(WHOLE),
    WHOLE,
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = _event({"choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}]})
STREAM_END = (
    _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": _USAGE})
    + _frame(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


class Connection(asyncio.Protocol):
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._buffer = b""
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end)
            total = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < total:
                return
            body, self._buffer = self._buffer[end + 4 : total], self._buffer[total:]
            self._answer(body)

    def _answer(self, body: bytes) -> None:
        if b'"stream": true' not in body and b'"stream":true' not in body:
            self._transport.write(ANSWER)
            return
        wanted = _MAX_TOKENS.search(body)
        self._task = asyncio.create_task(self._stream(int(wanted[1]) if wanted else 16))

    async def _stream(self, chunks: int) -> None:
        self._transport.write(STREAM_HEAD)
        for _ in range(chunks):
            self._transport.write(CHUNK)
            if self._interval_s:
                await asyncio.sleep(self._interval_s)
            elif not self._writable.is_set():
                await self._writable.wait()
            else:
                await asyncio.sleep(0)
        self._transport.write(STREAM_END)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval-s", type=float, default=0.0)
    args = parser.parse_args()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(args.interval_s), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
