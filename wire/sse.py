"""Reader of server-sent events, each of which has one data line."""

from collections.abc import AsyncIterable, AsyncIterator

DONE = b"[DONE]"


class EventReader:
    """Reader of one stream. It keeps the line that has not arrived whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that the piece completes, in order; DONE is the last of a whole stream.

        Comments, event names and blank lines are skipped.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


async def read_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream, without DONE."""
    reader = EventReader()
    async for piece in pieces:
        for data in reader.feed(piece):
            if data != DONE:
                yield data
