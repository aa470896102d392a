"""Each tenant's requests, tokens and concurrency, taken by one atomic Redis script and settled with what was used.

Fails closed: without Redis nothing is admitted (Unavailable). Settling late or never errs against the tenant by at most
its reservation, which the bucket pays back within a minute; a lease that nobody extends expires.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable
from importlib import resources
from typing import Any

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from gateway.errors import BadRequest, RateLimited, Unavailable
from gateway.records.tenants import Tenant

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
SETTLE_TRIES = 4
SETTLE_PAUSE_SECONDS = 0.5
# Stands for "not limited" in the script.
UNLIMITED = 10**12


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What one request took. tokens: prompt and the most it may generate. headers: OpenAI's `x-ratelimit-*`."""

    request_id: str
    tenant: Tenant
    tokens: int
    headers: dict[str, str]


def connect(url: str, timeout: float) -> Redis:
    """A client whose every call ends within about `timeout` seconds. Connects on first use."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=timeout,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        # One more try, at once, for the pooled connection that a restarted server has closed. `acquire` is safe to
        # send twice, `settle` too.
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    )
    return Redis.from_pool(pool)


class Quota:
    """Raises RateLimited (429), BadRequest for what can never pass, Unavailable when Redis is away."""

    def __init__(self, redis: Redis, timeout: float, lease_seconds: float) -> None:
        self._redis = redis
        self._timeout = timeout
        self._lease_ms = int(lease_seconds * 1000)
        source = resources.files("gateway.admission").joinpath("quota.lua").read_text("utf-8")
        self._script = redis.register_script(source)
        # What this process holds and must keep alive, by tenant.
        self._held: dict[str, set[str]] = {}

    async def acquire(self, tenant: Tenant, request_id: str, tokens: int) -> Reservation:
        """Takes one request, `tokens` tokens and one concurrent slot, or nothing at all."""
        limits = tenant.limits
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            raise BadRequest(
                f"This request needs {tokens} tokens (prompt and max_tokens), more than the whole limit of "
                f"{limits.tokens_per_minute} tokens per minute; it can never be admitted. Reduce either.",
                param="max_tokens",
                code="request_exceeds_tokens_per_minute",
            )
        arguments = [
            limits.requests_per_minute or UNLIMITED,
            limits.tokens_per_minute or UNLIMITED,
            limits.max_concurrent or UNLIMITED,
            tokens,
            self._lease_ms,
        ]
        reply = await self._call(tenant.id, "acquire", request_id, *arguments)
        allowed, requests_wait, tokens_wait, lease_wait, *state = reply
        headers = _headers(tenant, *state)
        if not allowed:
            waits = {"requests": requests_wait, "tokens": tokens_wait, "concurrency": lease_wait}
            raise _refusal(tenant, waits, headers)
        self._held.setdefault(tenant.id, set()).add(request_id)
        return Reservation(request_id=request_id, tenant=tenant, tokens=tokens, headers=headers)

    async def settle(self, reservation: Reservation, used: int, *, counts: bool = True) -> None:
        """Gives back what was not used and frees the slot, once however often it is called.

        used: tokens. counts: False gives the request itself back as well.

        Raises Unavailable after SETTLE_TRIES tries.
        """
        tenant = reservation.tenant
        held = self._held.get(tenant.id, set())
        held.discard(reservation.request_id)
        if not held:
            self._held.pop(tenant.id, None)
        limits = tenant.limits
        arguments = (
            reservation.request_id,
            limits.requests_per_minute or UNLIMITED,
            limits.tokens_per_minute or UNLIMITED,
            reservation.tokens,
            used,
            int(counts),
        )
        for left in reversed(range(SETTLE_TRIES)):
            try:
                await self._call(tenant.id, "settle", *arguments)
                return
            except Unavailable:
                if left == 0:
                    raise
                await asyncio.sleep(SETTLE_PAUSE_SECONDS)

    async def keep_leases(self) -> None:
        """Extends what this process holds, for ever. Run it as a task."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            for tenant_id, ids in list(self._held.items()):
                try:
                    await self._call(tenant_id, "extend", self._lease_ms, *list(ids))
                except Unavailable:
                    # The requests go on; if Redis stays away their slots expire, and no new ones are given out.
                    log.warning("leases of %d running requests could not be extended", len(ids))

    async def ping(self) -> None:
        """Raises Unavailable if Redis does not answer in time."""
        await self._within_deadline(self._redis.ping())

    async def _call(self, tenant_id: str, *arguments: Any) -> Any:
        # The hash tag keeps a tenant's keys on one shard of a cluster, where one script may see them all.
        keys = [f"loraplex:{{{tenant_id}}}:{part}" for part in ("requests", "tokens", "leases")]
        return await self._within_deadline(self._script(keys=keys, args=arguments))

    async def _within_deadline(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("redis: %s", type(error).__name__)
            raise Unavailable("The quota store is unavailable; try again shortly.", code="quota_unavailable") from error


def _refusal(tenant: Tenant, waits: dict[str, int], headers: dict[str, str]) -> RateLimited:
    """waits: milliseconds by limit, 0 where that limit would have let the request through."""
    limit = max(waits, key=lambda name: waits[name])
    allowance = {
        "requests": f"{tenant.limits.requests_per_minute} requests per minute",
        "tokens": f"{tenant.limits.tokens_per_minute} tokens per minute",
        "concurrency": f"{tenant.limits.max_concurrent} concurrent requests",
    }[limit]
    seconds = math.ceil(waits[limit] / 1000)
    return RateLimited(
        f"Rate limit reached: {allowance}. Try again in {seconds} s.",
        limit=limit,
        headers={**headers, "Retry-After": str(seconds), "retry-after-ms": str(waits[limit])},
    )


def _headers(
    tenant: Tenant, requests_left: int, requests_reset: int, tokens_left: int, tokens_reset: int
) -> dict[str, str]:
    return {
        "x-ratelimit-limit-requests": str(tenant.limits.requests_per_minute),
        "x-ratelimit-limit-tokens": str(tenant.limits.tokens_per_minute),
        "x-ratelimit-remaining-requests": str(requests_left),
        "x-ratelimit-remaining-tokens": str(tokens_left),
        "x-ratelimit-reset-requests": format_duration(requests_reset),
        "x-ratelimit-reset-tokens": format_duration(tokens_reset),
    }


def format_duration(milliseconds: int) -> str:
    """As OpenAI's headers write it: `6m0s`, `1.2s`, `12ms`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
