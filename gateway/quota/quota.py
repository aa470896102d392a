"""Limits of each tenant, key and model: reserved by an atomic Redis script, settled with the real use.

Each reservation has a lease. Its gateway extends it while the request runs and settles it at the end. `expired` lists
the leases of a gateway that died, with the data that another gateway needs to settle them. While Redis is away, each
class of limit has the mode that the operator chose: see `fallback.py`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from gateway.access.auth import TenantPrincipal
from gateway.errors import Unavailable
from gateway.quota.demand import Demand, RequestSize
from gateway.quota.ended_keys import EndedKeys
from gateway.quota.fallback import Check, Mode, parse_fallback
from gateway.quota.holds import Holds
from gateway.quota.late_settlements import LateSettlements
from gateway.quota.lease_notes import read_notes
from gateway.quota.leases import Leases
from gateway.quota.limits import Limit, LimitState, limits_of
from gateway.quota.live_gateways import Presence
from gateway.quota.redis_settings import SettingsCheck
from gateway.quota.refusals import check_possible, rate_headers, refusal
from gateway.quota.remaining_limits import Remaining, read_remaining
from gateway.quota.reservation import ExpiredLease, LeaseEnd, LeaseProgress, Reservation, moment, read_expired
from gateway.quota.store import QuotaStore
from gateway.quota.uploading import NO_BYTES, ReceivedBytes, UploadSize
from gateway.quota.usage_backfill import UNKNOWN, LedgerSums, UsageBackfill
from gateway.quota.without_redis import WithoutRedis, reservation
from gateway.records.adapters.catalog import Model
from gateway.redis import sweeps
from gateway.redis.client import Client
from gateway.redis.keys import LEASE_SWEEPER_KEY, leases_key

log = logging.getLogger(__name__)

CLOSED = parse_fallback(())
# Note of a lease that needs no settlement: its end releases everything that it holds.
EMPTY_NOTE = b""
SETTLE_TRIES = 2
PRESENCE_SECONDS = 2.0
# Maximum number of leases in one listing, and of tenants in one count.
PAGE = 200


class Quota:
    """Quota of all tenants. Raises RateLimited (429), BadRequest for a request that can never be admitted, and
    Unavailable if Redis is away and the class of a limit is closed.
    """

    def __init__(
        self,
        redis: Client,
        timeout: float,
        lease_seconds: float,
        fallback: Mapping[str, Mode] = CLOSED,
        on_admitted_without_redis: Callable[[str], None] = lambda mode: None,
        past: LedgerSums | None = None,
        check: Check = "warn",
    ) -> None:
        """on_admitted_without_redis: called with "open" or "local" for each request that is admitted without Redis.

        past: the ledger's sums, from which budgets and limits of a day are restored if Redis has lost them; None
        without a ledger.
        """
        self._redis = redis
        self._store = QuotaStore(redis, timeout)
        self._check = SettingsCheck(redis, self._store, check)
        self._backfill = UsageBackfill(self._store.script, past)
        self._ended_keys = None if past is None else EndedKeys(redis, self._store, past)
        self._lease_ms = int(lease_seconds * 1000)
        self.fallback = fallback
        self._presence = Presence(redis)
        self._without_redis = WithoutRedis(fallback, lambda: self._presence.count, on_admitted_without_redis)
        self._holds = Holds(self._store.script, self._without_redis)
        self._leases = Leases(self._store, self._lease_ms, self._register)
        self._late_settlements = LateSettlements(self._store)
        self._registered = sweeps.Registrations(redis)
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_closed_without_redis(self) -> bool:
        """Return whether a class of limits is closed while Redis is away, so that most requests are refused."""
        return "closed" in self.fallback.values()

    @property
    def gateways(self) -> int:
        """Return the number of live gateways, including this one, when Redis last answered."""
        return self._presence.count

    @property
    def store_warnings(self) -> str:
        """Return the result of the check of Redis' settings. `/readyz` fails unless it begins with "ok"."""
        return self._check.state

    @property
    def away(self) -> bool:
        """Return whether Redis does not answer."""
        return self._store.away

    @property
    def answers_for(self) -> float:
        """Return the seconds since Redis came back, infinite if it was never away."""
        return self._store.answers_for

    @property
    def in_order(self) -> bool:
        """Return whether Redis runs this process's calls in the order in which they were made."""
        return self._store.in_order

    async def acquire(
        self,
        principal: TenantPrincipal,
        model: Model | str,
        request_id: str,
        size: RequestSize,
        note: Mapping[str, Any] | None = None,
    ) -> Reservation:
        """Reserve a request on every limit of the tenant, the key and the model, or on none.

        model: see `limits_of`. note: the data with which another gateway settles the request if this one dies.
        """
        tenant, limits = principal.tenant, limits_of(principal, model)
        demand = Demand(
            tenant_id=tenant.id,
            request_id=request_id,
            prompt_tokens=size.prompt_tokens,
            max_tokens=size.max_tokens,
            choices=size.choices,
            step=size.choices if tenant.on_token_limit == "shorten" else max(1, size.max_tokens * size.choices),
            price=size.price,
            currency=size.currency,
            by_default=size.by_default,
            expected=self._holds.expected(tenant.id, model, size.max_tokens, size.choices) if size.grows else None,
        )
        check_possible(limits, demand)
        return await self._take(limits, demand.within(limits), msgspec.json.encode(note or {}), model)

    async def peek(self, principal: TenantPrincipal) -> list[Remaining]:
        """Return what remains of the tenant's and the key's limits, without a reservation. Raises Unavailable."""
        return await read_remaining(self._store.script, self._backfill, principal.tenant.id, limits_of(principal, ""))

    @asynccontextmanager
    async def upload(
        self, tenant_id: str, request_id: str, limits: Sequence[Limit], size: UploadSize = NO_BYTES
    ) -> AsyncIterator[ReceivedBytes]:
        """Count a change of the tenant's adapters, and hold a slot and room for an upload's bytes during the block.

        limits: those of `upload_limits`. The block adds the bytes that arrive; only these count. If
        the gateway dies, the slot is released when the lease ends. Raises RateLimited, Unavailable.
        """
        if not limits:
            yield ReceivedBytes(tenant_id)
            return
        taken = await self._take(limits, size.demand(tenant_id, request_id, limits), EMPTY_NOTE)
        received = ReceivedBytes(tenant_id, taken.hold)
        try:
            yield received
        finally:
            # Release the slot before the client reads its answer, even if this task is cancelled.
            ending = asyncio.create_task(self._end(taken, received.total))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def change(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> None:
        """Count a change of the tenant's adapters. Raises RateLimited, Unavailable."""
        async with self.upload(tenant_id, request_id, limits):
            pass

    async def _end(self, taken: Reservation, num_bytes: int) -> None:
        try:
            await self.settle(taken, tokens=num_bytes, cost=0, event=b"")
        except Unavailable:
            log.debug("the upload slot of request %s is released when redis is reachable again", taken.request_id)

    async def _take(self, limits: Sequence[Limit], demand: Demand, note: bytes, model: Model | str = "") -> Reservation:
        tenant_id, request_id, price = demand.tenant_id, demand.request_id, demand.price
        tokens = (demand.prompt_tokens, demand.completion, demand.first_completion, demand.step)
        request = (*tokens, price.highest_input, price.output)
        arguments = [item for limit in limits for item in (limit.field, limit.value)]
        sent = not self._store.away
        try:
            if self._registered.is_due(tenant_id, self._store.answers_since):
                await self._register({tenant_id})
            call = ("acquire", request_id, self._lease_ms, *request, note, *arguments)
            reply = await self._store.script(tenant_id, *call)
            if reply[0] == UNKNOWN:
                reply = await self._backfill.acquire(tenant_id, limits, call, reply)
        except Unavailable:
            if sent:
                self._late_settlements.add(tenant_id, request_id)
            if self._without_redis.refuses(limits):
                raise
            shares = self._without_redis.shares(tenant_id, limits)
            demand = demand.within(shares)
            return self._holds.attach(self._without_redis.acquire(shares, demand), demand, model, limits)
        except asyncio.CancelledError:
            # The client left, but the script may have run.
            self._late_settlements.add(tenant_id, request_id)
            raise
        allowed, granted, now, *flat = reply
        end = 4 * len(limits)
        states = [LimitState(*flat[i : i + 4]) for i in range(0, end, 4)]
        for i in range(end, len(flat), 2):
            self._backfill.reload(tenant_id, limits[flat[i]], flat[i + 1])
        self._without_redis.remember_budgets(tenant_id, limits, states)
        headers = rate_headers(limits, states, demand.currency)
        if not allowed:
            raise refusal(limits, states, demand, headers)
        taken = self._holds.attach(reservation(demand, granted, headers, moment(now)), demand, model, limits)
        self._leases.add(taken, limits, note)
        return taken

    def progress(
        self,
        reservation: Reservation,
        engine_url: str,
        prompt_tokens: int,
        completion_tokens: int,
        *,
        is_free: bool = False,
        end: LeaseEnd | None = None,
    ) -> None:
        """Record progress for the lease's next extension. Raises Unavailable if another gateway settled the request."""
        self._leases.progress(reservation, LeaseProgress(engine_url, prompt_tokens, completion_tokens, is_free, end))

    def runs(self, reservation: Reservation) -> bool:
        """Return whether this process runs the request and will settle it."""
        return self._leases.has(reservation.tenant_id, reservation.request_id)

    async def settle(
        self,
        reservation: Reservation,
        *,
        tokens: int,
        cost: int,
        event: bytes,
        counts: bool = True,
        is_abandoned: bool = False,
    ) -> bytes | None:
        """Release the hold, correct every limit to the real use, and add `event` to the tenant's stream, in one step.

        Repeated calls settle once. tokens: prompt and completion. cost: in micro-units. counts: False if the request
        itself does not count against request rates. is_abandoned: True if another gateway had the request; nothing
        happens if it has extended the lease again.

        Returns the event's id in the stream, or None if Redis holds no lease of this id, because it was settled before,
        was admitted without Redis, or was lost by Redis. In that case nothing was added, and the caller must keep the
        event. Raises Unavailable; the caller must then keep the event too, and the limits are corrected when Redis is
        back.
        """
        tenant_id, request_id = reservation.tenant_id, reservation.request_id
        has_lease = self._leases.has(tenant_id, request_id)
        self._leases.remove(tenant_id, request_id)
        if reservation.hold is not None:
            reservation.hold.ended(tokens)
        self._without_redis.settle(tenant_id, request_id, tokens, cost, counts=counts)
        arguments = ("settle", request_id, tokens, cost, int(counts), event, int(is_abandoned))
        for left in reversed(range(SETTLE_TRIES)):
            try:
                return await self._store.script(tenant_id, *arguments)
            except Unavailable:
                if left == 0 or self._store.away:
                    if has_lease:
                        self._late_settlements.add(tenant_id, request_id, (tokens, cost, int(counts)))
                    raise
        raise AssertionError("unreachable")

    async def release(self, reservation: Reservation) -> None:
        """Release a reservation whose request was not served: nothing counts, and no event is added to the stream."""
        try:
            await self.settle(reservation, tokens=0, cost=0, event=b"", counts=False)
        except Unavailable:
            log.debug("the reservation of request %s is released when redis is reachable again", reservation.request_id)

    async def hand_over(self, reservation: Reservation) -> bool:
        """Send a request's progress to Redis and hand its settlement over to the sweep for dead gateways.

        Returns False if the request was admitted without Redis, so that there is no lease to hand over. Raises
        Unavailable; the settlement then stays with this process.
        """
        tenant_id, request_id = reservation.tenant_id, reservation.request_id
        if not self._leases.has(tenant_id, request_id):
            return False
        await self._leases.extend(tenant_id)
        self._leases.remove(tenant_id, request_id)
        return True

    async def expired(self, tenant_id: str) -> list[ExpiredLease]:
        """Return up to PAGE leases that have ended and are not settled. Raises Unavailable."""
        reply = await self._store.script(tenant_id, "expired", PAGE)
        return [read_expired(tenant_id, self._lease_ms, *each) for each in reply]

    async def notes(self, tenant_id: str) -> list[dict[str, Any]]:
        """Return the notes of the tenant's running requests, of all gateways. Raises Unavailable."""
        return await self._store.call(lambda: read_notes(self._store.execute, tenant_id))

    async def with_expired(self, tenant_ids: Sequence[str]) -> list[str]:
        """Return those of the tenants that have expired leases. Raises Unavailable."""
        found: list[str] = []
        for start in range(0, len(tenant_ids), PAGE):
            page = tenant_ids[start : start + PAGE]
            counts = await self._store.call(partial(self._count_expired, page))
            # A tenant with an error is included; `expired` raises it.
            found += [tenant_id for tenant_id, count in zip(page, counts, strict=True) if count]
        return found

    async def _count_expired(self, tenant_ids: Sequence[str]) -> list[int | Exception]:
        seconds, microseconds = await self._redis.time()
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in tenant_ids:
            pipeline.zcount(leases_key(tenant_id), "-inf", seconds * 1000 + microseconds // 1000)
        return await pipeline.execute(raise_on_error=False)

    async def is_first(self, seconds: float) -> bool:
        """Return whether this is the first such call of any gateway within `seconds`. Raises Unavailable."""
        return bool(await self._store.call(lambda: sweeps.is_first(self._redis, LEASE_SWEEPER_KEY, seconds)))

    async def keep_leases(self) -> None:
        """Extend this process's leases, retry failed settlements, register this gateway, check Redis' settings, and
        remove the limits of ended keys.

        Run it as a task.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leases.keep_extending())
            group.create_task(self._late_settlements.keep_settling())
            group.create_task(self._keep_present())
            group.create_task(self._check.watch())
            if self._ended_keys is not None:
                group.create_task(self._ended_keys.run())

    async def ping(self) -> None:
        """Raise Unavailable if Redis does not answer in time."""
        await self._store.ping()

    async def close(self) -> None:
        """Stop background work and remove this gateway from the live ones."""
        await self._backfill.close()
        try:
            await self._store.call(self._presence.unregister)
        except Unavailable:
            log.info("redis is unreachable; the registration of this gateway expires in a few seconds")
        await self._store.close()

    async def _register(self, tenant_ids: set[str]) -> None:
        """Register the tenants for the sweeps, so that their requests are settled even if this process dies."""
        ids = list(tenant_ids)
        for start in range(0, len(ids), sweeps.PAGE):
            await self._store.call(partial(self._registered.add, ids[start : start + sweeps.PAGE]))

    async def _keep_present(self) -> None:
        while True:
            try:
                await self._store.call(self._presence.register)
            except Unavailable:
                log.debug("redis is unreachable; the last known number of gateways is %d", self._presence.count)
            await asyncio.sleep(PRESENCE_SECONDS)
