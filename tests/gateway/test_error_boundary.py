"""Garbage of requests: objects that refer to each other stay until a collection, which stops the event loop."""

import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import CTE

from gateway.billing.account import Account
from gateway.error_boundary import error_boundary
from testing.gateway.running import Gateway

REQUESTS = 10
REFUSED: dict[str, tuple[str, Any]] = {
    "an unknown model": ("/v1/completions", {"model": "none", "prompt": "a"}),
    "an unknown alias": ("/v1/completions", {"model": "none:alias", "prompt": "a"}),
    "an unknown version": ("/v1/completions", {"model": "none@7", "prompt": "a"}),
    "a bad field": ("/v1/chat/completions", {"model": "none", "messages": 1}),
    "an unknown URL": ("/v1/none", {}),
}


def is_a_requests(found: object) -> bool:
    """Return whether an object is of a request: a frame of its error, the query of its model's meanings, or its
    account.
    """
    if isinstance(found, FrameType):
        return found.f_code is error_boundary.__code__
    return isinstance(found, Account) or (isinstance(found, CTE) and found.name == "meant")


async def find_kept(ask: Callable[[], Awaitable[Any]]) -> tuple[list[object], Counter[str]]:
    """Send requests without a collection. Return their objects that only a collection frees, and the types of all."""
    await ask()  # makes what is made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(REQUESTS):
            await ask()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = Counter(type(found).__name__ for found in gc.garbage)
        return [found for found in gc.garbage if is_a_requests(found)], kept
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refused_request_is_freed_without_a_collection(kind: str, gateway: Gateway):
    acme = await gateway.tenant("acme")
    path, body = REFUSED[kind]

    async def ask() -> None:
        assert 400 <= (await acme.call("POST", path, json=body)).status < 500

    own, kept = await find_kept(ask)
    assert not own, kept.most_common(20)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_served_request_is_freed_without_a_collection(gateway: Gateway, stream: bool):
    acme = await gateway.tenant("acme")

    async def ask() -> None:
        assert (await acme.complete(max_tokens=2, stream=stream)).status == 200

    own, kept = await find_kept(ask)
    assert not own, kept.most_common(20)
