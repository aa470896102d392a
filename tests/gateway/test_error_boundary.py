"""Garbage of refused requests: objects that refer to each other stay until a collection, which stops the event loop."""

import gc
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import CTE

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
    """Return whether an object is of a refused request: a frame of its error, or the query of its model's meanings."""
    if isinstance(found, FrameType):
        return found.f_code is error_boundary.__code__
    return isinstance(found, CTE) and found.name == "meant"


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
        own = [found for found in gc.garbage if is_a_requests(found)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not own, kept.most_common(20)
