"""Archives that the gateway must refuse, made from an adapter's files for `mutated_uploads`."""

import bz2
import gzip
import io
import lzma
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Files = dict[str, bytes]


def zipped(files: Files, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(files: Files, change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_field(at: int, size: int, signature: bytes) -> Callable[[Files, random.Random], Files]:
    """Change a number of a zip record (directory entry, end record or local header)."""

    def make(files: Files, rng: random.Random) -> Files:
        raw = bytearray(zipped(files))
        record = raw.rfind(signature)
        old = int.from_bytes(raw[record + at : record + at + size], "little")
        new = rng.choice([value for value in (0, 1, old + 1, old * 2 + 3, (1 << 8 * size) - 2) if value != old])
        raw[record + at : record + at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
        return {"file": bytes(raw)}

    return make


def zip_method(files: Files, rng: random.Random) -> Files:
    return {"file": zipped(files, rng.choice([zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))}


def zip_bomb(files: Files, rng: random.Random) -> Files:
    return {"file": zipped({CONFIG: files[CONFIG], WEIGHTS: bytes(rng.randint(1, 64) << 20)})}


def many_entries(count: int) -> bytes:
    """Return a zip whose directory has too many entries, all empty."""
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"a"
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    said = min(count, 0xFFFF)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, said, said, count * len(entry), len(local), 0)
    return local + entry * count + end


def many(_: Files, rng: random.Random) -> Files:
    return {"file": many_entries(rng.randint(1001, 60_000))}


def member(files: Files, rng: random.Random) -> Files:
    """Return an archive with a member that points outside it or is no regular file."""
    name = rng.choice(["../x", "/etc/x", "a/../../x", "a\\b", "../" + CONFIG])
    packs: list[Callable[[Files], bytes]] = [zipped, tarred, lambda content: gzip.compress(tarred(content))]
    return {"file": rng.choice(packs)(files | {name: b"x"})}


def special(files: Files, rng: random.Random) -> Files:
    kind = rng.choice(
        [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"S", b"Z"]
    )
    victim = rng.choice([CONFIG, WEIGHTS, "else"])

    def change(info: tarfile.TarInfo) -> None:
        if info.name == victim:
            info.type, info.size, info.linkname = kind, 0, "/etc/passwd"

    return {"file": tarred(files | {"else": b""}, change)}


def tar_header(name: bytes, kind: bytes, size: bytes) -> bytes:
    """Return a header block with a valid checksum."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[124 : 124 + len(size)], block[156:157] = b"0000644\0", size, kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def extended(kind: bytes, payload: bytes, size: int | None = None) -> bytes:
    """Return a tar with one extended header. size: the size that the header declares."""
    said = b"%011o\0" % (len(payload) if size is None else size)
    return tar_header(b"x", kind, said) + payload + bytes(-len(payload) % 512)


def pax(files: Files, rng: random.Random) -> Files:
    plain = tarred(files)
    payload = rng.choice(
        [
            b"1" * 20_000,
            b"9999999 path=x\n",
            b"5 a=\n" * 10,
            b"12 size=x\n\n\n",
            b"20 GNU.sparse.map=\n",
            b"18 path=../evil\n\n",
            b"=" * 100,
            b"0 path=x\n",
            b"30 path=x\n",
        ]
    )
    kind = rng.choice([b"x", b"g"])
    if payload.startswith(b"5 a"):
        payload, kind = bytes(rng.randint(65 << 10, 1 << 20)), rng.choice([b"x", b"g", b"L", b"K"])
    raw = extended(kind, payload) + plain
    return {"file": rng.choice([raw, gzip.compress(raw)])}


def tar_size(files: Files, rng: random.Random) -> Files:
    size = rng.choice([b"\x80" + b"\xff" * 11, b"\xff" * 12, b"77777777777\0", b"notanumber\0", b"-0000000001\0"])
    return {"file": tar_header(CONFIG.encode(), b"0", size) + tarred(files)}


def tar_byte(files: Files, rng: random.Random) -> Files:
    """Change one byte of a tar header, so that its checksum is wrong."""
    raw = bytearray(tarred(files))
    raw[rng.randrange(0, 100)] ^= 1 << rng.randrange(7)
    return {"file": bytes(raw)}


def gzip_bomb(files: Files, rng: random.Random) -> Files:
    zeros = tar_header(b"zeros", b"0", b"%011o\0" % (rng.randint(1, 32) << 20))
    return {"file": gzip.compress(zeros + bytes(1 << 20))}


def gzip_broken(files: Files, rng: random.Random) -> Files:
    raw = bytearray(gzip.compress(tarred(files)))
    way = rng.randrange(3)
    if way == 0:
        return {"file": bytes(raw[: rng.randrange(18, len(raw) - 8)])}
    if way == 1:
        raw[-8 + rng.randrange(4)] ^= 0xFF
        return {"file": bytes(raw)}
    return {"file": bytes(raw) + b"trailing"}


def other_archive(files: Files, rng: random.Random) -> Files:
    packs: list[Callable[[bytes], bytes]] = [bz2.compress, lzma.compress]
    packs += [lambda raw: b"7z\xbc\xaf\x27\x1c" + raw, lambda raw: b"Rar!" + raw]
    return {"file": rng.choice(packs)(tarred(files))}


def nested(files: Files, rng: random.Random) -> Files:
    """Return an archive in an archive in an archive."""
    raw = zipped(files)
    for _ in range(rng.randint(1, 20)):
        raw = zipped({"file.zip": raw})
    return {"file": raw}
