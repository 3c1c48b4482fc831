"""inflight: no request is lost when its engine dies, and none is answered twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from fakes import EngineChild, FakeClient, ready
from kvguard.domain import Capacity, State
from request_fixtures import Stack, fake_stack, raw_post, reborn, until

HI = [{"role": "user", "content": "hi"}]


async def ask(stack: Stack, **fields: Any) -> Any:
    fake = fields.pop("fake", {})
    fields = {"model": "m", "messages": HI, "max_tokens": 6, **fields}
    return await stack.openai().chat.completions.create(**fields, extra_body={"fake": fake})


async def text_of(stream: Any) -> tuple[str, list[Any]]:
    chunks = [chunk async for chunk in stream]
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def words(count: int) -> str:
    return "".join(f"w{i} " for i in range(count))


class TestReplay:
    async def test_an_answer_in_one_piece_is_asked_for_again(self) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            answer = asyncio.create_task(ask(stack, fake={"crash_after": 3, "crash_in_lives": [1]}))
            async with reborn(stack, child) as heir:
                assert (await answer).choices[0].message.content == words(6)
                assert len((await heir.state())["seen"]) == 1
            assert stack.value("kvguard_replays_total", how="replayed") == 1

    async def test_a_stream_that_has_not_begun_is_asked_for_again(self) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            answer = asyncio.create_task(
                ask(stack, stream=True, fake={"crash_after": 0, "crash_in_lives": [1]})
            )
            async with reborn(stack, child):
                text, chunks = await text_of(await answer)
            assert text == words(6)
            assert len({chunk.id for chunk in chunks}) == 1

    async def test_a_replay_goes_ahead_of_those_that_wait(self) -> None:
        async with fake_stack(capacity=ONE_AT_A_TIME) as (stack, child):
            stack.supervision.alive = False
            first = asyncio.create_task(ask(stack, fake={"crash_after": 3, "crash_in_lives": [1]}))
            second = asyncio.create_task(ask(stack, max_tokens=7))
            async with reborn(stack, child) as heir:
                await asyncio.gather(first, second)
                seen = [request["body"]["max_tokens"] for request in (await heir.state())["seen"]]
            assert seen == [6, 7]

    async def test_a_backend_that_is_gone_for_good_is_a_503_with_the_reason(self) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            answer = asyncio.create_task(ask(stack, fake={"crash_after": 1}))
            await child.process.wait()
            await stack.supervision.asked.wait()
            failed = stack.supervision.snapshot.with_(
                state=State.FAILED, endpoint=None, detail="The weights do not fit"
            )
            stack.become(failed)
            with pytest.raises(openai.InternalServerError, match="The weights do not fit") as caught:
                await answer
            assert caught.value.code == "backend_failed"
            assert caught.value.response.headers["x-should-retry"] == "false"

    async def test_a_backend_that_does_not_come_back_in_time_is_a_503(self) -> None:
        async with fake_stack(wait_s=0.2) as (stack, _):
            stack.supervision.alive = False
            with pytest.raises(openai.InternalServerError, match=r"did not recover within 0\.2 s") as caught:
                await ask(stack, fake={"crash_after": 1})
            assert caught.value.code == "backend_restarted"


class TestContinuation:
    @pytest.mark.parametrize("crash_after", [1, 3, 6])
    async def test_the_client_sees_one_unbroken_stream(self, crash_after: int) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            stream = await ask(
                stack,
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
                fake={"crash_after": crash_after, "crash_in_lives": [1]},
            )
            reading = asyncio.create_task(text_of(stream))
            async with reborn(stack, child):
                text, chunks = await reading
            assert text == words(6)
            assert len({chunk.id for chunk in chunks}) == 1
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
            assert sum(bool(c.choices and c.choices[0].delta.role) for c in chunks) == 1
            usage = chunks[-1].usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (1, 6, 7)

    async def test_it_survives_a_second_death(self) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            stream = await ask(stack, stream=True, fake={"crash_after": 2, "crash_in_lives": [1, 2]})
            reading = asyncio.create_task(text_of(stream))
            async with reborn(stack, child) as heir, reborn(stack, heir):
                text, _ = await reading
            assert text == words(6)

    async def test_a_text_completion_goes_on_behind_its_prompt(self) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            stream = await stack.openai().completions.create(
                model="m",
                prompt="w41 ",
                max_tokens=4,
                stream=True,
                extra_body={"fake": {"crash_after": 2, "crash_in_lives": [1]}},
            )
            reading = asyncio.create_task(_completion_text(stream))
            async with reborn(stack, child) as heir:
                assert await reading == "w42 w43 w44 w45 "
                body = (await heir.state())["seen"][0]["body"]
            assert (body["prompt"], body["max_tokens"]) == ("w41 w42 w43 ", 2)

    @pytest.mark.parametrize(
        "field", [{"logprobs": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"n": 2}]
    )
    async def test_what_cannot_go_on_ends_with_an_error_event(self, field: dict[str, Any]) -> None:
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            stream = await ask(stack, stream=True, fake={"crash_after": 2, "crash_in_lives": [1]}, **field)
            reading = asyncio.create_task(text_of(stream))
            async with reborn(stack, child):
                with pytest.raises(openai.APIError, match="the rest is lost") as caught:
                    await reading
            assert caught.value.code == "backend_restarted"


class TestTheEngineLives:
    async def test_its_error_reaches_the_client_byte_for_byte(self) -> None:
        body = '{"error": {"message":"Context size has been exceeded.",  "code":500}}'
        async with fake_stack() as (stack, _):
            status, headers, answer = await raw_post(
                stack, "/v1/chat/completions", encode(fake={"status": 500, "body": body})
            )
        assert (status, answer.decode()) == (500, body)
        assert headers["x-request-id"]

    async def test_its_error_event_too(self) -> None:
        async with fake_stack() as (stack, _):
            _, _, answer = await raw_post(
                stack, "/v1/chat/completions", encode(stream=True, max_tokens=5, fake={"error_after": 2})
            )
        assert answer.count(b"w1 ") == 1
        assert answer.endswith(
            b'data: {"error": {"message": "engine says no", "type": "server_error", "code": 500}}\n\n'
        )

    async def test_a_stream_without_a_finish_reason_ends_as_it_did(self) -> None:
        async with fake_stack() as (stack, _):
            _, _, answer = await raw_post(
                stack, "/v1/chat/completions", encode(stream=True, max_tokens=5, fake={"cut_after": 2})
            )
        assert answer.count(b"data: ") == 2


class TestClientLeaves:
    async def test_in_the_queue_its_place_is_free_at_once(self) -> None:
        async with fake_stack(capacity=ONE_AT_A_TIME) as (stack, child):
            stalled = asyncio.create_task(ask(stack, fake={"stall_after": 1}))
            await until(lambda: stack.limiter.running == 1)
            waiting = asyncio.create_task(ask(stack))
            await until(lambda: stack.limiter.waiting == 1)
            waiting.cancel()
            await until(lambda: stack.limiter.waiting == 0)
            await child.release()
            await stalled

    async def test_in_a_stream_the_engine_is_told_and_the_place_is_kept_until_it_is_free(self) -> None:
        async with fake_stack() as (stack, child):
            stream = await ask(stack, stream=True, fake={"stall_after": 2})
            await anext(aiter(stream))
            assert (await child.state())["running"] == 1
            await stream.close()
            await until(lambda: stack.limiter.running == 0)
            assert (await child.state())["running"] == 0
            assert stack.value("kvguard_requests_total", route="chat", ending="cancelled") == 1

    async def test_others_that_run_do_not_keep_the_place_of_one_that_left(self) -> None:
        async with fake_stack() as (stack, child):
            other = await ask(stack, stream=True, fake={"stall_after": 2})
            await anext(aiter(other))
            stream = await ask(stack, stream=True, fake={"stall_after": 2})
            await anext(aiter(stream))
            await stream.close()
            await until(lambda: stack.limiter.running == 1)
            await child.release()
            await text_of(other)


class TestTakenBack:
    @pytest.mark.parametrize("begun", [False, True])
    async def test_the_client_notices_nothing(self, begun: bool) -> None:
        """The engine's place is free before the request gets another, at the head of the queue."""
        async with fake_stack(capacity=ONE_AT_A_TIME) as (stack, child):
            stall = {"stall_after": 2 if begun else 0}
            asking = asyncio.create_task(ask(stack, stream=True, fake=stall))
            stream = await asking if begun else None
            if stream is not None:
                first = await anext(aiter(stream))
            await until(lambda: bool(stack.hot.inflight.running()))
            (flight,) = stack.hot.inflight.running()
            assert flight.lease is not None
            flight.lease.take_back()
            await until(lambda: stack.limiter.status().started_total == 2)
            assert (await child.state())["running"] <= 1
            await child.release()
            text, _ = await text_of(stream or await asking)
            if stream is not None:
                text = (first.choices[0].delta.content or "") + text
            assert text == words(6)
            assert stack.limiter.running == 0

    async def test_one_that_could_not_go_on_is_left_alone_once_it_has_begun(self) -> None:
        async with fake_stack() as (stack, child):
            stream = await ask(stack, stream=True, logprobs=True, fake={"stall_after": 2})
            await anext(aiter(stream))
            (flight,) = stack.hot.inflight.running()
            assert flight.lease is not None
            await until(lambda: not flight.lease.may_be_taken_back)
            await child.release()
            await text_of(stream)

    async def test_an_answer_in_one_piece_is_left_alone(self) -> None:
        async with fake_stack() as (stack, child):
            asking = asyncio.create_task(ask(stack, fake={"stall_after": 1}))
            await until(lambda: bool(stack.hot.inflight.running()))
            (flight,) = stack.hot.inflight.running()
            assert flight.lease is not None
            assert not flight.lease.may_be_taken_back
            await child.release()
            await asking


class TestOverflow:
    """The engine's pool was overrun: nobody's fault but ours, so nobody hears of it."""

    @pytest.mark.parametrize("after", [0, 3])
    async def test_a_stream_goes_on_where_it_was(self, after: int) -> None:
        async with fake_stack() as (stack, child):
            text, chunks = await text_of(await ask(stack, stream=True, fake={"overflow_after": after}))
            assert text == words(6)
            assert len({chunk.id for chunk in chunks}) == 1
            assert len((await child.state())["seen"]) == 2
            assert stack.hot.inflight.overflows == 1
            assert stack.limiter.running == 0

    async def test_an_answer_in_one_piece_is_asked_for_again(self) -> None:
        async with fake_stack() as (stack, _):
            answer = await ask(stack, fake={"overflow_after": 0})
            assert answer.choices[0].message.content == words(6)
            assert stack.value("kvguard_replays_total", how="replayed") == 1

    async def test_next_time_it_starts_only_where_its_maximum_fits(self) -> None:
        async with fake_stack() as (stack, child):
            asking = asyncio.create_task(
                ask(stack, stream=True, fake={"overflow_after": 1, "stall_after": 2})
            )
            await until(lambda: [f.overflows for f in stack.hot.inflight.running()] == [1])
            (flight,) = stack.hot.inflight.running()
            assert flight.demand is not None
            assert not flight.demand.counted
            await child.release()
            await text_of(await asking)

    async def test_an_engine_that_overflows_for_ever_is_quoted(self) -> None:
        async with fake_stack() as (stack, child):
            with pytest.raises(openai.APIError, match="Context size has been exceeded"):
                await ask(stack, fake={"overflow_after": 0, "overflow_times": 99})
            assert len((await child.state())["seen"]) == 4

    async def test_a_start_that_had_its_deadline_has_another(self) -> None:
        """The time to a first token was kept; what the pool did then is not the client's clock to pay."""
        async with fake_stack() as (stack, child):
            stream = await stack.openai().chat.completions.create(
                model="m", messages=HI, max_tokens=6, stream=True, extra_headers={"x-slo-ttft-ms": "200"},
                extra_body={"fake": {"delay_s": 0.2, "overflow_after": 3}},
            )  # fmt: skip
            text, _ = await text_of(stream)
            assert text == words(6)
            assert len((await child.state())["seen"]) == 2


class TestCounting:
    async def test_nobody_is_counted_while_there_is_room(self) -> None:
        async with fake_stack() as (stack, _):
            await asyncio.gather(*(ask(stack) for _ in range(3)))
            assert counted(stack) == 1  # the template, once

    async def test_when_one_would_wait_it_and_those_that_run_are_counted(self) -> None:
        """A bound of 1,300 bytes each fits once; 300 words each fit four times."""
        async with fake_stack(capacity=Capacity(pool_tokens=2048, ctx_tokens=2048, sequences=4)) as (
            stack,
            child,
        ):
            long = [{"role": "user", "content": "word " * 260}]
            first = asyncio.create_task(ask(stack, messages=long, fake={"stall_after": 1}))
            await until(lambda: stack.limiter.running == 1)
            second = asyncio.create_task(ask(stack, messages=long, fake={"stall_after": 1}))
            await until(lambda: len(stack.hot.inflight.running()) == 2)
            assert all(f.demand and f.demand.exact for f in stack.hot.inflight.running())
            await child.release()
            await asyncio.gather(first, second)

    async def test_the_same_body_is_counted_once(self) -> None:
        async with fake_stack() as (stack, _):
            for _ in range(3):
                with pytest.raises(openai.BadRequestError):
                    await ask(stack, messages=[{"role": "user", "content": "word " * 3000}])
            assert counted(stack) == 2  # the template, and this


class TestPoison:
    async def test_only_a_request_that_crashes_alone_is_refused(self) -> None:
        """Two memory crashes make suspects of both; then each runs alone, and one of them proves innocent."""
        async with fake_stack() as (stack, child):
            stack.supervision.alive = False
            bad = asyncio.create_task(ask(stack, fake={"stall_after": 0, "crash_after": 2}))
            good = asyncio.create_task(ask(stack, fake={"stall_after": 0}))
            blamed = []
            for _ in range(2):
                await until(lambda: len(list(stack.hot.inflight.running())) == 2)
                child.process.kill()
                child, alone = await next_life(stack, child)
                blamed.append(alone)
            await until(lambda: stack.limiter.running == 1)
            assert stack.limiter.waiting == 1
            await child.release()
            child, alone = await next_life(stack, child)
            blamed.append(alone)
            await child.release()
            with pytest.raises(openai.BadRequestError, match="ran this request alone") as caught:
                await bad
            assert caught.value.code == "request_poisonous"
            assert (await good).choices[0].message.content == words(6)
            assert blamed == [False, False, True]
            await child.stop()

    async def test_a_death_that_is_not_for_memory_makes_no_suspect(self) -> None:
        async with fake_stack() as (stack, child):
            stream = await ask(stack, stream=True, fake={"stall_after": 2})
            await anext(aiter(stream))
            for _ in range(5):
                assert stack.hot.inflight.crashed(1, memory=False) is False
            assert not any(flight.suspect for flight in stack.hot.inflight.running())
            await child.release()
            await text_of(stream)


SMALL_POOL = Capacity(pool_tokens=2048, ctx_tokens=2048, sequences=4)
ONE_AT_A_TIME = Capacity(pool_tokens=2048, ctx_tokens=2048, sequences=1)


async def next_life(stack: Stack, child: EngineChild) -> tuple[EngineChild, bool]:
    """See a life end, and start the next. Returns whether a request was to blame."""
    await child.process.wait()
    await until(lambda: not list(stack.hot.inflight.running()))
    generation = stack.supervision.snapshot.generation
    blamed = stack.die(generation)
    heir = await EngineChild.start(life=generation + 1)
    stack.engine = FakeClient(heir.endpoint)
    stack.become(ready(heir.endpoint, generation=generation + 1))
    return heir, blamed


def counted(stack: Stack) -> int:
    assert isinstance(stack.engine, FakeClient)
    return len(stack.engine.counted)


def encode(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HI, **fields}).encode()


async def _completion_text(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
