"""An adapter upload: a multipart stream to two files in a temporary folder, within bounds, whatever was sent.

Nothing in an archive decides a path: of its members only the two files of an adapter are read, and they are written
under names of our own. Members that point elsewhere (`..`, absolute paths, links, devices) refuse the whole archive.
"""

import asyncio
import gzip
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError as BadHttpMessage

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from gateway.api.bodies import in_time
from gateway.errors import BadRequest, TooLarge

FILES = (CONFIG_NAME, WEIGHTS_NAME)
CHUNK_BYTES = 2**20
MAX_NAME_BYTES = 1024
MAX_MEMBERS = 1000
GZIP_MAGIC = b"\x1f\x8b"


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """name: as sent, unchecked. folder: holds adapter_config.json and adapter_model.safetensors, unchecked."""

    name: str
    folder: Path


@asynccontextmanager
async def receive(request: web.Request, max_bytes: int) -> AsyncIterator[Upload]:
    """Reads the request's multipart form. The folder is gone when the block ends.

    Raises BadRequest naming the form's field, TooLarge beyond max_bytes (of the body, and again unpacked).
    """
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    if not request.content_type.startswith("multipart/"):
        raise BadRequest(
            f"Expected a multipart/form-data body with the field 'name' and the files {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}, or one archive as 'file'.",
        )
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="loraplex-upload-"))
    try:
        name, archive = await _read_form(request, folder, max_bytes)
        if archive is not None:
            await asyncio.to_thread(unpack, archive, folder, max_bytes)
        for file in FILES:
            if not (folder / file).is_file():
                raise BadRequest(f"Expected the file {file} in the upload.", param=file)
        yield Upload(name=name, folder=folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _read_form(request: web.Request, folder: Path, max_bytes: int) -> tuple[str, Path | None]:
    """Writes the form's files under names of our own; the name, and the archive if there is one."""
    try:
        form = await request.multipart()
        name: str | None = None
        archive: Path | None = None
        left = max_bytes
        seen: set[str] = set()
        while (part := await in_time(request, form.next())) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise BadRequest("Expected form fields, each with a name of its own.")
            field = _target(part)
            if field in seen:
                raise BadRequest(f"'{field}' is in the form twice.", param=field)
            seen.add(field)
            if field == "name":
                name = await in_time(request, _read_name(part))
                continue
            path = folder / ("upload.archive" if field == "file" else field)
            left -= await _save(request, part, path, left, max_bytes)
            archive = path if field == "file" else archive
    except (ValueError, AssertionError, BadHttpMessage) as error:
        # What aiohttp's multipart reader raises for a form it cannot read.
        raise BadRequest("The multipart body is malformed.") from error
    if name is None:
        raise BadRequest("Expected the form field 'name': what the adapter shall be called.", param="name")
    if archive is not None and seen & set(FILES):
        raise BadRequest("Expected either one archive as 'file' or the two files, not both.", param="file")
    return name, archive


def _target(part: BodyPartReader) -> str:
    """Which of our fields a part is: by its name, or by its file's name if that is one of the adapter's files."""
    field = part.name or ""
    if field in ("name", "file", *FILES):
        return part.filename if field == "file" and part.filename in FILES else field
    if part.filename in FILES:
        return part.filename
    expected = ", ".join(("name", "file", *FILES))
    raise BadRequest(f"Unknown form field '{field[:64]}'; expected: {expected}.", param=field[:64])


async def _read_name(part: BodyPartReader) -> str:
    content = bytearray()
    while chunk := await part.read_chunk():
        content += chunk
        if len(content) > MAX_NAME_BYTES:
            raise BadRequest("The adapter's name is too long.", param="name")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadRequest("Expected the adapter's name as UTF-8 text.", param="name") from error


async def _save(request: web.Request, part: BodyPartReader, path: Path, left: int, max_bytes: int) -> int:
    """Streams a part to disk off the event loop; its size in bytes."""
    size = 0
    with await asyncio.to_thread(path.open, "xb") as file:
        while chunk := await in_time(request, part.read_chunk(CHUNK_BYTES)):
            size += len(chunk)
            if size > left:
                raise _too_large(max_bytes)
            await asyncio.to_thread(file.write, chunk)
    return size


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Takes the adapter's two files out of a .zip, .tar or .tar.gz (from its root or its one folder), removes it.

    Raises BadRequest (param "file"), TooLarge.
    """
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder, max_bytes)
        else:
            _unpack_tar(_gunzip(archive, max_bytes), folder, max_bytes)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadRequest("Expected a .zip, .tar or .tar.gz archive; this one cannot be read.", param="file") from error
    except (NotImplementedError, RuntimeError) as error:
        # zipfile's words for methods it does not know and for encryption.
        raise BadRequest(f"The archive cannot be read: {error}.", param="file") from error
    archive.unlink()


def _unpack_zip(archive: Path, folder: Path, max_bytes: int) -> None:
    with zipfile.ZipFile(archive) as opened:
        members = opened.infolist()
        for info in members:
            mode = stat.S_IFMT(info.external_attr >> 16)
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _unsafe(info.filename)
        files = [info.filename for info in members if not info.is_dir()]
        wanted = _choose(files, [info.filename for info in members], sum(info.file_size for info in members), max_bytes)
        for name, file in wanted.items():
            with opened.open(name) as source:
                _copy(source, folder / file, max_bytes)


def _unpack_tar(archive: Path, folder: Path, max_bytes: int) -> None:
    with tarfile.open(archive, "r:") as opened:
        members = []
        for member in opened:
            members.append(member)
            if len(members) > MAX_MEMBERS:
                break
            if not (member.isfile() or member.isdir()) or member.issparse():
                raise _unsafe(member.name)
        by_name = {member.name: member for member in members}
        files = [member.name for member in members if member.isfile()]
        wanted = _choose(files, [member.name for member in members], sum(member.size for member in members), max_bytes)
        for name, file in wanted.items():
            source = opened.extractfile(by_name[name])
            assert source is not None  # it is a regular file
            _copy(source, folder / file, max_bytes)


def _gunzip(archive: Path, max_bytes: int) -> Path:
    """The archive without its gzip layer, bounded before anything reads what is inside."""
    with archive.open("rb") as file:
        if file.read(2) != GZIP_MAGIC:
            return archive
    plain = archive.with_suffix(".tar")
    with gzip.open(archive) as source:
        # Headers and padding come on top of what the members may weigh.
        _copy(source, plain, max_bytes + MAX_MEMBERS * 4096)
    plain.replace(archive)
    return archive


def _choose(files: list[str], members: list[str], total: int, max_bytes: int) -> dict[str, str]:
    """Of the regular files, those to take: member name -> adapter file. Every member's name must be harmless."""
    if len(members) > MAX_MEMBERS:
        raise BadRequest(f"The archive has more than {MAX_MEMBERS} members.", param="file")
    if total > max_bytes:
        raise _too_large(max_bytes)
    for name in members:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise _unsafe(name)
    wanted: dict[str, str] = {}
    for name in files:
        path = PurePosixPath(name)
        if path.name in FILES and len(path.parts) <= 2:
            if path.name in wanted.values():
                raise BadRequest(f"The archive holds {path.name} more than once.", param="file")
            wanted[name] = path.name
    return wanted


def _copy(source: Readable, target: Path, max_bytes: int) -> None:
    size = 0
    with target.open("xb") as file:
        while chunk := source.read(CHUNK_BYTES):
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            file.write(chunk)


def _unsafe(name: str) -> BadRequest:
    return BadRequest(
        f"The archive's member {name[:100]!r} is refused: expected plain files inside the archive's own folder.",
        param="file",
    )


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The upload is larger than the {max_bytes} bytes this gateway accepts.", param="file")
