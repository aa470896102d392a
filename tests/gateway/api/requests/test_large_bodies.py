"""Large bodies: their memory is estimated in parts, and they are read in large pieces once they have a share."""

import asyncio
import io
import json
import random
import time
from typing import Any

import pytest

from gateway.api.requests.memory import CONTAINER_BYTES, FREE_BYTES, VALUE_BYTES
from gateway.api.requests.prompts import COUNTED_BYTES, COUNTED_INLINE_BYTES, _decoded_bytes
from gateway.process.reads import READ_BYTES, BoundedReads
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream

WIDE = 4


def slow_twin(raw: bytes) -> int:
    width = 1 if raw.isascii() and b"\\u" not in raw else WIDE
    containers = sum(character in b"[{" for character in raw)
    return width * len(raw) + VALUE_BYTES * raw.count(b",") + CONTAINER_BYTES * containers


@pytest.mark.parametrize("alphabet", [b"abc", b'ab",:[]{}', b"ab\\u,", b"ab\\,", b"ab\xc3"])
def test_a_body_is_counted_in_parts_as_in_one_pass(alphabet: bytes):
    rng = random.Random(0)
    for size in (0, 1, COUNTED_BYTES - 1, COUNTED_BYTES, COUNTED_INLINE_BYTES + 3):
        # Brackets are rare, as a body with many is refused.
        letters = rng.choices(alphabet, [1 if c in b"[]{}:" else 30 for c in alphabet], k=size)
        assert _decoded_bytes(bytes(letters)) == slow_twin(bytes(letters))


@pytest.mark.parametrize("place", [COUNTED_BYTES - 1, COUNTED_BYTES, COUNTED_BYTES - 2])
def test_an_escape_between_two_parts_counts(place: int):
    raw = bytearray(b"a" * 2 * COUNTED_BYTES)
    raw[place : place + 2] = b"\\u"
    assert _decoded_bytes(bytes(raw)) == WIDE * len(raw)


@pytest.mark.parametrize(("size", "is_large"), [(FREE_BYTES - 100, False), (2**19, True)])
async def test_a_body_with_a_share_is_read_in_large_pieces(
    size: int, is_large: bool, serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    reads, updated = list[int](), BoundedReads.buffer_updated

    def counted(self: BoundedReads, nbytes: int) -> None:
        reads.append(nbytes)
        updated(self, nbytes)

    monkeypatch.setattr(BoundedReads, "buffer_updated", counted)
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.complete(user="a" * size)).status in (200, 400)
    assert (max(reads) > READ_BYTES) == is_large
    assert sum(reads) > size


async def test_megabytes_as_a_models_name_do_not_hold_the_event_loop(gateway: Gateway):
    acme = await gateway.tenant("acme")
    data = json.dumps({"model": "ab " * 2**21, "prompt": "Hi"}).encode()
    stalls = []
    # Three times, because a busy machine may take the core away once.
    for _ in range(3):
        asking = asyncio.ensure_future(
            acme.call("POST", "/v1/completions", data=io.BytesIO(data), headers={"Content-Type": "application/json"})
        )
        longest, last = 0.0, time.perf_counter()
        while not asking.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        assert (await asking).error["code"] == "model_not_found"
        stalls.append(longest)
    assert min(stalls) < 0.1, f"the loop stood still for so many seconds: {stalls}"
