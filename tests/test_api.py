"""api: bytes, headers, keys, limits and errors as a client sees them, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import FAKE_KEY
from kvguard.api.auth import AuthError, Keys, check_listen, read_key_file
from kvguard.api.errors import ErrorReply
from kvguard.demand import Dialect
from kvguard.domain import Capacity, Rung, State
from request_fixtures import Stack, fake_stack, raw_post, until

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HI, "max_tokens": 4, **fields}).encode()


async def error_of(stack: Stack, data: bytes, path: str = CHAT, **headers: str) -> tuple[int, dict[str, Any]]:
    status, _, answer = await raw_post(stack, path, data, **headers)
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error


class TestBytes:
    async def test_an_answer_and_its_headers_are_the_engines(self) -> None:
        async with fake_stack() as (stack, child):
            status, headers, answer = await raw_post(stack, CHAT, body())
            direct = await _direct(child.endpoint.base_url, body())
        assert (status, headers["x-engine"]) == (200, "fake")
        assert _without_id(answer) == _without_id(direct)

    async def test_a_stream_is_the_engines_to_the_last_byte(self) -> None:
        async with fake_stack() as (stack, child):
            _, headers, answer = await raw_post(stack, CHAT, body(stream=True))
            direct = await _direct(child.endpoint.base_url, body(stream=True))
        assert headers["content-type"] == "text/event-stream"
        assert _without_id(answer) == _without_id(direct)

    async def test_other_routes_pass_with_method_query_and_body(self) -> None:
        async with fake_stack() as (stack, _):
            status, _, answer = await raw_post(stack, "/echo?a=%20b&c", b"\x00\xff", **{"X-Thing": "1"})
            seen = json.loads(answer)
        assert (status, seen["target"], seen["body"]) == (200, "/echo?a=%20b&c", "\x00\xff")
        assert ["x-thing", "1"] in seen["headers"]

    async def test_a_chunked_upload_passes(self) -> None:
        async def chunks() -> Any:
            yield b"one"
            yield b"two"

        async with (
            fake_stack() as (stack, _),
            aiohttp.ClientSession() as session,
            session.post(stack.url + "/echo", data=chunks()) as response,
        ):
            assert json.loads(await response.text())["body"] == "onetwo"

    async def test_a_large_upload_streams_through_and_has_a_limit(self) -> None:
        async def megabytes(count: int) -> Any:
            for _ in range(count):
                yield b"x" * (1 << 20)

        async with fake_stack(max_body_bytes=5 << 20) as (stack, _), aiohttp.ClientSession() as session:
            async with session.post(stack.url + "/echo", data=megabytes(4)) as response:
                assert len((await response.json())["body"]) == 4 << 20
            async with session.post(stack.url + "/echo", data=megabytes(7)) as response:
                assert response.status == 413

    async def test_unknown_routes_and_methods_are_the_engines_business(self) -> None:
        async with fake_stack() as (stack, _), aiohttp.ClientSession() as session:
            async with session.get(stack.url + "/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "fake"
            async with session.get(stack.url + "/no/such/thing") as response:
                assert response.status == 404
            async with session.head(stack.url + "/v1/models") as response:
                assert (response.status, await response.read()) == (200, b"")
            async with session.get(stack.url + CHAT) as response:
                assert response.status == 405


class TestHeaders:
    async def test_the_engine_gets_its_own_key_and_never_the_clients(self) -> None:
        async with fake_stack(keys={"alice": "client-key"}) as (stack, _):
            _, _, answer = await raw_post(
                stack,
                "/echo",
                b"x",
                **{"Authorization": "Bearer client-key", "X-Api-Key": "other", "X-Conversation-Id": "7"},
            )
        sent = {name.lower(): value for name, value in json.loads(answer)["headers"]}
        assert sent["authorization"] == f"Bearer {FAKE_KEY}"
        assert not {"x-api-key", "x-conversation-id"} & set(sent)

    async def test_a_request_id_is_kept_or_made(self) -> None:
        async with fake_stack() as (stack, child):
            _, kept, _ = await raw_post(stack, CHAT, body(), **{"X-Request-Id": "mine"})
            _, made, _ = await raw_post(stack, CHAT, body())
            seen = (await child.state())["seen"]
        assert kept["x-request-id"] == "mine"
        assert [made["x-request-id"]] == [
            seen[1]["headers"][k] for k in seen[1]["headers"] if k.lower() == "x-request-id"
        ]

    async def test_a_request_id_that_could_forge_headers_is_replaced(self) -> None:
        async with fake_stack() as (stack, _):
            _, headers, _ = await raw_post(stack, CHAT, body(), **{"X-Request-Id": "\x80" * 3})
        assert headers["x-request-id"].isalnum()

    async def test_the_active_configuration_is_named_and_what_was_given_up(self) -> None:
        async with fake_stack() as (stack, _):
            _, headers, _ = await raw_post(stack, CHAT, body())
            assert headers["x-kvguard-config"] == "cfg1"
            stack.become(stack.supervision.snapshot.with_(degraded_by=(Rung.BATCH, Rung.CTX)))
            _, headers, _ = await raw_post(stack, CHAT, body())
            assert headers["x-kvguard-config"] == "cfg1; degraded=batch,ctx"

    async def test_hop_by_hop_headers_stop_here(self) -> None:
        async with fake_stack() as (stack, _):
            _, _, answer = await raw_post(
                stack, "/echo", b"x", **{"Connection": "X-Private", "X-Private": "1", "TE": "trailers"}
            )
        names = {name.lower() for name, _ in json.loads(answer)["headers"]}
        assert not {"x-private", "te"} & names


async def _status_for(app: Any, path: str, peer: str) -> int:
    """The status of a GET that comes from an address which no test may send from."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
        "client": (peer, 50_000), "server": ("guard", 80),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


class TestKeys:
    async def test_a_request_needs_one(self) -> None:
        async with fake_stack(keys={"alice": "right"}) as (stack, _):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
                status, error = await error_of(stack, body(), **header)
                assert (status, error["code"], error["type"]) == (401, "unauthorized", "authentication_error")
            for header in ({"Authorization": "Bearer right"}, {"x-api-key": "right"}):
                status, _, _ = await raw_post(stack, CHAT, body(), **header)
                assert status == 200

    async def test_without_an_admin_key_only_this_machine_may_ask(self) -> None:
        async with fake_stack() as (stack, _):
            for peer, status in (("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 401)):
                for path in ("/guard/status", "/metrics"):
                    assert await _status_for(stack.app, path, peer) == status, (path, peer)

    async def test_health_needs_none_and_the_admin_routes_their_own(self) -> None:
        async with (
            fake_stack(keys={"alice": "right"}, admin_keys={"admin": "boss"}) as (stack, _),
            aiohttp.ClientSession() as session,
        ):
            expected = {("/health", ""): 200, ("/guard/status", "right"): 401, ("/guard/status", "boss"): 200,
                        ("/metrics", ""): 401, ("/guard/docs", ""): 200}  # fmt: skip
            for (path, key), status in expected.items():
                async with session.get(
                    stack.url + path, headers={"Authorization": f"Bearer {key}"}
                ) as response:
                    assert response.status == status, path

    def test_without_keys_only_loopback_may_be_bound(self) -> None:
        for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
            check_listen(host, has_keys=False, insecure_listen=False)
        for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
            check_listen(host, has_keys=True, insecure_listen=False)
            check_listen(host, has_keys=False, insecure_listen=True)
            with pytest.raises(AuthError, match="refusing to listen on"):
                check_listen(host, has_keys=False, insecure_listen=False)

    def test_a_key_file_names_keys_or_not(self, tmp_path: Any) -> None:
        file = tmp_path / "keys"
        file.write_text("# ours\nalice=one\n\nc2VjcmV0Cg==\nbob = two=2\n")
        assert read_key_file(file) == {"alice": "one", "key4": "c2VjcmV0Cg==", "bob": "two=2"}
        file.write_text("alice=one\nalice=two\n")
        with pytest.raises(AuthError, match=r"keys:2: the name 'alice' is used twice"):
            read_key_file(file)

    def test_an_empty_key_is_no_key(self) -> None:
        with pytest.raises(AuthError, match="'alice'"):
            Keys({"alice": " "})


class TestBadInput:
    async def test_each_is_one_clear_error_and_the_server_goes_on(self) -> None:
        async with fake_stack(dialect=Dialect.LLAMA_SERVER, max_body_bytes=20_000) as (stack, _):
            cases: list[tuple[bytes, int, str, str]] = [
                (b'{"messages": ', 400, "invalid_request", "byte 13"),
                (b"[]", 400, "invalid_request", "JSON object"),
                (body(max_tokens=-5), 400, "invalid_request", "got -5"),
                (body(n=9), 400, "invalid_request", "n is 9, but this server runs 4"),
                (body(pad="x" * 30_000), 413, "invalid_request", "20000 bytes"),
                (body(messages=[{"role": "user", "content": "x " * 5000}]), 400,
                 "context_length_exceeded", "5004 tokens"),
            ]  # fmt: skip
            for data, status, code, words in cases:
                got, error = await error_of(stack, data)
                assert (got, error["code"]) == (status, code)
                assert words in error["message"]
            status, _, _ = await raw_post(stack, CHAT, body())
            assert status == 200
            assert stack.limiter.running == 0

    @pytest.mark.parametrize("max_tokens", [0, None, 10**12])
    async def test_a_length_that_a_slot_engine_takes_is_priced_within_the_context(
        self, max_tokens: Any
    ) -> None:
        async with fake_stack(dialect=Dialect.LLAMA_SERVER) as (stack, _):
            status, _, _ = await raw_post(stack, CHAT, body(max_tokens=max_tokens, fake={"tokens": 2}))
        assert status == 200

    async def test_a_huge_length_is_refused_with_both_numbers_where_the_engine_would(self) -> None:
        capacity = Capacity(pool_tokens=8192, ctx_tokens=2048, sequences=4, overflow="preempts")
        async with fake_stack(capacity=capacity) as (stack, _):
            status, error = await error_of(stack, body(max_tokens=5000))
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "2048 tokens" in error["message"]
        assert "5001 tokens" in error["message"]

    async def test_a_body_over_the_limit_is_not_read_to_its_end(self) -> None:
        async with fake_stack(max_body_bytes=1000) as (stack, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
                b"content-length: 9000000000\r\n\r\n"
            )
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
        assert b" 413 " in answer
        assert b"connection: close" in answer

    async def test_a_prompt_of_10_mb_is_refused_with_its_tokens(self) -> None:
        async with fake_stack() as (stack, child):
            status, error = await error_of(
                stack, body(messages=[{"role": "user", "content": "word " * 2_000_000}])
            )
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert "2000000 in the prompt" in error["message"]
            assert (await child.state())["seen"] == []

    async def test_keys_and_prompts_are_in_no_error_and_no_log(self, capsys: Any) -> None:
        async with fake_stack(keys={"alice": "the-secret"}) as (stack, _):
            header = {"Authorization": "Bearer the-secret"}
            _, _, one = await raw_post(stack, CHAT, b'{"messages": "the-prompt', **header)
            _, _, two = await raw_post(
                stack, CHAT, body(messages=[{"role": "user", "content": "the-prompt"}]), **header
            )
            _, _, three = await raw_post(
                stack, CHAT, body(messages=[{"role": "user", "content": "the-prompt " * 9999}]), **header
            )
        output = capsys.readouterr()
        text = output.out + output.err + (one + two + three).decode()
        assert "the-prompt" not in text
        assert "the-secret" not in text


class TestWaiting:
    async def test_a_full_queue_says_when_to_come_back(self) -> None:
        one = Capacity(pool_tokens=2048, ctx_tokens=2048, sequences=1)
        async with fake_stack(capacity=one, limiter={"max_queue_requests": 0}) as (stack, child):
            first = asyncio.create_task(raw_post(stack, CHAT, body(fake={"stall_after": 0})))
            await until(lambda: stack.limiter.running == 1)
            status, headers, answer = await raw_post(stack, CHAT, body())
            assert (status, json.loads(answer)["error"]["code"]) == (503, "overloaded")
            assert int(headers["retry-after"]) >= 1
            assert int(headers["retry-after-ms"]) >= 1000
            await child.release()
            assert (await first)[0] == 200

    async def test_a_request_waits_while_the_backend_starts(self) -> None:
        async with fake_stack() as (stack, _):
            up = stack.supervision.snapshot
            stack.become(up.with_(state=State.STARTING, endpoint=None, capacity=None))
            status, error = await _get_error(stack, "/v1/models")
            assert (status, error["code"]) == (503, "backend_starting")
            waiting = asyncio.create_task(raw_post(stack, CHAT, body()))
            await until(lambda: stack.limiter.waiting == 1)
            stack.become(up.with_(generation=2))
            assert (await waiting)[0] == 200

    async def test_the_deadline_of_a_client_is_heard(self) -> None:
        async with fake_stack() as (stack, _):
            stack.become(stack.supervision.snapshot.with_(state=State.STARTING, endpoint=None))
            status, error = await error_of(stack, body(), **{"x-slo-ttft-ms": "50"})
        assert (status, error["code"]) == (503, "overloaded")

    async def test_a_stream_that_waits_is_kept_alive_with_comments(self) -> None:
        async with fake_stack(ping_waiting=True, ping_every_s=0.02) as (stack, _):
            up = stack.supervision.snapshot
            stack.become(up.with_(state=State.STARTING, endpoint=None))
            async with (
                aiohttp.ClientSession() as session,
                session.post(stack.url + CHAT, data=body(stream=True)) as response,
            ):
                assert (response.status, response.content_type) == (200, "text/event-stream")
                assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                stack.become(up.with_(generation=2))
                rest = await response.read()
        events = [line for line in rest.splitlines() if line and line != b": keep-alive"]
        assert all(line.startswith(b"data: ") for line in events)
        assert events[-1] == b"data: [DONE]"

    async def test_an_error_behind_comments_is_an_event(self) -> None:
        async with fake_stack(ping_waiting=True, ping_every_s=0.02) as (stack, _):
            stack.become(stack.supervision.snapshot.with_(state=State.STARTING, endpoint=None))
            stream = await stack.openai().chat.completions.create(
                model="m", messages=HI, stream=True, extra_headers={"x-slo-ttft-ms": "300"}
            )
            with pytest.raises(openai.APIError) as caught:
                [chunk async for chunk in stream]
        assert caught.value.code == "overloaded"


class TestMetrics:
    async def test_requests_and_their_endings_are_counted(self) -> None:
        async with fake_stack() as (stack, _), aiohttp.ClientSession() as session:
            await raw_post(stack, CHAT, body())
            await raw_post(stack, CHAT, body(stream=True, fake={"tokens": 2}))
            await raw_post(stack, CHAT, b"no json")
            async with session.get(stack.url + "/metrics") as response:
                families = text_string_to_metric_families(await response.text())
            samples = {
                (sample.name, *sample.labels.values()): sample.value
                for family in families
                for sample in family.samples
            }
        assert samples["kvguard_requests_total", "truncated", "chat"] == 1
        assert samples["kvguard_requests_total", "finished", "chat"] == 1
        assert samples["kvguard_refusals_total", "invalid_request", "chat"] == 1
        assert samples["kvguard_request_seconds_count", "chat"] == 2
        assert samples["kvguard_queue_wait_seconds_bucket", "+Inf"] == 2
        assert samples["kvguard_backend_ready",] == 1
        assert samples["kvguard_inflight_requests",] == 0


class TestHealth:
    async def test_it_tells_the_truth_at_every_moment(self) -> None:
        async with fake_stack() as (stack, _), aiohttp.ClientSession() as session:
            up = stack.supervision.snapshot
            states = [
                (up, 200, "ok"),
                (up.with_(state=State.DEGRADING, detail="out of memory"), 503, "degrading"),
                (up.with_(state=State.FAILED, detail="nothing fits"), 503, "failed"),
                (up, 200, "ok"),
            ]
            for snapshot, status, word in states:
                stack.become(snapshot)
                async with session.get(stack.url + "/health") as response:
                    answer = await response.json()
                    assert (response.status, answer["status"]) == (status, word)
                    assert answer["detail"] == snapshot.detail

    async def test_errors_of_our_own_routes_have_the_same_shape(self) -> None:
        async with fake_stack() as (stack, _):
            for path, status in (("/guard/nothing", 404), ("/guard/events?recent=many", 400)):
                got, error = await _get_error(stack, path)
                assert (got, error["code"]) == (status, "invalid_request")

    async def test_events_are_sent_as_they_happen(self) -> None:
        async with fake_stack() as (stack, _), aiohttp.ClientSession() as session:
            stack.events.publish("before")
            async with session.get(stack.url + "/guard/events") as response:
                assert b'"event": "before"' in await response.content.readline()
                await response.content.readline()
                await until(lambda: bool(stack.events._subscribers))
                stack.events.publish("after", step=3)
                assert b'"step": 3' in await response.content.readline()


class TestOpenAIClient:
    async def test_retries_work_together_with_retry_after(self) -> None:
        """The client waits as long as it is told, and the request runs once."""
        async with fake_stack() as (stack, child):
            up = stack.supervision.snapshot
            stack.become(up.with_(state=State.STARTING, endpoint=None))
            client = stack.openai(max_retries=1)
            asking = asyncio.create_task(
                client.chat.completions.create(
                    model="m", messages=HI, max_tokens=2, extra_headers={"x-slo-ttft-ms": "100"}
                )
            )
            await until(lambda: bool(stack.limiter.status().refused_total))
            stack.become(up)
            assert (await asking).choices[0].message.content == "w0 w1 "
            assert len((await child.state())["seen"]) == 1

    async def test_errors_are_the_classes_that_it_knows(self) -> None:
        async with fake_stack(keys={"a": "right"}) as (stack, _):
            with pytest.raises(openai.AuthenticationError):
                await stack.openai(api_key="wrong").chat.completions.create(model="m", messages=HI)
            with pytest.raises(openai.BadRequestError) as caught:
                await stack.openai(api_key="right").chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x " * 9000}]
                )
            assert caught.value.code == "context_length_exceeded"


def test_an_error_names_when_to_retry_in_both_headers() -> None:
    headers = dict(ErrorReply(code="overloaded", message="", retry_after_s=1.2).headers())
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"2", b"1200")


async def _direct(base_url: str, data: bytes) -> bytes:
    headers = {"Authorization": f"Bearer {FAKE_KEY}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(base_url + CHAT, data=data, headers=headers) as response,
    ):
        return await response.read()


def _without_id(answer: bytes) -> list[bytes]:
    """Everything but the id, which the fake makes anew each time."""
    return [
        part.split(b'"', 1)[1] if part.startswith(b"fake-") else part for part in answer.split(b'"id": "')
    ]


async def _get_error(stack: Stack, path: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(stack.url + path) as response:
        return response.status, (await response.json())["error"]
