"""Reader of zip archives with stored and deflated members.

The directory's size is checked before entries are parsed.
"""

import binascii
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

from adapters.archives.members import MAX_MEMBERS, ArchiveError, Members, quoted_name, text, unsafe
from wire.escaping import escaped

ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
# Enough for 1,000 entries with long names and comments.
MAX_DIRECTORY_BYTES = 1 << 20
_CHUNK = 1 << 20
_LOCAL, _END, _ENTRY = *ZIP_MAGIC, b"PK\x01\x02"
_END_BYTES, _COMMENT_BYTES = 22, 0xFFFF
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstandard", 95: "xz"}


def read_zip(file: BinaryIO, members: Members) -> None:
    total = file.seek(0, 2)
    entries, begin, size = _zip_directory(file, total)
    file.seek(begin)
    directory = file.read(size)
    position = found = 0
    while position < len(directory):
        found += 1
        if found > entries:
            raise ArchiveError(
                f"The zip's directory states {entries} entries but has another one at byte {begin + position}."
            )
        position = _zip_entry(file, directory, position, begin, members)
    if found < entries:
        raise ArchiveError(
            f"The zip's directory states {entries} entries but ends at byte {begin + position} with {found} of them."
        )


def _zip_directory(file: BinaryIO, total: int) -> tuple[int, int, int]:
    """Return (entries, offset, size) of a zip's directory. Raises ArchiveError before any entry is read."""
    tail_size = min(total, _END_BYTES + _COMMENT_BYTES)
    file.seek(total - tail_size)
    tail = file.read(tail_size)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_BYTES:
        raise ArchiveError("The zip is cut off: its end record is missing.")
    disk, first_disk, here, entries, size, begin, comment = struct.unpack("<4H2IH", tail[at + 4 : at + _END_BYTES])
    end = total - tail_size + at
    if len(tail) - at != _END_BYTES + comment:
        raise ArchiveError("The zip's end record does not have the length that it states.")
    if disk or first_disk or here != entries:
        raise ArchiveError("The zip is spread over several files; expected one.")
    if 0xFFFFFFFF in (size, begin):
        entries, size, begin, end = _zip64_directory(file, end)
    if entries > MAX_MEMBERS:
        raise ArchiveError(f"The archive has {entries} members, more than {MAX_MEMBERS}.")
    if size > MAX_DIRECTORY_BYTES:
        raise ArchiveError(f"The zip's directory has {size} bytes; at most {MAX_DIRECTORY_BYTES} are read.")
    if begin + size != end:
        raise ArchiveError("The zip's directory is not where its end record states.")
    return entries, begin, size


def _zip64_directory(file: BinaryIO, end: int) -> tuple[int, int, int, int]:
    locator_at = end - 20
    file.seek(max(0, locator_at))
    locator = file.read(20)
    if locator_at < 0 or locator[:4] != b"PK\x06\x07":
        raise ArchiveError("The zip's directory is not where its end record states.")
    (record_at,) = struct.unpack("<Q", locator[8:16])
    if record_at + 56 > locator_at:
        raise ArchiveError("The zip's directory is not where its end record states.")
    file.seek(record_at)
    record = file.read(56)
    if record[:4] != b"PK\x06\x06":
        raise ArchiveError("The zip's directory is not where its end record states.")
    _, entries, size, begin = struct.unpack("<4Q", record[24:56])
    return entries, size, begin, record_at


def _zip_entry(file: BinaryIO, directory: bytes, at: int, limit: int, members: Members) -> int:
    """Check an entry of the directory, write its member if it is wanted, and return the next entry's offset."""
    fixed = directory[at : at + 46]
    if len(fixed) < 46 or fixed[:4] != _ENTRY:
        raise ArchiveError(f"The zip's directory contains data at byte {limit + at} that is not an entry.")
    flags, method = struct.unpack("<2H", fixed[8:12])
    crc, packed, size, name_bytes, extra_bytes, comment_bytes = struct.unpack("<3I3H", fixed[16:34])
    attributes, offset = struct.unpack("<2I", fixed[38:46])
    behind = at + 46 + name_bytes
    following = behind + extra_bytes + comment_bytes
    name = text(directory[at + 46 : behind])
    if following > len(directory):
        raise ArchiveError(f"The zip's directory is cut off within the entry of {quoted_name(name)}.")
    size, packed, offset = _zip64_values(directory[behind : behind + extra_bytes], [size, packed, offset], name)
    if attributes >> 28 not in (0, 0x8, 0x4):  # the upper bits of a Unix mode: a regular file, a folder
        raise unsafe(name)
    members.check(name, size)
    target = None if name.endswith("/") else members.target(name)
    if target is not None:
        if flags & 0x1:
            raise ArchiveError(
                f"The archive's member {quoted_name(name)} is encrypted; expected it without a password."
            )
        if method not in (_STORED, _DEFLATED):
            known = _METHODS.get(method, f"method {method}")
            raise ArchiveError(
                f"The archive's member {quoted_name(name)} is compressed by {known}; expected deflate or none."
            )
        start = _zip_local(file, offset, limit, name)
        if start + packed > limit:
            raise ArchiveError(f"The archive's member {quoted_name(name)} extends beyond the archive's members.")
        file.seek(start)
        _zip_member(file, target, method == _DEFLATED, packed, size, crc, name)
    return following


def _zip64_values(extra: bytes, values: list[int], name: str) -> list[int]:
    """Return size, packed size and offset; a value of 0xFFFFFFFF is replaced from the entry's zip64 field."""
    if 0xFFFFFFFF not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<2H", extra[at : at + 4])
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            found = [next(wide, -1) if value == 0xFFFFFFFF else value for value in values]
            if -1 not in found:
                return found
        at += 4 + length
    raise ArchiveError(f"The archive's member {quoted_name(name)} has a size beyond 4 GiB without a zip64 field.")


def _zip_local(file: BinaryIO, offset: int, limit: int, name: str) -> int:
    """Return the offset of a member's data."""
    file.seek(min(offset, limit))
    local = file.read(30)
    if offset + 30 > limit or local[:4] != _LOCAL:
        raise ArchiveError(f"The archive's member {quoted_name(name)} is not where the directory states.")
    name_bytes, extra_bytes = struct.unpack("<2H", local[26:30])
    if text(file.read(name_bytes)) != name:
        raise ArchiveError(f"The archive's member {quoted_name(name)} has another name in its own header.")
    return offset + 30 + int(name_bytes) + int(extra_bytes)


def _zip_member(file: BinaryIO, target: Path, deflated: bool, packed: int, size: int, crc: int, name: str) -> None:
    """Write a member, whose content must have `size` bytes and the checksum `crc`. Raises ArchiveError."""
    inflate = zlib.decompressobj(-15) if deflated else None
    written = seen = 0
    raw, left = b"", packed
    with target.open("xb") as out:
        while True:
            if not raw and left:
                raw = file.read(min(left, _CHUNK))
                left -= len(raw)
            plain, raw = _inflated(inflate, raw, name)
            written += len(plain)
            if written > size:
                raise ArchiveError(f"The archive's member {quoted_name(name)} is longer than its stated {size} bytes.")
            seen = binascii.crc32(plain, seen)
            out.write(plain)
            if (inflate is not None and inflate.eof) or not (plain or raw or left):
                break
    if written != size or left or raw or (inflate is not None and not inflate.eof):
        raise ArchiveError(f"The archive's member {quoted_name(name)} does not have its stated {size} bytes.")
    if seen != crc:
        raise ArchiveError(f"The archive's member {quoted_name(name)} has a wrong checksum.")


def _inflated(inflate: "zlib._Decompress | None", raw: bytes, name: str) -> tuple[bytes, bytes]:
    """Inflate a piece. Returns (inflated bytes, rest of raw). Raises ArchiveError."""
    if inflate is None:
        return raw, b""
    try:
        plain = inflate.decompress(raw, _CHUNK)
    except zlib.error as error:
        why = escaped(str(error), 100)
        raise ArchiveError(f"The archive's member {quoted_name(name)} cannot be inflated: {why}.") from None
    return plain, inflate.unused_data if inflate.eof else inflate.unconsumed_tail
