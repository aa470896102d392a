"""Connections as the weapon: slow ones, many, broken off, endless; floods of small requests; wrong keys."""

import asyncio
import contextlib
import gzip
import json
import random
import time
from functools import cache

from benchmarks.hostile.archives import good
from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import BOUNDARY, Attacker, form

KIND = f"Content-Type: multipart/form-data; boundary={BOUNDARY.decode()}"
JSON = "Content-Type: application/json"


async def status_of(attacker: Attacker, reader: asyncio.StreamReader, seconds: float) -> int | None:
    """Read the status line that a bare connection gets within `seconds`, and count it."""
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


async def trickle(attacker: Attacker, head: bytes, first: bytes, drop: bytes, every: float) -> None:
    """Send `head` and `first`, then one `drop` every so many seconds for as long as the gateway takes them."""
    while attacker.going:
        reader, writer = await attacker.connect()
        try:
            writer.write(head + first)
            status = asyncio.ensure_future(status_of(attacker, reader, attacker.left))
            while attacker.going and not status.done():
                writer.write(drop)
                await writer.drain()
                await attacker.pause(every)
            status.cancel()
        except OSError:
            attacker.count("cut off")
        finally:
            await close(writer)
        await attacker.pause(0.2)


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
            _, writer = await attacker.connect()
            try:
                cut = len(body) if turn % 2 else random.randrange(len(body))
                writer.write(attacker.head("POST", "/v1/adapters", len(body), KIND) + body[:cut])
                await writer.drain()
                await asyncio.sleep(random.random() / 1000)
                attacker.count("left")
            except OSError:
                attacker.count("cut off")
            finally:
                await close(writer)
            await attacker.pause(0.02)

    await attacker.side_by_side(4, one)


async def pour(attacker: Attacker, head: bytes, first: bytes, drop: bytes, rate: float) -> None:
    """Send chunked drops at `rate` bytes a second for as long as the gateway takes them."""
    while attacker.going:
        reader, writer = await attacker.connect()
        try:
            writer.write(head + b"%x\r\n%s\r\n" % (len(first), first))
            status = asyncio.ensure_future(status_of(attacker, reader, attacker.left))
            piece = b"%x\r\n%s\r\n" % (len(drop), drop)
            while attacker.going and not status.done():
                writer.write(piece)
                async with asyncio.timeout(attacker.left + 0.1):
                    await writer.drain()
                await attacker.pause(len(drop) / rate)
            status.cancel()
        except OSError:
            attacker.count("cut off")
        finally:
            await close(writer)
        await attacker.pause(0.2)


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


@cache
def deep_bodies() -> list[bytes]:
    """JSON of almost 8 MiB: deep, wide, long."""
    size = 8 * 2**20 - 200
    messages = ",".join(['{"role":"user","content":"a"}'] * (size // 32))
    return [
        b'{"model":"x","messages":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
        b'{"model":"x","messages":' + b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6) + b"}",
        f'{{"model":"x","messages":[{messages}]}}'.encode(),
        b'{"model":"x","prompt":[' + b"1," * (size // 2 - 20) + b"1]}",
        b'{"model":"x","prompt":"' + b"a " * (size // 2 - 20) + b'"}',
        b'{"model":"' + b"m" * (size - 30) + b'"}',
        b'{"model":"x","prompt":"a","stop":["' + b'a","' * (size // 4 - 20) + b'b"]}',
        b'{"model":"x","prompt":"a","x":' + b"9" * (size - 40) + b"}",
    ]


@attack("deep-json", "JSON bodies of 8 MiB: deep, wide, long", prepare=deep_bodies)
async def send_deep(attacker: Attacker) -> None:
    name = json.dumps(attacker.target.base_model).encode()

    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            body = deep_bodies()[turn % len(deep_bodies())].replace(b'"x"', name, 1)
            path = "/v1/chat/completions" if b'"messages"' in body[:80] else "/v1/completions"
            await attacker.call("POST", path, data=body, headers={"Content-Type": "application/json"})
            turn += 1

    await attacker.side_by_side(2, one)


@cache
def gzip_bodies() -> list[bytes]:
    return [
        gzip.compress(bytes(512 * 2**20), 6),
        gzip.compress(gzip.compress(bytes(2**27))),
        b"\x1f\x8b" + b"\xff" * 4000,
    ]


@attack("gzip-bodies", "gzip request bodies of 0.5 MB that grow to 512 MiB", prepare=gzip_bodies)
async def send_gzip(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            for path in ("/v1/chat/completions", "/v1/adapters"):
                headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
                if path.endswith("adapters"):
                    headers["Content-Type"] = f"multipart/form-data; boundary={BOUNDARY.decode()}"
                await attacker.call("POST", path, data=gzip_bodies()[turn % 3], headers=headers)
            turn += 1
            await attacker.pause(0.05)

    await attacker.side_by_side(2, one)


@attack("header-flood", "heads of 8 KB, of 60 KB without an end, and of 2,000 fields")
async def send_headers(attacker: Attacker) -> None:
    kinds = [
        attacker.head("GET", "/v1/models", 0, "X-A: " + "a" * 7000),
        attacker.head("GET", "/v1/models", 0)[:-2] + b"X-A: " + b"a" * 60_000,
        attacker.head("GET", "/v1/models", 0, *(f"X-{i}: a" for i in range(2000))),
        b"GET /" + b"a" * 60_000,
        b"\r\n" * 20_000,
        attacker.head("GET", "/v1/models?" + "&".join(f"a{i}=1" for i in range(1000)), 0),
    ]

    async def one(index: int) -> None:
        while attacker.going:
            reader, writer = await attacker.connect()
            try:
                writer.write(kinds[index % len(kinds)])
                await status_of(attacker, reader, 1.0)
            except OSError:
                attacker.count("cut off")
            finally:
                await close(writer)
            await attacker.pause(0.05)

    await attacker.side_by_side(12, one)


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


@attack("cancel-storm", "streams that are left as soon as they begin")
async def storm(attacker: Attacker) -> None:
    body = {"model": attacker.target.base_model, "messages": [{"role": "user", "content": "Hi"}]}
    raw = json.dumps(body | {"stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    request = attacker.head("POST", "/v1/chat/completions", len(raw), JSON) + raw

    async def one(index: int) -> None:
        while attacker.going:
            reader, writer = await attacker.connect()
            try:
                writer.write(request)
                if index % 2:
                    await status_of(attacker, reader, 2.0)
                else:
                    await asyncio.sleep(random.random() / 100)
                    attacker.count("left")
            except OSError:
                attacker.count("cut off")
            finally:
                await close(writer)
            await attacker.pause(0.02)

    await attacker.side_by_side(8, one)


async def read_slowly(attacker: Attacker, body: dict, path: str, every: float, size: int) -> None:
    """Ask, then read `size` bytes every so many seconds; count how it was answered, and whether it was cut off."""
    raw = json.dumps({"model": attacker.target.base_model} | body).encode()
    reader, writer = await attacker.connect()
    began = time.monotonic()
    try:
        writer.write(attacker.head("POST", path, len(raw), JSON) + raw)
        if await status_of(attacker, reader, attacker.left) == 200:
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


@attack("fast-readers", "as slow-readers, read at once", shown=False)
async def fast_readers(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            answer = await attacker.call(
                "POST", "/v1/chat/completions", json={"model": attacker.target.base_model, **READERS, "stream": True}
            )
            await attacker.pause(5.0 if answer is None or answer.status != 200 else 0.5)

    await attacker.side_by_side(200, one)


@attack("slow-readers", "200 readers of streams with top_logprobs 20, 1 KB a second each", honest="fast-readers")
async def slow_readers(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            await read_slowly(attacker, READERS | {"stream": True}, "/v1/chat/completions", 1.0, 1024)
            await attacker.pause(5.0)

    await attacker.side_by_side(200, one)


@attack(
    "slow-whole-answers", "200 readers of whole answers with top_logprobs 20, 1 KB a second each", honest="fast-readers"
)
async def slow_whole(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            await read_slowly(attacker, READERS, "/v1/chat/completions", 1.0, 1024)
            await attacker.pause(5.0)

    await attacker.side_by_side(200, one)
