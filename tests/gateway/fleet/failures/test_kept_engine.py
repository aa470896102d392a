"""The engine that is kept for a suspected request, in Redis."""

import asyncio
import uuid
from typing import Any

import pytest

from gateway.fleet.failures import kept_engine
from gateway.fleet.failures.kept_engine import KeptEngine
from gateway.process.background import running as in_background
from testing.gateway.running import becomes


async def test_the_last_known_engine_stays_kept_without_an_answer_of_redis(
    any_redis: Any, monkeypatch: pytest.MonkeyPatch
):
    deployment = uuid.uuid4().hex
    first, second = (KeptEngine(any_redis, deployment, lambda: False) for _ in range(2))
    async with first.keep("http://one:1"):
        await second.read()
        assert second.url == "http://one:1"
        with monkeypatch.context() as broken:
            broken.setattr(kept_engine, "CALL_SECONDS", 0.0)
            await second.read()
            assert second.url == "http://one:1"
            broken.setattr(kept_engine, "LEASE_SECONDS", 0.0)
            await second.read()
            assert second.url is None
        await second.read()
        assert second.url == "http://one:1"
    # It reads until it knows that none is kept, although no death is remembered.
    async with in_background(second.watch()):
        await becomes(lambda: second.url is None)


async def test_a_turn_is_renewed(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_engine, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(kept_engine, "RENEW_SECONDS", 0.1)
    kept, other = (KeptEngine(any_redis, deployment, lambda: True) for deployment in ["one"] * 2)
    async with kept.keep("http://one:1") as is_kept:
        assert is_kept
        await asyncio.sleep(1.0)
        async with other.keep("http://two:1") as is_kept_too:
            assert not is_kept_too
    async with other.keep("http://two:1") as is_kept_too:
        assert is_kept_too
