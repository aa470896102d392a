"""Reader of tar archives, plain or gzipped, with ustar, pax and GNU names.

Each header's size is checked before the header is read.
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from adapters.archives.members import MAX_MEMBERS, ArchiveError, ArchiveTooLarge, Members, quoted_name, text, unsafe
from adapters.manifest import printable

GZIP_MAGIC = b"\x1f\x8b"
# Limit of an extended header (pax, GNU long name); real ones hold a path and a few time stamps.
MAX_EXTENDED_BYTES = 64 << 10
_CHUNK = 1 << 20
_BLOCK = 512


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def skip(self, size: int) -> None: ...


class Plain:
    """A tar on disk; members are skipped by seeking."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        file.seek(0)

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise ArchiveError("The archive is cut off: its last member is longer than the file.")
        self._file.seek(size, 1)


class Gunzip:
    """A gzip stream of any number of members, inflated piece by piece up to a limit."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._inflate = zlib.decompressobj(31)
        self._raw = b""
        self._plain = bytearray()
        self._ended = False

    def read(self, size: int) -> bytes:
        while len(self._plain) < size and not self._ended:
            self._plain += self._more()
        taken = bytes(self._plain[:size])
        del self._plain[:size]
        return taken

    def skip(self, size: int) -> None:
        while size:
            taken = len(self.read(min(size, _CHUNK)))
            if not taken:
                raise ArchiveError("The archive is cut off: its last member is longer than the file.")
            size -= taken

    def drain(self) -> None:
        """Read to the end of the stream, which verifies its checksum."""
        while not self._ended:
            self._more()

    def _more(self) -> bytes:
        raw = self._raw or self._file.read(_CHUNK)
        if not raw and self._inflate.eof:
            self._ended = True
            return b""
        if self._inflate.eof:
            if not raw.startswith(GZIP_MAGIC[:1]):  # padding
                if raw.strip(b"\0"):
                    raise ArchiveError("The file has data after its gzip stream.")
                self._raw = b""
                return b""
            self._inflate = zlib.decompressobj(31)
        try:
            plain = self._inflate.decompress(raw, _CHUNK)
        except zlib.error as error:
            raise ArchiveError(f"The gzip stream cannot be read: {printable(str(error), 100)}.") from None
        if not raw and not plain and not self._inflate.eof:
            raise ArchiveError("The gzip stream is cut off.")
        self._raw = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        self._left -= len(plain)
        if self._left < 0:
            raise ArchiveTooLarge(f"The archive inflates to more than {self._max_bytes} bytes.")
        return plain


def read_tar(source: _Source, members: Members) -> None:
    """Read ustar, pax and GNU headers and write the selected members."""
    extended: dict[str, bytes] = {}
    headers = 0
    while True:
        block = source.read(_BLOCK)
        if not block.strip(b"\0"):
            if not headers:
                raise ArchiveError("Expected a .zip, .tar or .tar.gz archive; this file is empty or of another format.")
            return
        headers += 1
        if headers > 4 * MAX_MEMBERS:
            raise ArchiveError(f"The archive has more than {MAX_MEMBERS} members.")
        _check_sum(block)
        kind, size = block[156:157], _tar_number(block[124:136])
        if kind in (b"x", b"g", b"L", b"K"):
            _read_extended(source, kind, size, extended)
            continue
        name = _tar_name(block, extended)
        is_folder = kind == b"5" or (kind == b"\0" and name.endswith("/"))
        size = 0 if is_folder else _pax_size(extended, size, name)
        extended.clear()
        if kind not in (b"0", b"\0", b"7", b"5"):
            raise unsafe(name)
        members.check(name, size)
        padding = -size % _BLOCK
        target = None if is_folder else members.target(name)
        if target is None:
            source.skip(size + padding)
            continue
        with target.open("xb") as file:
            left = size
            while left:
                piece = source.read(min(left, _CHUNK))
                if not piece:
                    raise ArchiveError(f"The archive is cut off within its member {quoted_name(name)}.")
                file.write(piece)
                left -= len(piece)
        source.skip(padding)


def _check_sum(block: bytes) -> None:
    if len(block) < _BLOCK:
        raise ArchiveError("The archive is cut off, or is not a .zip, .tar or .tar.gz.")
    said = _tar_number(block[148:156])
    if said != sum(block[:148]) + sum(block[156:]) + 8 * 0x20:
        raise ArchiveError("Expected a .zip, .tar or .tar.gz archive; this file is of another format, or damaged.")


def _tar_number(raw: bytes) -> int:
    """Return a header's number, written in octal digits or GNU's base 256. Raises ArchiveError."""
    if raw[0] & 0x80:
        number = int.from_bytes(raw[1:], "big")
        if raw[0] != 0x80 or number >= 1 << 60:
            raise ArchiveError("A tar header holds a negative number or one that is far too large.")
        return number
    digits = raw.strip(b"\0 ").split(b"\0")[0].strip()
    if not all(0x30 <= digit <= 0x37 for digit in digits):
        raise ArchiveError("Expected a .zip, .tar or .tar.gz archive; this file is of another format, or damaged.")
    return int(digits or b"0", 8)


def _read_extended(source: _Source, kind: bytes, size: int, extended: dict[str, bytes]) -> None:
    if size > MAX_EXTENDED_BYTES:
        raise ArchiveError(f"An extended tar header has {size} bytes; at most {MAX_EXTENDED_BYTES} are read.")
    payload = source.read(size)
    if len(payload) < size:
        raise ArchiveError("The archive is cut off within an extended tar header.")
    source.skip(-size % _BLOCK)
    if kind == b"L":
        extended["path"] = payload.rstrip(b"\0")
    elif kind != b"K":
        for key, value in _pax_records(payload):
            if key.startswith(b"GNU.sparse"):
                raise ArchiveError("The archive holds a sparse file; expected plain files.")
            if kind == b"x" and key in (b"path", b"size"):
                extended[key.decode()] = value
            elif key in (b"path", b"size"):
                raise ArchiveError("A global tar header sets the path or size of all members; expected plain files.")


def _pax_records(payload: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records `<length> <key>=<value>\\n` of a pax header."""
    position = 0
    while position < len(payload) and payload[position]:
        length, space, _ = payload[position : position + 8].partition(b" ")
        end = position + (int(length) if space and length.isdigit() else 0)
        key, equals, value = payload[position + len(length) + 1 : end].partition(b"=")
        if not equals or end > len(payload) or not value.endswith(b"\n"):
            raise ArchiveError("A pax header of the archive has a record with a wrong length.")
        yield key, value[:-1]
        position = end


def _tar_name(block: bytes, extended: dict[str, bytes]) -> str:
    if "path" in extended:
        return text(extended["path"])
    name, prefix = block[:100].split(b"\0")[0], b""
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0")[0]
    return text(prefix + b"/" + name if prefix else name)


def _pax_size(extended: dict[str, bytes], size: int, name: str) -> int:
    given = extended.get("size")
    if given is None:
        return size
    if not given.isdigit() or len(given) > 18:
        raise ArchiveError(f"The pax header of {quoted_name(name)} has a size that is not a number.")
    return int(given)
