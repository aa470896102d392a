"""A hung engine with open connections: a request without a first token moves to another engine."""

import asyncio
from pathlib import Path

import pytest

from testing.gateway.running import becomes, running, settings, until
from testing.gateway.upstream import Upstream


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_without_a_first_byte_leave_a_silent_engine(
    tmp_path: Path, model_dir: Path, redis_url: str, stream: bool
):
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, engine_heartbeat_timeout=4.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")

            async def listened_to() -> bool:
                return one.followers == two.followers == 1

            await until(listened_to)
            one.holds = two.holds = True
            asking = asyncio.create_task(acme.complete(stream=stream))

            async def has_come() -> bool:
                return bool(one.requests or two.requests)

            try:
                await until(has_come)
                hung, well = (one, two) if one.requests else (two, one)
                hung.mute, well.holds = True, False
                got = await asyncio.wait_for(asking, 60.0)
                assert got.status == 200
                assert [len(hung.requests), len(well.requests)] == [1, 1]

                async def was_told() -> bool:
                    return hung.cancelled == 1

                await until(was_told)

                async def is_billed_once() -> bool:
                    return [row["requests"] for row in await acme.usage()] == [1]

                await until(is_billed_once)
            finally:
                one.mute = two.mute = one.holds = two.holds = False
                asking.cancel()


async def test_a_stream_that_has_begun_stays_with_a_silent_engine(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, engine_heartbeat_timeout=4.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")
            await becomes(lambda: one.followers == two.followers == 1)
            await gateway.engines_up(2)
            # The first event comes now, the last when the test releases it.
            asking = asyncio.create_task(acme.complete(stream=True, x_engine={"tokens": 2, "pause": True}))

            async def has_begun() -> bool:
                return one.events + two.events == 1

            try:
                await until(has_begun)
                serving = one if one.events else two
                serving.mute = True
                await gateway.engines_up(1)
                one.paused = two.paused = False
                got = await asyncio.wait_for(asking, 60.0)
                assert (got.status, got.events[-1]) == (200, "[DONE]")
                assert len(one.requests) + len(two.requests) == 1
            finally:
                one.mute = two.mute = one.paused = two.paused = False
                asking.cancel()
