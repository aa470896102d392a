"""Attacks by request bodies and heads: deep, compressed, in tiny pieces, endless."""

import asyncio
import contextlib
import gzip
import json
from functools import cache

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import BOUNDARY, Attacker
from benchmarks.hostile.connections import JSON, KIND, close, connection, status_of


@cache
def deep_bodies() -> list[bytes]:
    """Send JSON bodies of almost 8 MiB: deep, wide, long."""
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
        b'{"model":"x","prompt":"' + b"a" * (size - 40) + b'"}',
        b'{"model":"x","prompt":"' + "e\u0301".encode() * (size // 3 - 20) + b'"}',
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
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40_000),
        attacker.head("GET", "/v1/models?" + "&".join(f"a{i}=1" for i in range(1000)), 0),
    ]

    async def one(index: int) -> None:
        while attacker.going:
            async with connection(attacker) as (reader, writer):
                writer.write(kinds[index % len(kinds)])
                await status_of(attacker, reader, 1.0)
            await attacker.pause(0.05)

    await attacker.side_by_side(12, one)


@cache
def large_bodies() -> list[tuple[bytes, bytes]]:
    """Send bodies of 8 MiB, plain and compressed with the matching header: strings, wide strings, values."""
    size = 8 * 2**20 - 200
    raws = [
        b'{"model":"x","prompt":"' + b"a" * (size - 40) + b'"}',
        b'{"model":"x","prompt":"a","user":"' + b"a" * (3 * 2**20) + "\U0001f600".encode() + b'"}',
        b'{"model":"x","prompt":[' + b"1000," * 190_000 + b"1]}",
    ]
    return [(b"", raw) for raw in raws] + [(b"Content-Encoding: gzip\r\n", gzip.compress(raw)) for raw in raws]


@attack("many-large-bodies", "500 bodies of up to 8 MiB at once, half of them trickled", prepare=large_bodies)
async def send_large(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        while attacker.going:
            field, body = large_bodies()[index // 2 % len(large_bodies())]
            async with connection(attacker) as (reader, writer):
                head = attacker.head("POST", "/v1/completions", len(body), JSON)
                writer.write(head[:-2] + field + b"\r\n")
                writer.write(body[: -100 if index % 2 else len(body)])
                await status_of(attacker, reader, attacker.left)
            await attacker.pause(0.5)

    await attacker.side_by_side(500, one)


@cache
def tiny_chunks() -> bytes:
    """Send a JSON body of 1 MiB in chunks of one byte, each with an extension."""
    return b"1;a=b\r\n \r\n" * 2**20


@attack("tiny-chunks", "bodies in chunks of one byte with extensions, 11 MB on the wire for 1 MiB", prepare=tiny_chunks)
async def send_chunks(attacker: Attacker) -> None:
    kinds = [("/v1/chat/completions", JSON), ("/v1/adapters", KIND), ("/v1/completions", JSON)]

    async def one(index: int) -> None:
        path, kind = kinds[index % len(kinds)]
        while attacker.going:
            async with connection(attacker) as (reader, writer):
                writer.write(attacker.head("POST", path, None, kind) + tiny_chunks())
                writer.write(b"2\r\n{}\r\n0\r\n\r\n")
                await status_of(attacker, reader, attacker.left)
            await attacker.pause(0.05)

    await attacker.side_by_side(3, one)


@attack("pipelining", "2,000 requests on each connection before the first answer is read, which never is")
async def pipeline(attacker: Attacker) -> None:
    request = attacker.head("GET", "/openapi.json", 0) * 1000 + attacker.head("GET", "/v1/usage", 0) * 1000

    async def one(index: int) -> None:
        while attacker.going:
            _, writer = await attacker.connect()
            try:
                writer.write(request)
                await attacker.pause(3.0)
                attacker.count("sent")
            finally:
                await close(writer)

    await attacker.side_by_side(8, one)


@attack("refused-digits", "prompts of 8,000 digits with too large max_tokens, on 40 connections")
async def send_digits(attacker: Attacker) -> None:
    fields = {"model": attacker.target.base_model, "prompt": "1" * 8000, "max_tokens": 2**20}
    body = json.dumps(fields).encode()

    async def one(_: int) -> None:
        while attacker.going:
            await attacker.call("POST", "/v1/completions", data=body, headers={"Content-Type": "application/json"})

    await attacker.side_by_side(40, one)


@cache
def template_bombs() -> list[dict[str, object]]:
    """Send chats that templates multiply: a special token for each message, deep tools with indentation."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(4001)]
    deep: object = [1] * 20_000
    for _ in range(55):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": deep}}}
    return [
        {"messages": turns, "chat_template_kwargs": {"eos_token": "x" * 80_000}},
        {"messages": turns, "chat_template_kwargs": {"padding": "x" * 16_000}},
        {"messages": turns[:1], "tools": [tool]},
        {"messages": turns[:1], "tools": [tool] * 2, "chat_template_kwargs": {"a": deep}},
    ]


@attack("template-bombs", "chats that templates multiply: tokens, variables, deep tools", prepare=template_bombs)
async def send_templates(attacker: Attacker) -> None:
    bodies = [
        json.dumps({"model": attacker.target.base_model, "max_tokens": 1, **fields}).encode()
        for fields in template_bombs()
    ]

    async def one(index: int) -> None:
        body = bodies[index % len(bodies)]
        while attacker.going:
            headers = {"Content-Type": "application/json"}
            await attacker.call("POST", "/v1/chat/completions", data=body, headers=headers)

    await attacker.side_by_side(8, one)


@attack("upgrades", "requests for a WebSocket upgrade, with endless bytes behind them while they run")
async def ask_for_upgrades(attacker: Attacker) -> None:
    fields = (JSON, "Connection: Upgrade", "Upgrade: websocket")
    body = json.dumps({"model": attacker.target.base_model, "prompt": "a", "max_tokens": 16}).encode()

    async def one(index: int) -> None:
        while attacker.going:
            async with connection(attacker) as (reader, writer):
                # Few requests that an engine serves, because those are ordinary use of it.
                if index:
                    writer.write(attacker.head("GET", "/v1/models", 0, *fields))
                else:
                    writer.write(attacker.head("POST", "/v1/completions", len(body), *fields) + body)
                status = asyncio.ensure_future(status_of(attacker, reader, 2.0))
                while attacker.going and not status.done():
                    writer.write(bytes(2**16))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.2):
                            await writer.drain()
                    await asyncio.sleep(0)
                status.cancel()
            await attacker.pause(0.1)

    await attacker.side_by_side(16, one)


@cache
def refused_bodies() -> list[bytes]:
    """Send bodies of 2 MiB that are refused once they are read."""
    size = 2 * 2**20
    return [
        b'{"model":"no-such-model","prompt":"' + b"a" * size + b'"}',
        b'{"model":' + b" " * size,
        b'{"model":"x","max_tokens":"' + b"a" * size + b'"}',
    ]


@attack(
    "refused-bodies", "bodies of 2 MiB that are refused after they are read, on 4 connections", prepare=refused_bodies
)
async def send_refused(attacker: Attacker) -> None:
    async def one(index: int) -> None:
        turn = index
        while attacker.going:
            turn += 1
            body = refused_bodies()[turn % 3]
            await attacker.call("POST", "/v1/completions", data=body, headers={"Content-Type": "application/json"})

    await attacker.side_by_side(4, one)
