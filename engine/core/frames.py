"""Frames on a stream socket: the length in bytes, 4 bytes little-endian, then the bytes."""

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def head(frame: bytes) -> bytes:
    """Return the bytes that precede a frame."""
    return _LENGTH.pack(len(frame))


class Frames:
    """Frames of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are complete with this piece."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed():
                return
            data, self._rest = bytes(self._rest), bytearray()
        at, end = 0, len(data)
        while at + _LENGTH.size <= end:
            start = at + _LENGTH.size
            stop = start + _LENGTH.unpack_from(data, at)[0]
            if stop > end:
                break
            yield data[start:stop]
            at = stop
        self._rest += data[at:]

    def _needed(self) -> int:
        """Return the bytes up to the end of the first frame, at least those of its length."""
        if len(self._rest) < _LENGTH.size:
            return _LENGTH.size
        return _LENGTH.size + int(_LENGTH.unpack_from(self._rest)[0])
