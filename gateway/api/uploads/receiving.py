"""Reader of adapter uploads: writes a multipart stream to files on the store's file system, within limits.

The files' content is not read here: child processes unpack and check it (gateway/api/uploads/checking.py).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from adapters.check import ARCHIVE
from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from adapters.spool import Spool
from gateway.api.requests.body_reader import ChunkReader
from gateway.api.uploads.blocking_calls import BlockingCalls
from gateway.api.uploads.form import Form, FormError, FormPart
from gateway.errors import BadRequest, BodyTimeout, TooLarge
from gateway.process.reads import LARGE_READ_BYTES, large_reads
from gateway.quota.uploading import ReceivedBytes
from gateway.sharing.byte_rate import ByteRate
from wire.escaping import escaped

log = logging.getLogger(__name__)

FILES = (CONFIG_NAME, WEIGHTS_NAME)
FIELDS = ("name", "base", "file", *FILES)
TEXTS = ("name", "base")
WRITE_BYTES = 256 << 10
READ_BYTES = LARGE_READ_BYTES
# Minimum average size of an upload's chunks, because each chunk costs a read.
MIN_CHUNK_BYTES = 1024
MAX_NAME_BYTES = 1024
# Rate of all uploads of a tenant together. A MiB takes 3.5 ms of CPU time, so they take up to a fifth of a core. At
# full speed (330 MiB a second) they made a neighbour's requests on two cores 1.9 times slower.
UPLOAD_BYTES_PER_SECOND = 64 * 2**20
# Shorter waits are added to the next one.
MIN_WAIT_SECONDS = 0.02
T = TypeVar("T")
_RATE = ByteRate(UPLOAD_BYTES_PER_SECOND)


class UploadRules(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an upload.

    max_bytes: limit of the body, and of its unpacked content. seconds: time limit of the upload and its check together.
    read_seconds: longest pause between bytes. min_rate: bytes a second, on average since `grace_seconds` after the
    start.
    """

    max_bytes: int
    seconds: float
    read_seconds: float
    min_rate: int
    grace_seconds: float = 30.0


class UploadNames(NamedTuple):
    """Names in an upload: the adapter's, and its base model's if it is given."""

    name: str
    base: str | None = None


class Workplace:
    """The spool folder of an upload, and the work that must end before the folder is removed."""

    _closing: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, spool: Spool, owner: str, disk: BlockingCalls) -> None:
        """owner: a tenant's id, or OPERATOR. disk: runs the calls that use the spool's disk."""
        self.folder = spool.folder
        self._spool = spool
        self._owner = owner
        self._disk = disk
        self._work: set[asyncio.Future[Any]] = set()
        self._files: list[BinaryIO] = []

    def create(self, name: str) -> BinaryIO:
        """Create a file in the folder. It is closed with the workplace at the latest. Blocks."""
        file = (self.folder / name).open("xb")
        self._files.append(file)
        return file

    async def in_thread(self, do: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in a thread, to its end even if the caller is cancelled."""
        return await self.finish(self._disk.run(self._owner, do, *arguments))

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end even if the caller is cancelled."""
        return await self._shielded(asyncio.ensure_future(work))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that is cancelled with the caller; the folder stays until the work has ended."""
        task = asyncio.create_task(work)
        try:
            return await self._shielded(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _shielded(self, work: asyncio.Future[T]) -> T:
        self._work.add(work)
        return await asyncio.shield(work)

    async def _close(self) -> None:
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._disk.run(self._owner, self._remove)

    def _remove(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._spool.remove()

    @classmethod
    @asynccontextmanager
    async def open(cls, spool: Spool, owner: str, disk: BlockingCalls) -> AsyncIterator["Workplace"]:
        """Create the folder, and remove it at the end of the block. Raises OSError."""
        place = cls(spool, owner, disk)
        try:
            await place.in_thread(spool.make)
            yield place
        finally:
            closing = asyncio.create_task(place._close())
            cls._closing.add(closing)
            closing.add_done_callback(cls._closing.discard)
            await asyncio.shield(closing)

    @classmethod
    async def all_closed(cls) -> None:
        """Wait until the folders of ended uploads are removed."""
        await asyncio.gather(*cls._closing, return_exceptions=True)


async def receive(request: web.Request, place: Workplace, rules: UploadRules, received: ReceivedBytes) -> UploadNames:
    """Read the request's form into the workplace and return the adapter's names, unchecked.

    received: counts the body's bytes. Raises BadRequest naming the form's field, TooLarge, BodyTimeout, RateLimited.
    """
    if not request.content_type.startswith("multipart/"):
        raise BadRequest(
            f"Expected a multipart/form-data body with the field 'name' and the files {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}, or one archive as 'file'.",
        )
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise BadRequest("Expected an upload without Content-Encoding; an archive may be compressed itself.")
    body = BodyReader(request, rules, received)
    try:
        with large_reads(request):
            return await _read_form(Form(_boundary(request), body.read), place, body)
    except FormError as error:
        raise BadRequest(f"The multipart body is malformed: {error}.") from error


def refuse_too_large(request: web.Request, rules: UploadRules) -> None:
    """Raise TooLarge for a body whose declared length is too large."""
    if request.content_length is not None and request.content_length > rules.max_bytes:
        raise too_large(rules.max_bytes)


def too_large(max_bytes: int, detail: str = "") -> TooLarge:
    """Return the refusal of an upload. detail: a further sentence."""
    message = f"The upload is larger than the {max_bytes} bytes this gateway accepts. {detail}"
    return TooLarge(message.rstrip(), param="file")


def _boundary(request: web.Request) -> str:
    # The header is split here, because aiohttp's own parser would lower-case and fold the value.
    for parameter in request.headers.get("Content-Type", "").split(";")[1:]:
        key, _, value = parameter.strip().partition("=")
        if key.lower() == "boundary":
            return value.strip().strip('"')
    return ""


class BodyReader:
    """Reader of a request's body that enforces the limits of size and rate, and counts the bytes."""

    def __init__(self, request: web.Request, rules: UploadRules, received: ReceivedBytes) -> None:
        # Large reads suit the disk; the limit of pending chunks stays as it is.
        request.content.set_read_chunk_size(READ_BYTES)
        self._chunks = ChunkReader(request, MIN_CHUNK_BYTES)
        self._rules = rules
        self._received = received
        # Time from which the minimum rate applies; waits for our own disk postpone it.
        self._begun = time.monotonic() + rules.grace_seconds

    async def read(self) -> bytes:
        rules, now = self._rules, time.monotonic()
        left = self._begun + self._chunks.num_bytes / rules.min_rate - now
        try:
            async with asyncio.timeout(min(rules.read_seconds, left)):
                piece = await self._chunks.next()
        except TimeoutError as error:
            if left < rules.read_seconds:
                raise BodyTimeout(f"The upload came more slowly than {rules.min_rate} bytes a second.") from error
            raise BodyTimeout("The request's body did not come in time.") from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise BadRequest("The request's body does not match its Content-Length or Transfer-Encoding.") from error
        await self._received.add(len(piece))
        owner = self._received.owner
        if owner is not None and (wait := _RATE.delay(owner, len(piece))) > MIN_WAIT_SECONDS:
            self._begun += wait
            await asyncio.sleep(wait)
        if self._chunks.num_bytes > rules.max_bytes:
            raise too_large(rules.max_bytes)
        return piece

    async def write(self, place: Workplace, write: Callable[[bytes], object], content: bytes) -> None:
        """Call `write` on a thread. The client's rate excludes this time."""
        begun = time.monotonic()
        await place.in_thread(write, content)
        self._begun += time.monotonic() - begun


async def _read_form(form: Form, place: Workplace, body: BodyReader) -> UploadNames:
    """Write the form's files under fixed names and return the names."""
    texts: dict[str, str] = {}
    seen: set[str] = set()
    while (part := await form.next()) is not None:
        field = _target(part)
        if field in seen:
            raise BadRequest(f"'{field}' is in the form twice.", param=field)
        seen.add(field)
        if field in TEXTS:
            texts[field] = await _read_text(form, field)
        else:
            await _save(form, place, body, ARCHIVE if field == "file" else field)
    if "name" not in texts:
        raise BadRequest("Expected the form field 'name': the adapter's name.", param="name")
    if "file" in seen:
        if seen & set(FILES):
            raise BadRequest("Expected either one archive as 'file' or the two files, not both.", param="file")
        return UploadNames(**texts)
    for file in FILES:
        if file not in seen:
            raise BadRequest(f"Expected the file {file} in the upload.", param=file)
    return UploadNames(**texts)


def _target(part: FormPart) -> str:
    """Return a part's fixed file name: its field, or its own file name if that is one of the adapter's files."""
    if part.name in FIELDS:
        return part.filename if part.name == "file" and part.filename in FILES else part.name
    if part.filename in FILES:
        return part.filename
    shown = escaped(part.name, 64)
    raise BadRequest(f"Unknown form field '{shown}'; expected: {', '.join(FIELDS)}.", param=shown)


async def _read_text(form: Form, field: str) -> str:
    content = bytearray()
    while piece := await form.read():
        content += piece
        if len(content) > MAX_NAME_BYTES:
            raise BadRequest(f"The field '{field}' is too long.", param=field)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"Expected the field '{field}' as UTF-8 text.", param=field) from error


async def _save(form: Form, place: Workplace, body: BodyReader, name: str) -> None:
    pending = bytearray()
    file = await place.in_thread(place.create, name)
    try:
        while piece := await form.read():
            pending += piece
            if len(pending) >= WRITE_BYTES:
                await body.write(place, file.write, bytes(pending))
                pending.clear()
        await body.write(place, file.write, bytes(pending))
    finally:
        await place.in_thread(file.close)
