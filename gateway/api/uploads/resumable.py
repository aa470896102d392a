"""`/v1/adapter-uploads`: uploads of an adapter's archive in parts. A broken upload continues at any gateway."""

import asyncio
import hashlib
import re
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from adapters.check import ARCHIVE
from adapters.manifest import AdapterError
from adapters.store import AdapterStore
from gateway.access.auth import Authenticator
from gateway.api.adapters.caller import AdapterCaller, find_caller
from gateway.api.adapters.handlers import AdapterIntake, storing
from gateway.api.requests.fields import json_response
from gateway.api.uploads.copying import until_stopped
from gateway.api.uploads.receiving import WRITE_BYTES, BodyReader, UploadNames, UploadRules, Workplace, too_large
from gateway.errors import BadRequest, CheckFailed, RecordNotFound, TooLarge, WrongOffset
from gateway.process.background import run_to_end
from gateway.process.reads import large_reads
from gateway.quota.quota import Quota
from gateway.quota.uploading import ReceivedBytes
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.uploads import PartialUpload, Uploads
from gateway.records.tenants.tenants import Tenants

# Minimum and maximum size of a part; the last part may be smaller. The minimum bounds the number of parts.
MIN_PART_BYTES, MAX_PART_BYTES = 1 << 20, 64 << 20
# Age at which parts without an upload on record are removed. Their upload ended while they arrived.
ORPHAN_SECONDS = 2 * 3600.0
_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,15}")


class ShownUpload(Struct, frozen=True, kw_only=True):
    """An unfinished upload. size, received: bytes of the archive, and those that have arrived."""

    object: Literal["adapter.upload"] = "adapter.upload"
    id: str
    name: str
    size: int
    sha256: str
    received: int
    expires_at: datetime


class BaseLimits(Struct, frozen=True, kw_only=True):
    """Present limit of a base model's engines. max_rank: the largest rank of an adapter."""

    base: str
    max_rank: int


class UploadLimits(Struct, frozen=True, kw_only=True):
    """Limits of an upload. max_bytes: the size of all files, or of the archive."""

    object: Literal["adapter.upload_limits"] = "adapter.upload_limits"
    max_bytes: int
    data: list[BaseLimits]


class DeletedUpload(Struct, frozen=True, kw_only=True):
    object: Literal["adapter.upload"] = "adapter.upload"
    id: str
    deleted: bool = True


class ResumableUploads:
    """Routes of uploads in parts: for a tenant itself, and for operators under `/admin/api/tenants/{tenant}`."""

    def __init__(
        self,
        *,
        auth: Authenticator,
        tenants: Tenants,
        catalog: Catalog,
        uploads: Uploads,
        store: AdapterStore,
        intake: AdapterIntake,
        quota: Quota,
        rules: UploadRules,
    ) -> None:
        self._auth = auth
        self._tenants = tenants
        self._catalog = catalog
        self._uploads = uploads
        self._store = store
        self._intake = intake
        self._quota = quota
        self._rules = rules

    async def limits(self, request: web.Request) -> web.Response:
        """Return the limits, so that a client need not send an adapter that would be refused."""
        caller = await find_caller(request, self._tenants)
        found = [BaseLimits(base=base, max_rank=each.max_rank) for base, each in self._intake.limits(caller)]
        return json_response(UploadLimits(max_bytes=self._rules.max_bytes, data=found))

    async def begin(self, request: web.Request) -> web.Response:
        """Begin an upload, or find the unfinished one of the same name and content."""
        caller = await find_caller(request, self._tenants)
        name, size, sha256 = _text(request, "name"), _number(request, "size"), _checksum(request)
        self._catalog.check_name(name)
        caller.check_name(name)
        if not 0 < size <= self._rules.max_bytes:
            raise too_large(self._rules.max_bytes) if size else BadRequest("size: expected 1 or more.", param="size")
        await caller.count_change(request, self._quota)
        return json_response(_describe(await self._uploads.begin(caller.tenant, name, size, sha256)), status=201)

    async def get(self, request: web.Request) -> web.Response:
        _, upload = await self._find(request)
        return json_response(_describe(upload))

    async def put(self, request: web.Request) -> web.Response:
        """Receive the part that starts at `offset`. The part counts as a whole or not at all."""
        caller, upload = await self._find(request)
        start, sha256 = _number(request, "offset"), _checksum(request)
        if start != upload.received:
            raise WrongOffset(upload.received)
        left = upload.num_bytes - start
        most = min(left, MAX_PART_BYTES)
        uploading = partial(caller.uploading, request, self._auth, self._quota, most=most, is_change=False)
        async with uploading(size=request.content_length) as received, self._place(caller.owner) as place:
            size = await self._receive(request, place, most, sha256, received)
            if size < min(left, MIN_PART_BYTES):
                raise BadRequest(f"Expected a part of at least {MIN_PART_BYTES} bytes, or the rest of the upload.")
            # Runs to its end even if the client disconnects, so that a saved part is either recorded or removed.
            upload = await place.finish(self._add_part(caller, upload.id, start, size, place))
        return json_response(_describe(upload))

    async def complete(self, request: web.Request) -> web.Response:
        """Check the archive, add the version and return 201.

        An upload whose content is refused is removed; after any other error it stays. A request that is repeated with
        its Idempotency-Key gets the kept answer, although the upload is removed.
        """
        caller, upload_id = await find_caller(request, self._tenants), request.match_info["id"]
        if (kept := await self._intake.kept(request, caller.actor, upload_id.encode())) is not None:
            if await self._uploads.known([upload_id]):
                # Its gateway died after the completion.
                await self._remove(caller, upload_id)
            return kept
        caller, upload = await self._find(request)
        if upload.received < upload.num_bytes:
            raise WrongOffset(upload.received)
        parts = await self._uploads.parts(upload.id)

        base = request.query.get("base")
        self._intake.candidates(caller, base)

        async def receive(place: Workplace) -> UploadNames:
            join = partial(self._assemble, place, upload.id, parts)
            # The joined bytes count too: an upload that cannot be stored now may be completed again and again.
            await received.add(upload.num_bytes)
            found = await self._intake.copies.run(place, caller.owner, join)
            if found != upload.sha256:
                raise BadRequest("The upload's content has another SHA-256 than declared.", param="sha256")
            return UploadNames(upload.name, base)

        take, size = self._intake.take, upload.num_bytes
        async with caller.uploading(request, self._auth, self._quota, size=size, most=size) as received:
            await self._catalog.check_declared(caller.tenant, upload.num_bytes, upload.id)
            try:
                return await take(request, caller, receive, upload.id, partial(self._remove, caller, upload.id))
            except (AdapterError, BadRequest, CheckFailed, TooLarge):
                await self._remove(caller, upload.id)
                raise

    async def abort(self, request: web.Request) -> web.Response:
        caller, upload = await self._find(request)
        await self._remove(caller, upload.id)
        return json_response(DeletedUpload(id=upload.id))

    async def sweep(self) -> int:
        """Remove expired uploads, and parts without an upload on record. Returns the number of uploads."""
        gone = set(await self._uploads.remove_expired())
        latest = time.time() - ORPHAN_SECONDS
        listed = await asyncio.to_thread(lambda: [each for each, at in self._store.upload_parts.list() if at <= latest])
        for start in range(0, len(listed), 200):
            some = listed[start : start + 200]
            gone |= set(some) - await self._uploads.known(some)
        for upload_id in gone:
            await asyncio.to_thread(self._store.upload_parts.remove_upload, upload_id)
        return len(gone)

    async def _find(self, request: web.Request) -> tuple[AdapterCaller, PartialUpload]:
        caller, upload_id = await find_caller(request, self._tenants), request.match_info["id"]
        upload = await self._uploads.get(caller.tenant, upload_id if _ID.fullmatch(upload_id) else "")
        caller.check_name(upload.name)
        return caller, upload

    @asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[Workplace]:
        """Open a folder for a part. Raises BodyTimeout, Unavailable."""
        with storing(self._rules.seconds):
            opening = Workplace.open(self._store.spool(), owner, self._intake.disk_calls)
            async with asyncio.timeout(self._rules.seconds), opening as place:
                yield place

    async def _add_part(
        self, caller: AdapterCaller, upload_id: str, start: int, size: int, place: Workplace
    ) -> PartialUpload:
        part_id, in_thread = uuid.uuid4().hex, partial(self._intake.store_calls.run, caller.owner)
        try:
            await in_thread(self._store.upload_parts.save, upload_id, part_id, place.folder / "part")
            return await self._uploads.add_part(caller.tenant, upload_id, start, size, part_id)
        except (WrongOffset, RecordNotFound):
            # After any other error the part may be on record, because the answer to a commit can be lost.
            await in_thread(self._store.upload_parts.remove, upload_id, part_id)
            raise

    async def _receive(
        self, request: web.Request, place: Workplace, max_bytes: int, sha256: str, received: ReceivedBytes
    ) -> int:
        """Write the body into the file `part` and return its size.

        Raises TooLarge, BadRequest, BodyTimeout, RateLimited.
        """
        if request.content_length is not None and request.content_length > max_bytes:
            raise TooLarge(f"Expected a part of at most {max_bytes} bytes.")
        rules = msgspec.structs.replace(self._rules, max_bytes=max_bytes)
        body, found = BodyReader(request, rules, received), hashlib.sha256()
        file = await place.in_thread(place.create, "part")
        pending, size = bytearray(), 0

        def write(content: bytes) -> None:
            found.update(content)
            file.write(content)

        with large_reads(request):
            while piece := await body.read():
                pending += piece
                size += len(piece)
                if len(pending) >= WRITE_BYTES:
                    await body.write(place, write, bytes(pending))
                    pending.clear()
        await body.write(place, write, bytes(pending))
        await place.in_thread(file.close)
        if found.hexdigest() != sha256:
            raise BadRequest("The part has another SHA-256 than declared; send it again.", param="sha256")
        return size

    def _assemble(self, place: Workplace, upload_id: str, parts: Sequence[str], stop: threading.Event) -> str:
        """Join the parts in the file of the archive and return its SHA-256. Blocks, until `stop` is set.

        Raises BadRequest for a missing part.
        """
        found = hashlib.sha256()
        with place.create(ARCHIVE) as file:
            try:
                for part_id in parts:
                    for piece in until_stopped(self._store.upload_parts.read(upload_id, part_id), stop):
                        found.update(piece)
                        file.write(piece)
            except FileNotFoundError as error:
                raise BadRequest("A part of the upload is lost; begin the upload again.", param="id") from error
        return found.hexdigest()

    async def _remove(self, caller: AdapterCaller, upload_id: str) -> None:
        """Remove the upload and its parts, even if the client leaves meanwhile."""

        async def remove() -> None:
            await self._uploads.remove(upload_id)
            await self._intake.store_calls.run(caller.owner, self._store.upload_parts.remove_upload, upload_id)

        await run_to_end(remove())


def _describe(upload: PartialUpload) -> ShownUpload:
    return ShownUpload(
        id=upload.id,
        name=upload.name,
        size=upload.num_bytes,
        sha256=upload.sha256,
        received=upload.received,
        expires_at=upload.expires_at,
    )


def _text(request: web.Request, name: str) -> str:
    given = request.query.get(name)
    if given is None:
        raise BadRequest(f"Expected the query parameter '{name}'.", param=name)
    return given


def _number(request: web.Request, name: str) -> int:
    if not _NUMBER.fullmatch(given := _text(request, name)):
        raise BadRequest(f"{name}: expected a number of bytes.", param=name)
    return int(given)


def _checksum(request: web.Request) -> str:
    if not _SHA256.fullmatch(given := _text(request, "sha256")):
        raise BadRequest("sha256: expected 64 lower-case hexadecimal digits.", param="sha256")
    return given
