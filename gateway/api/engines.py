"""`/internal/engines`: engines announce and withdraw themselves, with the internal token or the announce token."""

import hmac
from typing import Annotated

import msgspec
from aiohttp import web

from gateway.api.requests.fields import read_body
from gateway.errors import BadRequest, InvalidKey, RecordNotFound, Unavailable, WrongKey
from gateway.fleet.discovery.addresses import ANNOUNCED, parse_address
from gateway.fleet.discovery.discovery import Announcements
from gateway.redis.errors import REDIS_ERRORS
from wire.headers import ANNOUNCE_TOKEN_HEADER, INTERNAL_TOKEN_HEADER


class Announcement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of both routes. url: as in LORAPLEX_ENGINES; every gateway must be able to reach the engine there."""

    url: Annotated[str, msgspec.Meta(max_length=512)]


class Engines:
    """Routes for announcements. An announced engine receives every tenant's prompts, so the token gives access to all.

    announcements: None if LORAPLEX_ENGINES does not allow them. announce_token: None means the internal token.
    """

    def __init__(self, announcements: Announcements | None, internal_token: str, announce_token: str | None) -> None:
        self._announcements = announcements
        self._header = ANNOUNCE_TOKEN_HEADER if announce_token else INTERNAL_TOKEN_HEADER
        self._token = (announce_token or internal_token).encode()

    async def announce(self, request: web.Request) -> web.Response:
        announcements, url = await self._read(request)
        try:
            await announcements.announce(url)
        except REDIS_ERRORS as error:
            raise Unavailable("The announcement cannot be stored now; try again shortly.") from error
        return web.Response(status=204)

    async def withdraw(self, request: web.Request) -> web.Response:
        announcements, url = await self._read(request)
        try:
            await announcements.withdraw(url)
        except REDIS_ERRORS as error:
            raise Unavailable("The announcement cannot be withdrawn now; try again shortly.") from error
        return web.Response(status=204)

    async def _read(self, request: web.Request) -> tuple[Announcements, str]:
        given = request.headers.get(self._header, "")
        # aiohttp decodes header bytes that are not UTF-8 as surrogates.
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token):
            if not given:
                raise InvalidKey(f"{self._header} is missing.", code="invalid_internal_token")
            raise WrongKey(f"{self._header} is wrong.", code="invalid_internal_token")
        if self._announcements is None:
            raise RecordNotFound(f"This gateway accepts no announcements: '{ANNOUNCED}' is not in LORAPLEX_ENGINES.")
        url = (await read_body(request, Announcement)).url
        try:
            if parse_address(url).url.startswith("dns:"):
                raise ValueError("expected one engine, not a dns:// name")
        except ValueError as error:
            raise BadRequest(f"url: {error}.", param="url") from error
        return self._announcements, url
