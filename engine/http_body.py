"""A request's whole body, decompressed no further than the most that is served.

For servers made with `auto_decompress=False`: aiohttp would decompress all that comes, on the event loop, also what
nobody reads any more; a megabyte of zeros becomes a gigabyte, and stops every stream for seconds.
"""

import asyncio
import zlib

from aiohttp import web

ENCODINGS = ("gzip", "x-gzip", "deflate")


async def read_body(request: web.Request) -> bytes:
    """Raises web.HTTPRequestEntityTooLarge for one over the application's client_max_size, web.RequestPayloadError for
    one that is not what its Content-Encoding says, or of an encoding that is none of `ENCODINGS`.
    """
    raw = await request.read()
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return raw
    if encoding not in ENCODINGS:
        raise web.RequestPayloadError(f"Content-Encoding is none of {', '.join(ENCODINGS)}")
    return await asyncio.to_thread(_decompressed, raw, request.client_max_size)


def _decompressed(raw: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip's or zlib's header, whichever is there
    try:
        body = decompressor.decompress(raw, limit + 1)
    except zlib.error as error:
        raise web.RequestPayloadError(str(error)) from None
    if len(body) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, len(body))
    if not decompressor.eof:
        raise web.RequestPayloadError("the compressed body is cut off")
    return body
