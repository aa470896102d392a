"""Reading of a request's body in chunks."""

from aiohttp import web

from gateway.errors import BadRequest
from wire.http_requests import send_continue

# A chunk costs some microseconds of the event loop, however small it is. A body may have FREE_CHUNKS chunks of any
# size; with more, its chunks must have MIN_CHUNK_BYTES on average.
FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 64
# aiohttp parses one chunk for every 16 of these bytes before it waits for the reader: 0.5 ms of the event loop. It
# pauses a connection with an unread body above twice this size, so after two reads (gateway/process/reads.py).
READ_BUFFER_BYTES = 2**13
# The cost of a body to this process, in bytes: all bytes that were read and decompressed, and at least CHUNK_COST for
# each chunk. Uploads count chunks only, because they have limits of their own.
COST = web.RequestKey("cost", int)
CHUNK_COST = 1024


class ChunkReader:
    """Reads a request's body in chunks. least_chunk: the least average bytes of a chunk beyond FREE_CHUNKS chunks."""

    def __init__(self, request: web.Request, least_chunk: int = MIN_CHUNK_BYTES) -> None:
        self.num_bytes = 0
        self._request = request
        self._content = request.content
        self._least_chunk = least_chunk
        self._num_chunks = 0

    async def next(self) -> bytes:
        """Return the next piece, b"" at the end. Raises BadRequest for chunks that are too small."""
        while not self._content.at_eof():
            await send_continue(self._request)
            piece, ends_chunk = await self._content.readchunk()
            self.num_bytes += len(piece)
            if ends_chunk:
                self._num_chunks += 1
                self._request[COST] = CHUNK_COST * self._num_chunks
            if self._num_chunks > FREE_CHUNKS and self.num_bytes < self._least_chunk * self._num_chunks:
                raise BadRequest(
                    f"The body's chunks are too small: expected at least {self._least_chunk} bytes on average "
                    f"in a body of more than {FREE_CHUNKS} chunks."
                )
            if piece or not ends_chunk:
                return piece
        return b""
