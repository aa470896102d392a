"""Memory of bodies that have been answered."""

import gc
import tracemalloc
from io import BytesIO

import pytest

from testing.gateway.running import BASE_MODEL, Gateway, until

MIB = 2**20
BODIES = {
    "no JSON": b'{"model":"x","prompt":' + b"1," * (MIB // 2) + b"}",
    "no model": b'{"model":"x","prompt":"' + b"a" * MIB + b'"}',
    "too long": b'{"model":"%s","prompt":"' % BASE_MODEL.encode() + b"a " * (MIB // 2) + b'"}',
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_refused_body_leaves_nothing_in_memory(gateway: Gateway, kind: str):
    """A cycle of a thread's job and its future kept each body until a garbage collection: 80 MiB of 40 bodies."""
    acme = await gateway.tenant("acme", requests_per_minute=10**6, tokens_per_minute=10**9)

    async def send() -> int:
        headers = {"Content-Type": "application/json"}
        return (await acme.call("POST", "/v1/completions", data=BytesIO(BODIES[kind]), headers=headers)).status

    assert await send() in (400, 404)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(8):
            await send()

        async def is_forgotten() -> bool:
            return tracemalloc.get_traced_memory()[0] < 2 * MIB

        # Later the gateway would collect garbage itself.
        await until(is_forgotten, 8.0)
    finally:
        tracemalloc.stop()
        gc.enable()
