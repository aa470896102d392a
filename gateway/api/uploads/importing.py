"""`/v1/adapter-imports`: imports of adapters from a hub, a bucket or a folder below prefixes that the operator allows.

A client chooses a path below an allowed prefix; it cannot choose a scheme, a host or a redirect target.
Without `LORAPLEX_IMPORT_SOURCES`, every import is refused.
"""

import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
from aiohttp import web

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from adapters.store_s3 import Bucket
from gateway.access.auth import Authenticator
from gateway.api.adapters.caller import find_caller
from gateway.api.adapters.handlers import AdapterIntake
from gateway.api.uploads.copying import until_stopped
from gateway.api.uploads.receiving import UploadNames, UploadRules, Workplace, too_large
from gateway.errors import BadRequest, Forbidden, Unavailable
from gateway.quota.quota import Quota
from gateway.quota.uploading import ReceivedBytes
from gateway.records.adapters.catalog import Catalog
from gateway.records.tenants.tenants import Tenants

log = logging.getLogger(__name__)

FILES = (CONFIG_NAME, WEIGHTS_NAME)
MAX_REDIRECTS = 4
# Hosts to which the public hub redirects downloads of large files.
HUB_HOSTS = ("hf.co", "huggingface.co")
PIECE_BYTES = 1 << 20
_REST = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*){0,15}(?:@[A-Za-z0-9][A-Za-z0-9._-]{0,99})?"
)
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)


class Imports:
    """Routes of imports, for a tenant itself and for operators.

    sources: the allowed prefixes, without a trailing slash, each with its bucket if it is in an S3 service. hub: the
    URL of the hub for `hf://`.
    """

    def __init__(
        self,
        *,
        auth: Authenticator,
        tenants: Tenants,
        catalog: Catalog,
        intake: AdapterIntake,
        quota: Quota,
        rules: UploadRules,
        sources: Mapping[str, Bucket | None],
        hub: str,
    ) -> None:
        self._auth, self._tenants, self._catalog = auth, tenants, catalog
        self._intake, self._quota, self._rules = intake, quota, rules
        self._sources, self._hub = {f"{source}/": bucket for source, bucket in sources.items()}, hub.rstrip("/")

    async def add(self, request: web.Request) -> web.Response:
        """Import an adapter and return 201."""
        caller = await find_caller(request, self._tenants)
        caller.check_name(request.query.get("name", ""))
        copy, most = self._receive(request, caller.owner), self._rules.max_bytes
        self._intake.candidates(caller, request.query.get("base"))
        async with caller.uploading(request, self._auth, self._quota, size=None, most=most) as received:
            receive = partial(copy, received)
            return await self._intake.take(request, caller, receive)

    def _receive(self, request: web.Request, owner: str) -> Any:
        """Return the function that copies the adapter. Raises BadRequest, and Forbidden for any other source.

        owner: the tenant's id or OPERATOR; the owners' copies take turns.
        """
        name, source = request.query.get("name", ""), request.query.get("source", "")
        self._catalog.check_name(name)
        prefix = max((each for each in self._sources if source.startswith(each)), key=len, default=None)
        if prefix is None:
            raise Forbidden(
                "source: expected a path below a prefix of LORAPLEX_IMPORT_SOURCES, which the operator sets, such as "
                "hf://org/repository, s3://bucket/key or file:///folder/adapter.",
                param="source",
                code="import_not_allowed",
            )
        rest = source.removeprefix(prefix)
        if not _REST.fullmatch(rest) or ("@" in rest and not prefix.startswith("hf://")):
            raise BadRequest(
                "source: expected an allowed prefix, then names of letters, digits, '.', '_' and '-', separated by '/'"
                "; only a hub's id may end with '@' and a revision.",
                param="source",
            )

        async def receive(received: ReceivedBytes, place: Workplace) -> UploadNames:
            if prefix.startswith("hf://"):
                await self._from_hub(place, prefix.removeprefix("hf://") + rest, received)
            else:
                bucket = self._sources[prefix]
                read = _objects(bucket, rest) if bucket else _folder(prefix, rest)
                copy = partial(_copy, place.folder, read, self._rules.max_bytes, received)
                await self._intake.copies.run(place, owner, copy)
            return UploadNames(name, request.query.get("base"))

        return receive

    async def _from_hub(self, place: Workplace, repository: str, received: ReceivedBytes) -> None:
        repository, _, revision = repository.partition("@")
        async with aiohttp.ClientSession(timeout=_TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            for name in FILES:
                url = f"{self._hub}/{repository}/resolve/{revision or 'main'}/{name}"
                try:
                    await self._download(session, url, place, name, received)
                except aiohttp.ClientError as error:
                    raise Unavailable("The hub does not answer.", code="import_unavailable") from error

    async def _download(
        self, session: aiohttp.ClientSession, url: str, place: Workplace, name: str, received: ReceivedBytes
    ) -> None:
        for _ in range(MAX_REDIRECTS):
            async with session.get(url, allow_redirects=False) as response:
                if response.status in (301, 302, 303, 307, 308):
                    url = self._redirected(url, response.headers.get("Location", ""))
                    continue
                if response.status >= 500 or response.status == 429:
                    raise Unavailable("The hub does not answer.", code="import_unavailable")
                if response.status != 200:
                    raise _missing(name)
                file = await place.in_thread(place.create, name)
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    await received.add(len(piece))
                    if received.total > self._rules.max_bytes:
                        raise too_large(self._rules.max_bytes)
                    await place.in_thread(file.write, piece)
                await place.in_thread(file.close)
                return
        raise Unavailable("The hub redirects too often.", code="import_unavailable")

    def _redirected(self, url: str, location: str) -> str:
        """Return a redirect's target: the hub's own host, or from the public hub one of its download hosts.

        Raises Unavailable for another host.
        """
        hub, refusal = urlsplit(self._hub), "The hub redirects to another host."
        try:
            target = urlsplit(urljoin(url, location))
            host, port = target.hostname or "", target.port
        except ValueError as error:
            raise Unavailable(refusal, code="import_unavailable") from error
        is_own = (target.scheme, target.netloc) == (hub.scheme, hub.netloc)
        is_hubs = target.scheme == "https" and port in (None, 443)
        is_hubs &= any(host == each or host.endswith(f".{each}") for each in HUB_HOSTS)
        if not is_own and not (is_hubs and hub.hostname in HUB_HOSTS):
            raise Unavailable(refusal, code="import_unavailable")
        return target.geturl()


def _missing(name: str) -> BadRequest:
    return BadRequest(f"There is no readable {name} at the source.", param="source", code="import_not_found")


def _folder(prefix: str, rest: str) -> Callable[[str], Iterator[bytes]]:
    """Return the reader of a folder's files below the prefix. Links are followed only within the prefix."""
    root = Path(unquote(urlsplit(prefix).path)).resolve()

    def read(name: str) -> Iterator[bytes]:
        try:
            path = (root / rest / name).resolve()
            if not path.is_relative_to(root):
                raise _missing(name)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise _missing(name) from error
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _missing(name)
            yield from iter(lambda: file.read(PIECE_BYTES), b"")

    return read


def _objects(bucket: Bucket, rest: str) -> Callable[[str], Iterator[bytes]]:
    """Return the reader of the objects below the bucket's prefix."""
    return lambda name: bucket.read(f"{rest}/{name}")


def _copy(
    folder: Path,
    read: Callable[[str], Iterator[bytes]],
    max_bytes: int,
    received: ReceivedBytes,
    stop: threading.Event,
) -> None:
    """Copy the two files until `stop` is set. Raises TooLarge, BadRequest or Unavailable for the source, OSError for
    the folder.
    """
    for name in FILES:
        with (folder / name).open("xb") as file:
            for piece in until_stopped(_checked(read(name), name), stop):
                received.count(len(piece))
                if received.total > max_bytes:
                    raise too_large(max_bytes)
                file.write(piece)


def _checked(pieces: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield the pieces of a source. Its errors are the import's, not the adapter store's."""
    try:
        yield from pieces
    except FileNotFoundError as error:
        raise _missing(name) from error
    except OSError as error:
        log.warning("a source of imports cannot be read: %s", error.strerror or error)
        raise Unavailable("The source cannot be read.", code="import_unavailable") from error
