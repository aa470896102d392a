"""Attacks by connections: slow, many, broken off, endless; floods of small requests; wrong keys."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import numpy as np

from benchmarks.hostile.archives import good
from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import BOUNDARY, Attacker, form

KIND = f"Content-Type: multipart/form-data; boundary={BOUNDARY.decode()}"
JSON = "Content-Type: application/json"


async def status_of(attacker: Attacker, reader: asyncio.StreamReader, seconds: float) -> int | None:
    """Read the status line that a bare connection receives within `seconds`, and count it."""
    try:
        line = await asyncio.wait_for(reader.readline(), max(0.01, seconds))
        status = int(line.split()[1])
    except (TimeoutError, OSError, IndexError, ValueError):
        return None
    attacker.count(status)
    return status


async def close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def connection(attacker: Attacker) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the gateway and close it after the block. Count it if the gateway cuts it off."""
    reader, writer = await attacker.connect()
    try:
        yield reader, writer
    except OSError:
        attacker.count("cut off")
    finally:
        await close(writer)


async def trickle(attacker: Attacker, head: bytes, first: bytes, drop: bytes, every: float) -> None:
    """Send `head` and `first`, then one `drop` every few seconds, while the gateway accepts them."""
    while attacker.going:
        async with connection(attacker) as (reader, writer):
            writer.write(head + first)
            status = asyncio.ensure_future(status_of(attacker, reader, attacker.left))
            while attacker.going and not status.done():
                writer.write(drop)
                async with asyncio.timeout(attacker.left + 0.1):
                    await writer.drain()
                await attacker.pause(every)
            status.cancel()
        await attacker.pause(0.2)


@attack("nothing", "the control: no attack at all", shown=False)
async def nothing(attacker: Attacker) -> None:
    await attacker.pause(attacker.left)


@attack("busy-loop", "a control: a process outside of the stack computes without pause", shown=False)
async def busy_loop(attacker: Attacker) -> None:
    """Use the CPU time that an attack's own client used, at the same moments of the round, and send nothing."""
    began, cpu = time.monotonic(), time.process_time()
    moments, seconds = np.array(attacker.cpu_curve or [(0.0, 0.0)]).T
    while attacker.going:
        is_due = not attacker.cpu_curve or time.process_time() - cpu < np.interp(
            time.monotonic() - began, moments, seconds
        )
        if is_due:
            sum(range(20_000))
        await attacker.pause(0.0 if is_due else 0.002)


@attack("trickling-uploads", "12 uploads of one byte a second each")
async def trickle_uploads(attacker: Attacker) -> None:
    body = form({"name": b"slow"} | good())
    head = attacker.head("POST", "/v1/adapters", len(body), KIND)
    await attacker.side_by_side(12, lambda _: trickle(attacker, head, body[:500], b"x", 1.0))


@attack("trickling-bodies", "200 JSON bodies and 100 heads of one byte a second each")
async def trickle_bodies(attacker: Attacker) -> None:
    head = attacker.head("POST", "/v1/chat/completions", 10_000, JSON)
    half = head[: len(head) // 2] + b"\r\nX-A: "

    async def one(index: int) -> None:
        await trickle(attacker, head if index % 3 else half, b"", b" ", 1.0)

    await attacker.side_by_side(300, one)


@attack("leaving-uploads", "uploads whose client leaves within a millisecond of the last byte")
async def leave_uploads(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        turn = 0
        while attacker.going:
            turn += 1
            body = form({"name": b"gone-%d-%d" % (index, turn)} | good())
            async with connection(attacker) as (_, writer):
                cut = len(body) if turn % 2 else random.randrange(len(body))
                writer.write(attacker.head("POST", "/v1/adapters", len(body), KIND) + body[:cut])
                await writer.drain()
                await asyncio.sleep(random.random() / 1000)
                attacker.count("left")
            await attacker.pause(0.02)

    await attacker.side_by_side(4, one)


async def pour(attacker: Attacker, head: bytes, first: bytes, drop: bytes, rate: float) -> None:
    """Send chunks of `drop` at `rate` bytes per second, while the gateway accepts them."""
    await trickle(attacker, head, chunk(first), chunk(drop), len(drop) / rate)


def chunk(data: bytes) -> bytes:
    """Return `data` as a chunk of HTTP's chunked transfer coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@attack("endless-uploads", "4 uploads without an end, 8 MB a second each")
async def pour_uploads(attacker: Attacker) -> None:
    start = b'--%s\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n' % BOUNDARY
    head = attacker.head("POST", "/v1/adapters", None, KIND)
    drop = random.Random(0).randbytes(2**20)
    await attacker.side_by_side(4, lambda _: pour(attacker, head, start, drop, 8 * 2**20))


@attack("endless-name", "multipart forms of endless names, headers and parts")
async def pour_forms(attacker: Attacker) -> None:
    head = attacker.head("POST", "/v1/adapters", None, KIND)
    part = b'--%s\r\nContent-Disposition: form-data; name="x%%d"\r\n\r\nx\r\n' % BOUNDARY
    kinds = [
        (b'--%s\r\nContent-Disposition: form-data; name="name"\r\n\r\n' % BOUNDARY, b"a" * 65536),
        (b"--%s\r\n" % BOUNDARY, b"X-Header: a\r\n" * 4000),
        (b'--%s\r\nContent-Disposition: form-data; name="' % BOUNDARY, b"a" * 65536),
        (b"", b"".join(part % i for i in range(500))),
        (b"preamble", b"\r\n" * 30_000),
    ]
    await attacker.side_by_side(5, lambda i: pour(attacker, head, *kinds[i], rate=4 * 2**20))


@attack("bad-heads", "heads that the HTTP library answers by an exception, without a key")
async def send_bad_heads(attacker: Attacker) -> None:
    kinds = [b"GET http://xn--a/ HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\nExpect: 1\r\n\r\n"]

    async def one(index: int) -> None:
        while attacker.going:
            async with connection(attacker) as (reader, writer):
                writer.write(kinds[index % len(kinds)])
                status = await status_of(attacker, reader, attacker.left)
                attacker.check(status is not None or not attacker.going, "a bad head without an answer")

    await attacker.side_by_side(8, one)


@attack("forged-names", "form parts whose headers forge lines of the log, each another one")
async def forge(attacker: Attacker) -> None:
    part = "--%s\r\nContent-Disposition: form-data; name=\"name\"; filename*=nope''%d\n\x1b[2J%s\r\n\r\nx\r\n--%s--\r\n"

    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            turn += 8
            body = (part % (BOUNDARY.decode(), turn, "B" * 7900, BOUNDARY.decode())).encode()
            headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
            await attacker.call("POST", "/v1/adapters", data=body, headers=headers)

    await attacker.side_by_side(8, one)


@attack("idle-connections", "500 connections that say nothing, and 200 that ask once and stay")
async def stay(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        reader, writer = await attacker.connect()
        try:
            if index % 7 < 2:
                writer.write(attacker.head("GET", "/v1/models", 0))
                await status_of(attacker, reader, attacker.left)
            while attacker.going and not reader.at_eof():
                await attacker.pause(0.5)
            attacker.count("idle")
        finally:
            await close(writer)

    await attacker.side_by_side(700, one)


@attack("wrong-keys", "guesses of keys, of tenants and admins, as fast as they are answered")
async def guess(attacker: Attacker) -> None:
    rng = random.Random(0)
    shape = attacker.target.key

    async def one(index: int) -> None:
        while attacker.going:
            wrong = shape[:12] + "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in shape[12:])
            path = ("/v1/models", "/admin/api/tenants", "/internal/engines")[index % 3]
            method = "POST" if index % 3 == 2 else "GET"
            answer = await attacker.call(method, path, headers={"Authorization": f"Bearer {wrong}"})
            expected = (401, 403, 404, 429)
            attacker.check(
                answer is None or answer.status in expected, f"a guess at {path}: {answer and answer.status}"
            )

    await attacker.side_by_side(6, one)


@attack("listing-flood", "GET of usage, models and adapters as fast as they are answered")
async def flood(attacker: Attacker) -> None:
    paths = ("/v1/usage", "/v1/models", "/v1/adapters", "/v1/usage?by=model,day", "/v1/models/none", "/openapi.json")

    async def one(index: int) -> None:
        while attacker.going:
            await attacker.call("GET", paths[index % len(paths)])

    await attacker.side_by_side(12, one)
