"""`Idempotency-Key`: a POST that is repeated because its response was lost gets that response and has no effect.

Redis keeps responses for a day, separately for each API key, but only the newest ones of a tenant. Only successes are
kept, so a failed request may be repeated. Work that has begun runs to its end even if the client leaves.
"""

import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.access.auth import Authenticator
from gateway.api.requests.fields import read_raw
from gateway.errors import BadRequest, GatewayError, Handler, Unavailable
from gateway.process.background import run_to_end
from gateway.process.loop_lag import deadline
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import idempotency_key, idempotency_names_key

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
KEEP_SECONDS = 24 * 3600
# Kept responses of a tenant; the oldest make room for new ones. They bound its memory in Redis, which also holds the
# limits: a response to an upload takes 1.1 KB with its name, and the default limits allow 86,400 uploads a day.
MAX_OF_TENANT = 1000
# A request whose gateway died while it ran may be repeated after this time.
RUNNING_SECONDS = 600
# Removed from kept responses: an API key is shown once, in the response that creates it, and never stored in the clear.
SECRET_FIELDS = ("key",)

_KEY = re.compile(r"[\x20-\x7e]{1,255}")
# Paths of the admin API whose responses this middleware does not store: uploads whose content is not in the request,
# and answers of models, for which `/v1` has no Idempotency-Key either.
_NOT_KEPT = re.compile(r"/adapter-imports$|/adapter-uploads/[^/]+/complete$|/completions$")


class InProgress(GatewayError):
    status, kind, code = 409, "invalid_request_error", "idempotency_in_progress"


class KeyReused(GatewayError):
    status, kind, code = 422, "invalid_request_error", "idempotency_key_reused"


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its response, as kept. content: the hash of the request. status: 0 while the request runs."""

    content: str
    status: int = 0
    body: str = ""


class Idempotency:
    """Responses kept by `Idempotency-Key`. Requests without the header need no Redis.

    Raises BadRequest, InProgress, KeyReused, and Unavailable without Redis.
    """

    def __init__(self, redis: Any, timeout: float) -> None:
        self._redis = redis
        self._timeout = timeout

    async def once(
        self,
        request: web.Request,
        actor: str,
        content: bytes,
        do: Callable[[], Awaitable[web.Response]],
        tenant_id: str | None = None,
    ) -> web.Response:
        """Return the response of `do`, or the kept one. actor: the API key's id. content: identifies the request.

        tenant_id: the tenant whose key it is; None for an operator's, whose responses all stay for a day.
        """
        if HEADER not in request.headers:
            return await do()
        # From the entry on, which nobody else would remove.
        return await run_to_end(self._once(_name(request, actor), _asked(request, content), do, tenant_id))

    async def kept(self, request: web.Request, actor: str, content: bytes) -> web.Response | None:
        """Return the kept response of a request, None without one. Arguments and errors are those of `once`."""
        if HEADER not in request.headers:
            return None
        stored = await self._call(self._redis.get(_name(request, actor)))
        return _stored_response(msgspec.json.decode(stored, type=_Entry), _asked(request, content)) if stored else None

    def for_admin_calls(self, auth: Authenticator) -> Middleware:
        """Return the middleware for the admin API's JSON calls, except uploads, which call `once`, and completions."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_call = request.method == "POST" and request.path.startswith("/admin/api/")
            is_form = request.content_type.startswith("multipart/")
            if not is_call or is_form or _NOT_KEPT.search(request.path) or HEADER not in request.headers:
                return await handler(request)
            actor = (await auth.admin(request.headers.get("Authorization"))).key_id
            content = await read_raw(request)

            async def do() -> web.Response:
                response = await handler(request)
                assert isinstance(response, web.Response)
                return response

            return await self.once(request, actor, content, do)

        return middleware

    async def _once(
        self, name: str, asked: str, do: Callable[[], Awaitable[web.Response]], tenant_id: str | None
    ) -> web.Response:
        begun = _Entry(content=asked)
        if await self._call(self._redis.set(name, msgspec.json.encode(begun), nx=True, ex=RUNNING_SECONDS)):
            return await self._do(name, asked, do, tenant_id)
        stored = await self._call(self._redis.get(name))
        return _stored_response(msgspec.json.decode(stored, type=_Entry) if stored else begun, asked)

    async def _do(
        self, name: str, asked: str, do: Callable[[], Awaitable[web.Response]], tenant_id: str | None
    ) -> web.Response:
        try:
            response = await do()
        except BaseException:
            await self._keep(self._call(self._redis.delete(name)))
            raise
        assert isinstance(response.body, bytes)
        entry = _Entry(content=asked, status=response.status, body=_without_secrets(response.body))
        await self._keep(self._store(name, entry, tenant_id))
        return response

    async def _store(self, name: str, entry: _Entry, tenant_id: str | None) -> None:
        """Store a response. Raises Unavailable."""
        now = time.time()
        # First: without it, a repeated request is done again, while a response that is not counted only takes memory.
        await self._call(self._redis.set(name, msgspec.json.encode(entry), ex=KEEP_SECONDS))
        if tenant_id is not None:
            await self._make_room(name, tenant_id, now)

    async def _make_room(self, name: str, tenant_id: str, now: float) -> None:
        """Add a response's name to those of its tenant, and delete the tenant's oldest responses beyond the limit.

        now: a time before the response was stored, so that its name expires before it. Raises Unavailable.
        """
        names = idempotency_names_key(tenant_id)
        # An expired response may have been replaced by a request that runs now, which must not be deleted.
        await self._call(self._redis.zremrangebyscore(names, 0, now - KEEP_SECONDS))
        await self._call(self._redis.zadd(names, {name: now}))
        await self._call(self._redis.expire(names, KEEP_SECONDS))
        # The names go last, so that a failure leaves no response uncounted.
        if oldest := await self._call(self._redis.zrange(names, 0, -MAX_OF_TENANT - 1)):
            await self._call(self._redis.delete(*oldest))
            await self._call(self._redis.zrem(names, *oldest))

    async def _keep(self, call: Awaitable[Any]) -> None:
        """Await writes to Redis. A failure is only logged, because the request's work is already done.

        If the response could not be stored, a repeated request is refused as InProgress for RUNNING_SECONDS.
        """
        try:
            await call
        except Unavailable:
            log.warning("an answer could not be kept for its Idempotency-Key")

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            async with deadline(self._timeout):
                return await call
        except REDIS_ERRORS as error:
            raise Unavailable(f"{HEADER} needs Redis, which is unavailable; try again shortly.") from error


def _name(request: web.Request, actor: str) -> str:
    """Return the entry's key in Redis. Raises BadRequest for a malformed header."""
    given = request.headers[HEADER]
    if not _KEY.fullmatch(given):
        raise BadRequest(f"Expected {HEADER} of 1 to 255 printable ASCII characters.", param=HEADER)
    return idempotency_key(_hashed(actor, given))


def _asked(request: web.Request, content: bytes) -> str:
    return _hashed(request.method, request.rel_url.raw_path_qs, content.hex())


def _stored_response(entry: _Entry, asked: str) -> web.Response:
    """Return the kept response. Raises KeyReused, and InProgress while the request runs."""
    if entry.content != asked:
        raise KeyReused(f"This {HEADER} was used for another request.", param=HEADER)
    if not entry.status:
        message = f"A request with this {HEADER} is in progress; try again shortly."
        raise InProgress(message, headers={"Retry-After": "1"})
    return web.Response(
        text=entry.body, status=entry.status, content_type="application/json", headers={REPLAYED: "true"}
    )


def _without_secrets(body: bytes) -> str:
    answer = msgspec.json.decode(body)
    for field in SECRET_FIELDS:
        if field in answer:
            answer[field] = None
    return msgspec.json.encode(answer).decode()


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
