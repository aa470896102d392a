"""An engine that hangs, its connections open: who waits for its first word gets another engine."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.running import running, settings, until
from tests.gateway.upstream import Upstream


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_without_a_first_byte_leave_a_silent_engine(
    tmp_path: Path, model_dir: Path, redis_url: str, stream: bool
):
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, engine_silence=4.0)
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
