"""Reader of tar archives, plain or gzipped, with ustar, pax and GNU names.

Each header's size is checked before the header is read. Errors name the member at fault or the place in the
archive, where either is known.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from adapters.archives.members import MAX_MEMBERS, ArchiveError, ArchiveTooLarge, Members, quoted_name, text, unsafe
from wire.escaping import escaped

GZIP_MAGIC = b"\x1f\x8b"
# Limit of the extended headers (pax, GNU long name) of a member; real ones hold a path and a few time stamps.
MAX_EXTENDED_BYTES = 64 << 10
_EXTENDED = (b"x", b"g", b"L", b"K")
_PLAIN_FILES, _FOLDER = (b"0", b"\0", b"7"), b"5"
_CHUNK = 1 << 20
_BLOCK = 512
_CUT_OFF = "The archive is cut off"
_NO_ARCHIVE = "Expected a .zip, .tar or .tar.gz archive; this file is "


class SourceError(Exception):
    """A stream without further readable bytes. The message has no place and no full stop; `read_tar` adds both."""


class Source(Protocol):
    """The bytes of a tar, read once from begin to end. Its methods raise SourceError."""

    @property
    def position(self) -> int: ...
    def read(self, size: int, /) -> bytes: ...
    def skip(self, size: int) -> None: ...
    def drain(self) -> None: ...


class Plain:
    """A tar on disk; members are skipped by seeking."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        file.seek(0)

    @property
    def position(self) -> int:
        return self._file.tell()

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise SourceError(_CUT_OFF)
        self._file.seek(size, 1)

    def drain(self) -> None:
        """Do nothing: a plain file has no checksum."""


class Gunzip:
    """A gzip stream of any number of members, inflated piece by piece up to a limit.

    position: number of inflated bytes that were read.
    """

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self.position = 0
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
        self.position += len(taken)
        return taken

    def skip(self, size: int) -> None:
        while size:
            taken = len(self.read(min(size, _CHUNK)))
            if not taken:
                raise SourceError(_CUT_OFF)
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
            # The bytes before the fault are lost, so the place is unknown.
            raise ArchiveError(f"The gzip stream cannot be read: {escaped(str(error), 100)}.") from None
        if not raw and not plain and not self._inflate.eof:
            raise SourceError("The gzip stream is cut off")
        self._raw = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        self._left -= len(plain)
        if self._left < 0:
            raise ArchiveTooLarge(f"The archive inflates to more than {self._max_bytes} bytes.")
        return plain


class _Header(NamedTuple):
    """A header block. name: its own, which an extended header may replace; at: its position in the archive."""

    kind: bytes
    name: str
    raw_size: bytes
    at: int

    @property
    def size(self) -> int:
        """The size, written in octal digits or GNU's base 256. Raises ArchiveError."""
        if self.raw_size[0] & 0x80:
            number = int.from_bytes(self.raw_size[1:], "big")
            if self.raw_size[0] != 0x80 or number >= 1 << 60:
                raise ArchiveError(f"{self._shown} has a negative size, or one that is far too large.")
            return number
        octal = _octal(self.raw_size)
        if octal is None:
            raise ArchiveError(f"{self._shown} has a size that is not a number.")
        return octal

    @property
    def _shown(self) -> str:
        return f"The archive's header {quoted_name(self.name)} at byte {self.at}"


def read_tar(source: Source, members: Members) -> None:
    """Read ustar, pax and GNU headers and write the selected members. Raises ArchiveError."""
    tar = _Tar(source, members)
    try:
        while tar.read_member():
            pass
        source.drain()
    except SourceError as error:
        raise ArchiveError(f"{error} {tar.place}.") from None


class _Tar:
    """Reader of one archive. place: in the archive, for errors of the source."""

    def __init__(self, source: Source, members: Members) -> None:
        self.place = "before its first member"
        self._source = source
        self._members = members
        self._num_headers = 0

    def read_member(self) -> bool:
        """Read the next member with its extended headers. Returns False at the archive's end."""
        extended: list[tuple[bytes, bytes]] = []
        left = MAX_EXTENDED_BYTES
        while (header := self._next_header()) is not None and header.kind in _EXTENDED:
            extended.append((header.kind, self._read_extended(header, left)))
            left -= len(extended[-1][1])
        if header is None:
            if any(kind != b"g" for kind, _ in extended):
                raise SourceError(_CUT_OFF)
            return False
        name, size = _described(header, extended)
        is_folder = header.kind == _FOLDER or (header.kind == b"\0" and name.endswith("/"))
        if is_folder:
            size = 0
        elif header.kind not in _PLAIN_FILES:
            raise unsafe(name)
        self._members.check(name, size)
        target = None if is_folder else self._members.target(name)
        self.place = f"within its member {quoted_name(name)}"
        if target is None:
            self._source.skip(size)
        else:
            self._write(target, size)
        self._source.skip(-size % _BLOCK)
        self.place = f"after its member {quoted_name(name)}"
        return True

    def _next_header(self) -> _Header | None:
        """Read a header block. Returns None at the archive's end."""
        at, block = self._source.position, self._source.read(_BLOCK)
        if not block.strip(b"\0"):
            if not self._num_headers:
                raise ArchiveError(f"{_NO_ARCHIVE}empty or of another format.")
            return None
        self._num_headers += 1
        if self._num_headers > 4 * MAX_MEMBERS:
            raise ArchiveError(f"The archive has more than {MAX_MEMBERS} members.")
        if len(block) < _BLOCK:
            if at:
                raise SourceError(_CUT_OFF)
            raise ArchiveError("The archive is cut off, or is not a .zip, .tar or .tar.gz.")
        name = _name(block)
        if _octal(block[148:156]) != sum(block[:148]) + sum(block[156:]) + 8 * 0x20:
            if at or block[257:262] == b"ustar":
                raise ArchiveError(f"The archive's header at byte {at}, of the member {quoted_name(name)}, is damaged.")
            raise ArchiveError(f"{_NO_ARCHIVE}of another format, or damaged.")
        return _Header(block[156:157], name, block[124:136], at)

    def _read_extended(self, header: _Header, max_bytes: int) -> bytes:
        shown = f"extended header {quoted_name(header.name)} at byte {header.at}"
        size = header.size
        if size > max_bytes:
            raise ArchiveError(
                f"The archive's {shown} has {size} bytes; a member's extended headers may have {MAX_EXTENDED_BYTES}."
            )
        self.place = f"within its {shown}"
        payload = self._source.read(size)
        if len(payload) < size:
            raise SourceError(_CUT_OFF)
        self._source.skip(-size % _BLOCK)
        self.place = f"after its {shown}"
        return payload

    def _write(self, target: Path, size: int) -> None:
        with target.open("xb") as file:
            while size:
                piece = self._source.read(min(size, _CHUNK))
                if not piece:
                    raise SourceError(_CUT_OFF)
                file.write(piece)
                size -= len(piece)


def _octal(raw: bytes) -> int | None:
    """Return a header's number, None for other characters than octal digits."""
    digits = raw.strip(b"\0 ").split(b"\0")[0].strip()
    return int(digits or b"0", 8) if all(0x30 <= digit <= 0x37 for digit in digits) else None


def _name(block: bytes) -> str:
    name, prefix = block[:100].split(b"\0")[0], b""
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0")[0]
    return text(prefix + b"/" + name if prefix else name)


def _described(header: _Header, extended: list[tuple[bytes, bytes]]) -> tuple[str, int]:
    """Return a member's name and size, which its extended headers (kind, payload) may replace. Raises ArchiveError."""
    name, size = header.name, header.size
    shown = quoted_name(header.name)
    for kind, payload in extended:
        if kind == b"L":
            name = text(payload.rstrip(b"\0"))
        if kind not in (b"x", b"g"):
            continue
        for key, value in _pax_records(payload, shown):
            if key.startswith(b"GNU.sparse"):
                raise ArchiveError(f"The archive's member {shown} is a sparse file; expected plain files.")
            if key not in (b"path", b"size"):
                continue
            if kind == b"g":
                raise ArchiveError(
                    f"A global header before the archive's member {shown} sets the path or size of all members; "
                    "expected plain files."
                )
            if key == b"path":
                name = text(value)
            elif not value.isdigit() or len(value) > 18:
                raise ArchiveError(f"The pax header of the archive's member {shown} has a size that is not a number.")
            else:
                size = int(value)
    return name, size


def _pax_records(payload: bytes, shown: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records `<length> <key>=<value>\\n` of a pax header. shown: its member's name, quoted."""
    position = 0
    while position < len(payload) and payload[position]:
        length, space, _ = payload[position : position + 8].partition(b" ")
        end = position + (int(length) if space and length.isdigit() else 0)
        key, equals, value = payload[position + len(length) + 1 : end].partition(b"=")
        if not equals or end > len(payload) or not value.endswith(b"\n"):
            raise ArchiveError(f"The pax header of the archive's member {shown} has a record with a wrong length.")
        yield key, value[:-1]
        position = end
