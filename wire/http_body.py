"""Reader of request bodies, which decompresses them up to the largest size that is served.

Needs servers made with `auto_decompress=False`. aiohttp would decompress the whole body on the event loop, even after
its reader stopped: one megabyte of zeros becomes a gigabyte and blocks every stream for seconds.
"""

import asyncio
import zlib

from aiohttp import web

from wire.http_requests import send_continue

ENCODINGS = ("gzip", "x-gzip", "deflate")


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, decompressed.

    Raises web.HTTPRequestEntityTooLarge for a body over the application's client_max_size, and web.RequestPayloadError
    for a body that does not match its Content-Encoding.
    """
    await send_continue(request)
    raw = await request.read()
    if not is_compressed(request):
        return raw
    return await asyncio.to_thread(decompress, raw, request.client_max_size)


def is_compressed(request: web.Request) -> bool:
    """Return whether the body is compressed. Raises web.RequestPayloadError for an unknown encoding."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return False
    if encoding not in ENCODINGS:
        raise web.RequestPayloadError(f"Content-Encoding must be one of {', '.join(ENCODINGS)}")
    return True


def decompress(raw: bytes | bytearray, limit: int) -> bytes:
    """Decompress gzip or zlib.

    Raises web.HTTPRequestEntityTooLarge beyond `limit`, web.RequestPayloadError for bad data.
    """
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # | 32: detect gzip's or zlib's header
    try:
        body = decompressor.decompress(raw, limit + 1)
    except zlib.error as error:
        raise web.RequestPayloadError(str(error)) from None
    if len(body) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, len(body))
    if not decompressor.eof:
        raise web.RequestPayloadError("the compressed body is cut off")
    return body
