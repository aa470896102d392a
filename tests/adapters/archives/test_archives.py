"""Archives: each lie of a header names its member, and content that is larger than it states is not written."""

import gzip
import io
import json
import random
import struct
import tarfile
import zlib
from pathlib import Path

import pytest

from adapters.archives.members import ArchiveError, ArchiveTooLarge
from adapters.archives.unpack import unpack
from testing.adapter_files import CONFIG as PEFT_CONFIG
from testing.adapter_files import safetensors, tensors
from testing.gateway.mutated_archives import (
    CONFIG,
    WEIGHTS,
    Files,
    extended,
    pax,
    tar_byte,
    tar_header,
    tar_size,
    tarred,
    zip_field,
    zipped,
)

FILES: Files = {CONFIG: json.dumps(PEFT_CONFIG).encode(), WEIGHTS: safetensors(tensors())}
ENTRY = b"PK\x01\x02"
MAX_BYTES = 1 << 30
MIB = 1 << 20
# A refusal is at most 2 KB in JSON, in which a character takes up to six bytes.
MAX_MESSAGE = 300


def opened(folder: Path, archive: bytes) -> Files:
    """Return the two files that are unpacked from an archive."""
    folder.mkdir(exist_ok=True)
    path = folder / "archive"
    path.write_bytes(archive)
    unpack(path, folder, MAX_BYTES)
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def refusal(folder: Path, archive: bytes) -> str:
    """Return the message of an archive's refusal."""
    with pytest.raises(ArchiveError) as caught:
        opened(folder, archive)
    message = str(caught.value)
    assert len(message) <= MAX_MESSAGE
    return message


def record(key: str, value: str) -> bytes:
    """Return a record of a pax header."""
    rest = f" {key}={value}\n"
    # The length counts its own digits.
    length = next(n for n in range(len(rest), len(rest) + 9) if len(f"{n}{rest}") == n)
    return f"{length}{rest}".encode()


# Offset and size of a directory entry's numbers.
NUMBERS = {"method": (10, 2), "crc": (16, 4), "packed": (20, 4), "size": (24, 4), "name": (28, 2), "offset": (42, 4)}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_zip_entry_that_lies_is_named(tmp_path: Path, number: str):
    for seed in range(12):
        made = zip_field(*NUMBERS[number], ENTRY)(FILES, random.Random(seed))
        message = refusal(tmp_path / str(seed), made["file"])
        # A name that is too short leaves data that is not an entry.
        assert WEIGHTS in message or (number == "name" and " at byte " in message), message


def test_an_entry_that_the_directory_does_not_have_has_its_place(tmp_path: Path):
    """The error names the byte of the archive at which the directory and its number of entries differ."""
    raw = bytearray(zipped(FILES))
    first, last, end = raw.find(ENTRY), raw.rfind(ENTRY), raw.rfind(b"PK\x05\x06")
    for entries, at in ((1, last), (3, end)):
        raw[end + 8 : end + 12] = struct.pack("<2H", entries, entries)
        assert f" at byte {at}" in refusal(tmp_path / str(entries), bytes(raw))
    raw[end + 8 : end + 12] = struct.pack("<2H", 2, 2)
    raw[last : last + 4] = b"what"
    assert f" at byte {last} " in refusal(tmp_path / "magic", bytes(raw))
    raw[first + 28 : first + 30] = struct.pack("<H", 9_000)
    assert f"the entry of '{CONFIG}" in refusal(tmp_path / "name", bytes(raw))


@pytest.mark.parametrize("seed", range(15))
def test_a_tar_header_with_a_wrong_size_is_named(tmp_path: Path, seed: int):
    made = tar_size(FILES, random.Random(seed))["file"]
    for name, archive in (("plain", made), ("gzip", gzip.compress(made))):
        assert f"'{CONFIG}'" in refusal(tmp_path / name, archive)


@pytest.mark.parametrize("seed", range(40))
def test_a_wrong_extended_header_is_named(tmp_path: Path, seed: int):
    message = refusal(tmp_path, pax(FILES, random.Random(seed))["file"])
    # Too large a header is not read, and the member behind it neither.
    assert f"'{CONFIG}'" in message or message.startswith("The archive's extended header 'x' at byte 0 has "), message


def test_a_damaged_header_is_named(tmp_path: Path):
    """The name itself may be damaged, so the error has the place too."""
    for seed in range(10):
        made = tar_byte(FILES, random.Random(seed))["file"]
        shown = made[:100].rstrip(b"\0").decode("utf-8", "replace")
        message = refusal(tmp_path / str(seed), made)
        assert "header at byte 0, of the member '" in message
        assert shown.isprintable() is (shown in message)


MEMBER = f"The archive's member '{CONFIG}' "
HEADER = f"The archive's header '{CONFIG}' at byte 0 "
PAX = f"The pax header of the archive's member '{CONFIG}' "
LIES: dict[str, tuple[bytes, str]] = {
    "negative": (tar_header(CONFIG.encode(), b"0", b"\xff" * 12), HEADER + "has a negative size, or one that is "),
    "no number": (tar_header(CONFIG.encode(), b"0", b"notanumber\0"), HEADER + "has a size that is not a number."),
    "negative pax": (tar_header(b"p", b"x", b"\xff" * 12), "The archive's header 'p' at byte 0 has a negative size"),
    "large pax": (extended(b"g", bytes(65 << 10)), "The archive's extended header 'x' at byte 0 has 66560 bytes; "),
    "many pax": (extended(b"x", b"") + extended(b"L", bytes(40 << 10)) * 2, "extended header 'x' at byte 41984 has "),
    "pax length": (extended(b"x", b"30 path=x\n") + tarred(FILES), PAX + "has a record with a wrong length."),
    "pax size": (extended(b"x", record("size", "x")) + tarred(FILES), PAX + "has a size that is not a number."),
    "sparse": (extended(b"x", record("GNU.sparse.map", "")) + tarred(FILES), MEMBER + "is a sparse file; "),
    "global": (extended(b"g", record("size", "3")) + tarred(FILES), f"before the archive's member '{CONFIG}' sets the"),
    "path": (extended(b"x", record("path", "../" + "x" * 5000)) + tarred(FILES), "member '../xxxxxxxx"),
    "long name": (extended(b"L", b"../" + b"x" * 5000) + tarred(FILES), "member '../xxxxxxxx"),
    "pax cut": (extended(b"x", b"", 100), "The archive is cut off within its extended header 'x' at byte 0."),
    "alone": (extended(b"x", record("path", "a")), "The archive is cut off after its extended header 'x' at byte 0."),
}


@pytest.mark.parametrize("kind", LIES)
def test_lies_of_tar_headers(tmp_path: Path, kind: str):
    archive, expected = LIES[kind]
    assert expected in refusal(tmp_path / "plain", archive)
    assert expected in refusal(tmp_path / "gzip", gzip.compress(archive))


def test_a_cut_off_tar_names_its_last_member(tmp_path: Path):
    raw = tarred(FILES)
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        config, weights = archive.getmembers()
    ends = {weights.offset + at: f"after its member '{CONFIG}'." for at in (1, 511)}
    for member in (config, weights):
        for at in (0, 1, member.size - 1, member.size):
            ends[member.offset_data + at] = f"within its member '{member.name}'."
    for end, expected in ends.items():
        assert refusal(tmp_path / str(end), raw[:end]) == f"The archive is cut off {expected}"


def test_a_broken_gzip_stream_names_its_last_member(tmp_path: Path):
    raw = gzip.compress(tarred(FILES))
    places = set()
    for end in range(18, len(raw) - 8, 13):
        message = refusal(tmp_path / str(end), raw[:end])
        assert message.startswith("The gzip stream is cut off ")
        inflated = len(zlib.decompressobj(31).decompress(raw[:end]))
        assert (CONFIG in message or WEIGHTS in message) is (inflated >= 512)
        places.add(message)
    assert f"The gzip stream is cut off within its member '{WEIGHTS}'." in places
    # The stream itself is at fault here, and no member.
    wrong_sum = raw[:-8] + bytes([raw[-8] ^ 1]) + raw[-7:]
    assert refusal(tmp_path / "sum", wrong_sum).startswith("The gzip stream cannot be read: ")
    assert refusal(tmp_path / "tail", raw + b"trailing") == "The file has data after its gzip stream."


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read(tmp_path: Path, layout: int):
    folder = "f" * (90 if layout == tarfile.USTAR_FORMAT else 150)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
        for name, content in (FILES | {"ü" * 40: b"x"}).items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert opened(tmp_path / "plain", buffer.getvalue()) == FILES
    assert opened(tmp_path / "gzip", gzip.compress(buffer.getvalue())) == FILES


def test_pax_headers_replace_names_and_sizes_of_the_next_member_only(tmp_path: Path):
    archive = b""
    for name, content in FILES.items():
        archive += extended(b"g", record("comment", "x")) + extended(b"x", record("mtime", "1"))
        archive += extended(b"x", record("path", name) + record("size", str(len(content))))
        archive += tar_header(b"short", b"0", b"00000000001\0") + content + bytes(-len(content) % 512)
    assert opened(tmp_path, archive + tar_header(CONFIG.encode() + b"s", b"0", b"\0") + bytes(1024)) == FILES


def test_a_member_that_inflates_beyond_its_size_is_not_written(tmp_path: Path):
    raw = bytearray(zipped({CONFIG: FILES[CONFIG], WEIGHTS: bytes(64 * MIB)}))
    entry = raw.rfind(ENTRY)
    raw[entry + 24 : entry + 28] = struct.pack("<I", 100)
    path = tmp_path / "archive"
    path.write_bytes(raw)
    with pytest.raises(ArchiveError, match=f"member '{WEIGHTS}' is longer than its stated 100 bytes"):
        unpack(path, tmp_path, MAX_BYTES)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= MIB


def test_a_gzip_stream_is_inflated_up_to_the_limit(tmp_path: Path):
    """The bytes behind the last member are counted too, although no member states them."""
    path = tmp_path / "archive"
    path.write_bytes(gzip.compress(tarred(FILES) + bytes(8 * MIB)))
    with pytest.raises(ArchiveTooLarge, match="inflates to more than "):
        unpack(path, tmp_path, 200_000)


@pytest.mark.parametrize("pack", [tarred, zipped, lambda content: gzip.compress(tarred(content))])
def test_members_that_state_too_many_bytes_are_refused_unread(tmp_path: Path, pack):
    path = tmp_path / "archive"
    path.write_bytes(pack({CONFIG: b"{}", "zeros": bytes(2 * MIB)}))
    with pytest.raises(ArchiveTooLarge, match="members up to 'zeros' state 2097154 bytes together"):
        unpack(path, tmp_path, 2 * MIB)
