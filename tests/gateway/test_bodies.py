"""Bodies and connections as weapons: crumbs, unread bodies, heads without an end."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.api.pieces import FREE_CHUNKS
from tests.gateway.running import BASE_MODEL, Client, Gateway
from tests.gateway.test_time_limits import connect
from tests.gateway.upstream import Upstream

CRUMB = b"1;a=b\r\n \r\n"


def head(client: Client, path: str, *lines: str) -> bytes:
    parts = [f"POST {path} HTTP/1.1", "Host: test", f"Authorization: Bearer {client.key}", *lines, "", ""]
    return "\r\n".join(parts).encode()


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await connect(gateway)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Return an answer's status, head and body."""
    top = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30.0)
    length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(top.split()[1]), top, await reader.readexactly(length)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "application/json"), ("/v1/adapters", "multipart/form-data; boundary=b")],
)
async def test_a_body_in_crumbs_is_refused_early(path: str, kind: str, serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        begin = b"" if "json" in kind else b"3\r\n--b\r\n"
        if "json" not in kind:
            text = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'
            begin = b"%x\r\n%s\r\n" % (len(text), text)
        async with connected(gateway) as (reader, writer):
            writer.write(head(acme, path, f"Content-Type: {kind}", "Transfer-Encoding: chunked") + begin)
            # No end: what is refused is refused before.
            writer.write(CRUMB * (FREE_CHUNKS + 100))
            status, top, body = await answered(reader)
            assert status == 400
            assert b"chunks are too small" in body
            assert b"connection: close" in top.lower()
            writer.write(CRUMB * 200_000)
        assert (await acme.complete()).status == 200


async def test_a_small_body_may_come_in_crumbs(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        raw = json.dumps({"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
        crumbs = b"".join(b"1\r\n%c\r\n" % byte for byte in raw) + b"0\r\n\r\n"
        async with connected(gateway) as (reader, writer):
            writer.write(head(acme, "/v1/completions", "Content-Type: application/json", "Transfer-Encoding: chunked"))
            writer.write(crumbs)
            assert (await answered(reader))[0] == 200


async def test_a_large_body_in_fair_chunks_and_one_compressed(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        raw = json.dumps({"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 1, "x": "a" * 900_000}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(raw), 100):
                yield raw[at : at + 100]

        kind = {"Content-Type": "application/json"}
        assert (await acme.call("POST", "/v1/completions", data=pieces(), headers=kind)).status == 200
        packed = kind | {"Content-Encoding": "gzip"}
        assert (await acme.call("POST", "/v1/completions", data=gzip.compress(raw), headers=packed)).status == 200
        assert [len(body["x"]) for _, body in upstream.requests] == [900_000] * 2


async def test_a_wrong_keys_body_is_not_read(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        nobody = gateway.client("lpx_wrong")
        async with connected(gateway) as (reader, writer):
            writer.write(head(nobody, "/v1/completions", "Content-Length: 1000000") + b"{")
            status, top, _ = await answered(reader)
            assert status == 401
            assert b"connection: close" in top.lower()


async def test_a_head_is_small(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        for lines in (["X-A: " + "a" * 5000], [f"X-{i}: a" for i in range(100)]):
            async with connected(gateway) as (reader, writer):
                writer.write(head(acme, "/v1/completions", *lines, "Content-Length: 2") + b"{}")
                top = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30.0)
                assert top.split()[1] == b"400"
