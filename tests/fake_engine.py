"""A child process that speaks the engines' HTTP and does on request what a real one cannot: stall, crash.

It is deterministic: the token after `w7 ` is `w8 `, wherever the text so far came from, so that an answer
that was continued can be compared byte for byte with one that was not. What it should do is in the body:

    "fake": {"tokens": 5,            length of the answer (else max_tokens)
             "delay_s": 0.01,        pause before each token
             "stall_after": 3,       stop there until POST /fake/release
             "crash_after": 3,       die by SIGKILL after that many tokens (0: before any byte)
             "crash_in_lives": [1],  only in these lives (else in all)
             "error_after": 3,       an error event there
             "overflow_after": 3,    the error of llama.cpp's full pool there, or HTTP 500
             "overflow_times": 1,    so many times in all
             "status": 500, "body": "...",   answer this, whole
             "cut_after": 3}         close the stream cleanly without a finish reason

GET /fake/state tells how many requests it runs and how many it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
from typing import Any

from aiohttp import web

_LAST_WORD = re.compile(r"w(\d+)\s*$")


OVERFLOW = {"message": "Context size has been exceeded.", "type": "server_error", "code": 500}


class FakeEngine:
    def __init__(self, life: int, api_key: str) -> None:
        self.life = life
        self.api_key = api_key
        self.running = 0
        self.overflowed = 0
        self.seen: list[dict[str, Any]] = []
        self.release = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/fake/state", self.state)
        app.router.add_post("/fake/release", self.released)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/echo", self.echo)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response({"running": self.running, "seen": self.seen, "life": self.life})

    async def released(self, request: web.Request) -> web.Response:
        self.release.set()
        return web.json_response({})

    async def echo(self, request: web.Request) -> web.Response:
        headers = [(name, value) for name, value in request.headers.items()]
        body = (await request.read()).decode("latin-1")
        return web.json_response({"headers": headers, "body": body, "target": request.raw_path})

    def _overflows(self, fake: dict[str, Any]) -> bool:
        self.overflowed += 1
        return self.overflowed <= int(fake.get("overflow_times", 1))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "bad key", "code": 401}}, status=401)
        body = await request.json()
        self.seen.append({"body": body, "headers": dict(request.headers)})
        self.running += 1
        try:
            return await self._generate(request, body)
        finally:
            self.running -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fake = body.get("fake") or {}
        if "status" in fake:
            return web.Response(
                status=fake["status"], text=fake.get("body", ""), content_type="application/json"
            )
        answer = Answer(body, chat=request.path.endswith("chat/completions"))
        at_once = fake.get("overflow_after") == 0 and self._overflows(fake)
        if not body.get("stream"):
            if at_once:
                return web.json_response({"error": OVERFLOW}, status=500)
            async for _ in self._tokens(fake, answer):
                pass
            return web.json_response(answer.whole(), headers={"x-engine": "fake"})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if fake.get("crash_after") == 0:
            self._maybe_crash(fake)
        await response.prepare(request)
        if at_once:
            await response.write(b"data: " + json.dumps({"error": OVERFLOW}).encode() + b"\n\n")
            return response
        count = 0
        async for text in self._tokens(fake, answer):
            await response.write(answer.event(text))
            count += 1
            if count == fake.get("overflow_after") and self._overflows(fake):
                await response.write(b"data: " + json.dumps({"error": OVERFLOW}).encode() + b"\n\n")
                return response
            if count == fake.get("error_after"):
                error = {"error": {"message": "engine says no", "type": "server_error", "code": 500}}
                await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
                return response
            if count == fake.get("cut_after"):
                return response
        for event in answer.last_events():
            await response.write(event)
        return response

    async def _tokens(self, fake: dict[str, Any], answer: Answer) -> Any:
        for index in range(answer.tokens):
            if index == fake.get("crash_after"):
                self._maybe_crash(fake)
            if index == fake.get("stall_after"):
                await self.release.wait()
            if fake.get("delay_s"):
                await asyncio.sleep(fake["delay_s"])
            yield answer.next_text()
        if fake.get("crash_after") == answer.tokens:  # before the finish reason
            self._maybe_crash(fake)

    def _maybe_crash(self, fake: dict[str, Any]) -> None:
        if self.life in fake.get("crash_in_lives", [self.life]):
            os.kill(os.getpid(), signal.SIGKILL)


class Answer:
    """One answer in OpenAI's shapes."""

    def __init__(self, body: dict[str, Any], *, chat: bool) -> None:
        self.chat = chat
        self.prompt = self._prompt(body)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.tokens = min(asked, (body.get("fake") or {}).get("tokens", asked))
        self.finish = "length" if self.tokens == asked else "stop"
        self.usage_asked = bool((body.get("stream_options") or {}).get("include_usage"))
        self.text = ""
        self.first = True

    def _prompt(self, body: dict[str, Any]) -> str:
        if not self.chat:
            return str(body.get("prompt", ""))
        return " ".join(str(message.get("content", "")) for message in body.get("messages", []))

    def next_text(self) -> str:
        last = _LAST_WORD.search(self.prompt + self.text)
        text = f"w{int(last[1]) + 1 if last else 0} "
        self.text += text
        return text

    def event(self, text: str) -> bytes:
        if self.chat:
            delta: dict[str, Any] = {"content": text}
            if self.first:
                delta["role"] = "assistant"
            self.first = False
            choice = {"index": 0, "delta": delta, "finish_reason": None}
        else:
            choice = {"index": 0, "text": text, "finish_reason": None}
        return self._chunk({"choices": [choice]})

    def last_events(self) -> list[bytes]:
        empty: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        events = [self._chunk({"choices": [{"index": 0, **empty, "finish_reason": self.finish}]})]
        if self.usage_asked:
            events.append(self._chunk({"choices": [], "usage": self.usage()}))
        return [*events, b"data: [DONE]\n\n"]

    def usage(self) -> dict[str, int]:
        prompt = len(self.prompt.split())
        new = len(self.text.split())
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self) -> dict[str, Any]:
        content = (
            {"message": {"role": "assistant", "content": self.text}} if self.chat else {"text": self.text}
        )
        choice = {"index": 0, **content, "finish_reason": self.finish}
        return {**self._head(), "choices": [choice], "usage": self.usage()}

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": f"fake-{os.getpid()}-{id(self)}", "object": kind, "created": 1, "model": "fake"}

    def _chunk(self, fields: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps({**self._head(), **fields}).encode() + b"\n\n"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--life", type=int, default=1)
    parser.add_argument("--api-key", default="")
    args = parser.parse_args()
    runner = web.AppRunner(
        FakeEngine(args.life, args.api_key).application(), handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
