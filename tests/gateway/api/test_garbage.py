"""Garbage of refused requests: objects that refer to each other stay until a collection, which stops the event loop."""

import gc
from collections import Counter
from types import FrameType, TracebackType
from typing import Any

import pytest
from sqlalchemy import Select

from testing.gateway.running import Gateway

REQUESTS = 10
REFUSED: dict[str, tuple[str, Any]] = {
    "an unknown model": ("/v1/completions", {"model": "none", "prompt": "a"}),
    "an unknown alias": ("/v1/completions", {"model": "none:alias", "prompt": "a"}),
    "an unknown version": ("/v1/completions", {"model": "none@7", "prompt": "a"}),
    "a bad field": ("/v1/chat/completions", {"model": "none", "messages": 1}),
    "an unknown URL": ("/v1/none", {}),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refused_request_is_freed_without_a_collection(kind: str, gateway: Gateway):
    acme = await gateway.tenant("acme")
    path, body = REFUSED[kind]
    await acme.call("POST", path, json=body)  # makes what is made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(REQUESTS):
            assert 400 <= (await acme.call("POST", path, json=body)).status < 500
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = Counter(type(found).__name__ for found in gc.garbage)
        own = [found for found in gc.garbage if isinstance(found, (FrameType, TracebackType, Select))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert len(own) < REQUESTS, kept.most_common(20)
