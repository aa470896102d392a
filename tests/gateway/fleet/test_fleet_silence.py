"""A hung engine with open connections: a request without a first token moves to another engine."""

import asyncio
from pathlib import Path

from testing.gateway.running import becomes, running, settings, until
from testing.gateway.upstream import Upstream


async def test_requests_without_a_first_byte_leave_a_silent_engine(tmp_path: Path, model_dir: Path, redis_url: str):
    """A stream and a whole answer, which wait for the same silence."""
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, engine_heartbeat_timeout=4.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")

            async def listened_to() -> bool:
                return one.followers == two.followers == 1

            await until(listened_to)
            one.holds = two.holds = True
            # Requests of one conversation go to one engine.
            bodies = [{"stream": stream, "prompt_cache_key": "conversation"} for stream in (True, False)]
            asking = [asyncio.create_task(acme.complete(**body)) for body in bodies]

            async def have_come() -> bool:
                return len(one.requests) + len(two.requests) == 2

            try:
                await until(have_come)
                hung, well = (one, two) if one.requests else (two, one)
                hung.mute, well.holds = True, False
                answers = await asyncio.wait_for(asyncio.gather(*asking), 60.0)
                assert [got.status for got in answers] == [200, 200]
                assert [len(hung.requests), len(well.requests)] == [2, 2]

                async def was_told() -> bool:
                    return hung.cancelled == 2

                await until(was_told)

                async def are_billed_once() -> bool:
                    return [row["requests"] for row in await acme.usage()] == [2]

                await until(are_billed_once)
            finally:
                one.mute = two.mute = one.holds = two.holds = False
                for each in asking:
                    each.cancel()


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
