"""Answers to forms as pages with a URL of their own, so that Back and Reload neither fail nor send a form again.

A page that answers a POST (a form with errors, a review, a new key) is kept in Redis, and the browser is redirected to
`/admin/answers/{id}` or `/console/answers/{id}`. Redis holds it encrypted with a key that only the session's token
gives, and a secret is deleted when it is shown. A fault (5xx) and a rate limit (429) keep their status, which metrics
read, and `Retry-After`: their POST is answered with the page itself, as without Redis.
"""

import re
import secrets
import zlib
from collections.abc import Awaitable
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.access.sessions import COOKIE, VISITOR, Visitor
from gateway.access.signed_values import KeyedHash
from gateway.api.page_guard import FORM, NO_STORE, safe_next
from gateway.errors import GatewayError, Handler, Unavailable
from gateway.pages.frame.errors import TEMPORARY
from gateway.pages.frame.frame import HEADERS, SHOWN_ONCE
from gateway.process.loop_lag import deadline
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import form_answers_prefix

KEPT_SECONDS = 3600
# Life of an answer with a secret, which the browser fetches at once.
ONCE_SECONDS = 60
# Places of a tenant, or of an operator; a further answer replaces the oldest one. They bound the memory in Redis, which
# also holds the limits. An answer with a secret has a Redis key of its own instead, so no other answer replaces it.
# After this number of secrets without a pause of ONCE_SECONDS, the next ones are not kept.
PLACES = 16
MAX_BYTES = 128 * 2**10
NONCE_BYTES = 12
ONCE = "once"
NAME = re.compile(rf"([0-9]{{1,2}}|{ONCE})-[0-9a-f]{{32}}")
GONE = (
    "Answers to forms are kept for an hour, and a new secret is shown once, within a minute. If you have not stored a "
    "new secret, make another: rotate the key, or replace the secret."
)


class AnswerGone(GatewayError):
    status, kind, code = 410, "invalid_request_error", "answer_gone"


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """An answer. role, scopes: the visitor's when it was made. once: whether it holds a secret."""

    status: int
    html: str
    role: str
    scopes: list[str]
    once: bool


class FormAnswers:
    """Kept answers. keyed_hash: HMAC of (purpose, text). timeout: seconds of a call to Redis."""

    def __init__(self, redis: Any, timeout: float, keyed_hash: KeyedHash) -> None:
        self._redis = redis
        self._timeout = timeout
        self._keyed_hash = keyed_hash

    def middleware(self) -> Middleware:
        """Return the middleware. Install it outside of `error_pages`, so that errors have a URL too."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            visitor = request.get(VISITOR)
            if visitor is None or FORM not in request or not isinstance(response, web.Response):
                return response
            if response.content_type != "text/html" or 300 <= response.status < 400 or response.status in TEMPORARY:
                return response
            try:
                where = await self._keep(request, visitor, response)
            except Unavailable:
                return response
            return response if where is None else web.Response(status=303, headers={"Location": where, **NO_STORE})

        return middleware

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Return a kept answer. Without it, go back to the form's page, or raise AnswerGone."""
        visitor = request[VISITOR]
        if request.method == "HEAD":
            return web.Response(headers=HEADERS)
        kept = await self._read(request, visitor, request.match_info["id"])
        if kept is not None:
            return web.Response(text=kept.html, status=kept.status, content_type="text/html", headers=HEADERS)
        form = request.query.get("form", "")
        if form and safe_next(form, visitor.home) == form:
            raise web.HTTPSeeOther(form, headers=NO_STORE)
        raise AnswerGone(GONE)

    async def _keep(self, request: web.Request, visitor: Visitor, response: web.Response) -> str | None:
        """Keep an answer and return its path; None if it is too large or a secret too many. Raises Unavailable."""
        assert response.text is not None
        once = SHOWN_ONCE in response
        kept = _Kept(response.status, response.text, visitor.role, sorted(visitor.scopes), once)
        # Compression and encryption together take less than 2 ms for the largest page.
        content = zlib.compress(msgspec.msgpack.encode(kept), 1)
        if len(content) > MAX_BYTES:
            return None
        owner = self._owner(visitor)
        counter, seconds = (f"{owner}:secrets", ONCE_SECONDS) if once else (f"{owner}:next", KEPT_SECONDS)
        number = await self._call(self._redis.incr(counter))
        await self._call(self._redis.expire(counter, seconds))
        if once and number > PLACES:
            return None
        name = f"{ONCE if once else number % PLACES}-{secrets.token_hex(16)}"
        nonce = secrets.token_bytes(NONCE_BYTES)
        encrypted = nonce + self._cipher(request).encrypt(nonce, content, name.encode())
        await self._call(self._redis.set(_key(owner, name), encrypted, ex=seconds))
        form = "" if once else _form_of(request, visitor.home)
        return f"{visitor.home}/answers/{name}" + (f"?form={quote(form, safe='/')}" if form else "")

    async def _read(self, request: web.Request, visitor: Visitor, name: str) -> _Kept | None:
        """Return an answer, and delete it if it may be shown once only. Raises Unavailable."""
        if not NAME.fullmatch(name):
            return None
        key = _key(self._owner(visitor), name)
        encrypted = await self._call(self._redis.get(key))
        if encrypted is None:
            return None
        nonce = encrypted[:NONCE_BYTES]
        try:
            content = self._cipher(request).decrypt(nonce, encrypted[NONCE_BYTES:], name.encode())
        except InvalidTag:  # another session's, or a newer answer in this place
            return None
        kept = msgspec.msgpack.decode(zlib.decompress(content), type=_Kept)
        if (kept.role, kept.scopes) != (visitor.role, sorted(visitor.scopes)):
            return None
        # Only the request that deletes the answer shows it, if there are several at once.
        if kept.once and not await self._call(self._redis.delete(key)):
            return None
        return kept

    def _owner(self, visitor: Visitor) -> str:
        """Return the beginning of the keys in Redis. A tenant's people share its places."""
        owner = visitor.subject if visitor.tenant is None else f"tenant {visitor.tenant.id}"
        return form_answers_prefix(self._keyed_hash("form-answers", owner)[:32])

    def _cipher(self, request: web.Request) -> AESGCM:
        return AESGCM(bytes.fromhex(self._keyed_hash("form-answer", request.cookies[COOKIE])))

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            async with deadline(self._timeout):
                return await call
        except REDIS_ERRORS as error:
            raise Unavailable("Redis, which keeps answers to forms, is unavailable; try again shortly.") from error


def _key(owner: str, name: str) -> str:
    """Return an answer's key in Redis: its place, or its whole name if it has a secret."""
    return f"{owner}:{name}" if name.startswith(ONCE) else f"{owner}:{name.partition('-')[0]}"


def _form_of(request: web.Request, home: str) -> str:
    """Return the path of the page with the form that was sent; "" if it is unknown."""
    try:
        parts = urlsplit(request.headers.get("Referer", ""))
    except ValueError:
        return ""
    if parts.path.startswith(f"{home}/answers/"):
        # The page of the form's earlier answer, which names the first page.
        path = parse_qs(parts.query).get("form", [""])[0]
    else:
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return path if path and safe_next(path, home) == path else ""
