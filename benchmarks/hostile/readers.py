"""Attacks by readers that leave at once or hardly read."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker
from benchmarks.hostile.connections import JSON, close, connection, status_of

STREAM = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 400, "ignore_eos": True}


# A stream with a status has had its prompt computed, which is ordinary use. The others should cost nothing.
@attack("cancel-storm", "8 streams at a time that are left as soon as they begin", honest="one-token-streams")
async def storm(attacker: Attacker) -> None:
    raw = json.dumps({"model": attacker.target.base_model} | STREAM).encode()
    request = attacker.head("POST", "/v1/chat/completions", len(raw), JSON) + raw

    async def one(index: int) -> None:
        while attacker.going:
            async with connection(attacker) as (reader, writer):
                writer.write(request)
                if index % 2:
                    attacker.round.served += await status_of(attacker, reader, 2.0) == 200
                else:
                    await asyncio.sleep(random.random() / 100)
                    attacker.count("left")
            await attacker.pause(0.02)

    await attacker.side_by_side(8, one)


@attack("one-token-streams", "as many streams of one token as cancel-storm sees begin", shown=False)
async def one_token_streams(attacker: Attacker) -> None:
    await attacker.as_served(lambda _: attacker.chat("Hi", max_tokens=1, stream=True))


class Unread:
    """Number of answers that have begun and are not read to their end: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1


async def read_slowly(attacker: Attacker, body: dict, path: str, every: float, size: int, unread: Unread) -> None:
    """Send a request, then read `size` bytes every few seconds; count the answer, and whether it was cut off."""
    raw = json.dumps({"model": attacker.target.base_model} | body).encode()
    reader, writer = await attacker.connect()
    began = time.monotonic()
    try:
        writer.write(attacker.head("POST", path, len(raw), JSON) + raw)
        if await status_of(attacker, reader, attacker.left) == 200:
            with unread.one():
                while attacker.going and await reader.read(size):
                    await attacker.pause(every)
            attacker.count("read on" if not attacker.going else "cut off")
    except OSError:
        attacker.count("cut off")
        attacker.note(f"a slow reader was cut off after {time.monotonic() - began:.0f} s")
    finally:
        await close(writer)


READERS = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 200, "ignore_eos": True}
READERS |= {"logprobs": True, "top_logprobs": 20}
NUMBER = 200
# Each reader has a request of its own: none is refused.
LIMITS = {"max_concurrent": 256, "tokens_per_minute": None, "requests_per_minute": None}
# Readers begin one after the other: 200 requests at once would fill all seats for seconds, in both rounds, and hide the
# effect of their reading. The rest of a round is for the last ones.
BEGIN_SECONDS, LEAST_SECONDS = 8.0, 12.0


@attack("fast-readers", "as slow-readers, read at once", shown=False, limits=LIMITS)
async def fast_readers(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        await attacker.pause(index / NUMBER * BEGIN_SECONDS)
        while attacker.going:
            answer = await attacker.call(
                "POST", "/v1/chat/completions", json={"model": attacker.target.base_model, **READERS, "stream": True}
            )
            # A slow reader is busy with its one answer until the round ends.
            await attacker.pause(attacker.left if answer is not None and answer.status == 200 else 5.0)

    await attacker.side_by_side(NUMBER, one)


async def slow_readers_of(attacker: Attacker, body: dict) -> None:
    unread = Unread()

    async def one(index: int) -> None:
        await attacker.pause(index / NUMBER * BEGIN_SECONDS)
        while attacker.going:
            await read_slowly(attacker, body, "/v1/chat/completions", 1.0, 1024, unread)
            await attacker.pause(5.0)

    await attacker.side_by_side(NUMBER, one)
    attacker.note(f"at most {unread.most} answers were unread together")


# The engine's work for 200 requests is ordinary use; both rounds send the same number of them.
@attack(
    "slow-readers",
    "200 readers of streams with top_logprobs 20, 1 KB a second each",
    honest="fast-readers",
    limits=LIMITS,
    least_seconds=LEAST_SECONDS,
)
async def slow_readers(attacker: Attacker) -> None:
    await slow_readers_of(attacker, READERS | {"stream": True})


# Quiet round: as for `slow-readers`.
@attack(
    "slow-whole-answers",
    "200 readers of whole answers with top_logprobs 20, 1 KB a second each",
    honest="fast-readers",
    limits=LIMITS,
    least_seconds=LEAST_SECONDS,
)
async def slow_whole(attacker: Attacker) -> None:
    await slow_readers_of(attacker, READERS)
