"""Wait that a stream states when it is cut for lack of room: the same request is admitted after it."""

import asyncio
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from gateway.quota import growing_hold
from gateway.quota.limits import Limit
from gateway.records.money.prices import FREE
from testing.gateway.running import HI_TOKENS, until
from testing.gateway.upstream import Upstream
from testing.gateway.upstream_bodies import PROMPT_TOKENS
from tests.gateway.quota.honest import LIMIT
from tests.gateway.quota.scripted import MS, Script, Twin
from tests.gateway.quota.test_growing_hold import text_of


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.mark.parametrize("made", ["script", "twin"])
@pytest.mark.parametrize(("rate", "wait"), [(None, 5150), (1, 59_940)], ids=["tokens", "requests"])
def test_growth_is_refused_while_others_hold_the_window_and_the_same_request_is_admitted_after_the_stated_wait(
    client: redis.Redis, made: str, rate: int | None, wait: int
):
    script: Script | Twin = Script(client) if made == "script" else Twin()
    limits = [LIMIT] if rate is None else [LIMIT, Limit("key:k:r", "key", "r", rate)]
    same = (limits, 0, 50_000, 50_000, FREE, 100)
    assert script.acquire("stream", *same)[0]
    assert script.acquire("whole", [LIMIT], 0, 59_000, 59_000, FREE)[0]
    # 1,000 are left, 50 of them owed as soon as they are known to be used.
    assert script.grow("stream", 50, 2000, 100) == (1000, max(1000, wait if rate else 0), "tenant:t")
    assert script.settle("whole", 50_000, 0, True)
    # 9,950 are left, and the request needs 100 and a quarter of the limit.
    assert script.grow("stream", 50, 20_000, 100) == (10_000, wait, "tenant:t")
    assert script.settle("stream", 50, 0, True)
    script.now += (wait - 1) * MS
    assert not script.acquire("too early", *same)[0]
    script.now += MS
    assert script.acquire("again", *same)[0]
    assert script.grow("again", 50, 9_950, 100) == (10_000, 0, "")
    assert script.grow("nothing", 1, 1) is None


@pytest.mark.parametrize("keeps_allowances", [True, False], ids=["kept", "counted here"])
async def test_a_cut_stream_says_when_the_same_request_is_admitted(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, keeps_allowances: bool
):
    """The same request holds more at first, because its answers are expected to be longer then."""
    upstream.keeps_allowances = keeps_allowances
    monkeypatch.setattr(growing_hold, "FIRST", 20.0)
    async with serve() as gateway:
        tenant = await gateway.tenant("acme", tokens_per_minute=300)
        assert (await tenant.chat(max_tokens=80, x_engine={"tokens": 80})).status == 200
        asked = {"stream": True, "max_tokens": 240, "x_engine": {"tokens": 240, "delay": 0.002}}
        got = await tenant.chat(**asked)
        ended = time.monotonic()
        *answer, last = got.events
        said = re.search(r"Try again in (\d+) s\.", last["error"]["message"])
        assert said is not None
        refused = await tenant.chat(**asked)
        assert refused.status == 429
        wait, since = int(refused.headers["Retry-After"]), time.monotonic() - ended
        assert wait > 30
        # Five tokens come back in a second. The gateway did not know of some tokens when it cut the stream: those that
        # an engine without allowances makes until it stops, and those of the engine's count of the prompt.
        [*_, made] = upstream.finished.values()
        unknown = made["completion_tokens"] - len(text_of(answer)) + PROMPT_TOKENS - HI_TOKENS
        assert wait - math.ceil(unknown / 5) <= int(said[1]) <= wait + math.ceil(since) + 1


async def test_a_shortened_stream_does_not_wait_for_redis_at_its_end(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, client: redis.Redis
):
    upstream.keeps_allowances = upstream.paused = True
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    async with serve(redis_timeout=30.0) as gateway:
        tenant = await gateway.tenant("acme", tokens_per_minute=300, on_token_limit="shorten")
        asked = {"stream": True, "max_tokens": 200, "x_engine": {"tokens": 200, "pause": True, "delay": 0.002}}
        answer = asyncio.create_task(tenant.chat(**asked))
        await until(lambda: asyncio.sleep(0, any(each["completion_tokens"] for each in upstream.finished.values())))
        pid: Any = client.info("server")
        os.kill(pid["process_id"], signal.SIGSTOP)
        try:
            upstream.paused = False
            async with asyncio.timeout(15):
                *events, done = (await answer).events
        finally:
            os.kill(pid["process_id"], signal.SIGCONT)
        assert done == "[DONE]"
        assert len(text_of(events)) < 200
