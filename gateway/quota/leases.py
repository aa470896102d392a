"""Leases of this process's running requests: extended while the requests run, restored if Redis has lost them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

import msgspec

from gateway.error_codes import QUOTA_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.limits.kinds import TAKES_ONE, WINDOW_BY_LETTER
from gateway.quota.limits import Limit
from gateway.quota.reservation import EPOCH, LeaseProgress, Reservation
from gateway.quota.store import QuotaStore

log = logging.getLogger(__name__)

# Maximum number of leases that one call extends.
PAGE = 200
# Number of tenants whose calls share a round trip.
TENANTS_AT_ONCE = 100
# The script's reply to `restore` if the request is older than the ids that the script keeps of settled requests.
TOO_OLD = -1


class _Lease(msgspec.Struct):
    reservation: Reservation
    limits: Sequence[Limit]
    note: bytes
    progress: LeaseProgress | None = None
    # Whether the log already says that the lease is too old to be restored.
    is_too_old: bool = False


class Leases:
    def __init__(self, store: QuotaStore, lease_ms: int, register: Callable[[set[str]], Awaitable[None]]) -> None:
        """register: registers tenants with leases for the sweeps that settle for dead gateways."""
        self._store = store
        self._lease_ms = lease_ms
        self._register = register
        # Tenant id -> request id -> lease.
        self._leases: dict[str, dict[str, _Lease]] = {}
        # Tenant and request ids of running requests that another gateway has settled.
        self._settled: set[tuple[str, str]] = set()

    def add(self, reservation: Reservation, limits: Sequence[Limit], note: bytes) -> None:
        """Add a lease. limits: all limits of the reservation. note: the data with which another gateway settles it."""
        lease = _Lease(reservation, limits, note)
        self._leases.setdefault(reservation.tenant_id, {})[reservation.request_id] = lease

    def has(self, tenant_id: str, request_id: str) -> bool:
        return request_id in self._leases.get(tenant_id, {})

    def remove(self, tenant_id: str, request_id: str) -> None:
        self._settled.discard((tenant_id, request_id))
        leases = self._leases.get(tenant_id)
        if leases is not None:
            leases.pop(request_id, None)
            if not leases:
                del self._leases[tenant_id]

    def progress(self, reservation: Reservation, progress: LeaseProgress) -> None:
        """Record a request's progress. Raises Unavailable if another gateway has settled the request."""
        if (reservation.tenant_id, reservation.request_id) in self._settled:
            # It has no reservation: nothing would count or limit its further tokens.
            raise Unavailable(
                "The quota store was out of reach for too long; send the request again.", code=QUOTA_UNAVAILABLE
            )
        lease = self._leases.get(reservation.tenant_id, {}).get(reservation.request_id)
        if lease is not None:
            lease.progress = progress

    async def keep_extending(self) -> None:
        """Extend all leases periodically until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            try:
                if self._leases:
                    # Register each time, because Redis may have come back without its data.
                    await self._register(set(self._leases))
                await self.extend_all()
            except Unavailable:
                # The requests continue. If Redis stays away, their leases end and are restored when it is back.
                log.debug("redis is unreachable; the leases of running requests are not extended")

    async def extend_all(self) -> None:
        """Extend the leases of all tenants, TENANTS_AT_ONCE in a round trip. An error of one tenant does not affect
        others.

        Raises Unavailable.
        """
        tenants = list(self._leases)
        for start in range(0, len(tenants), TENANTS_AT_ONCE):
            page = tenants[start : start + TENANTS_AT_ONCE]
            answers = await asyncio.gather(*(self.extend(tenant_id) for tenant_id in page), return_exceptions=True)
            for tenant_id, error in zip(page, answers, strict=True):
                if isinstance(error, Unavailable) and not self._store.away:
                    log.error("leases of tenant %s could not be extended: %s", tenant_id, error.__cause__)
                elif error is not None:
                    raise error

    async def extend(self, tenant_id: str) -> None:
        """Extend a tenant's leases and restore those that Redis has lost. Raises Unavailable."""
        leases = list(self._leases.get(tenant_id, {}).items())
        for start in range(0, len(leases), PAGE):
            page = leases[start : start + PAGE]
            used = {id: each.reservation.hold.pace.delivered for id, each in page if each.reservation.hold is not None}
            items = [
                item
                for id, each in page
                for item in (
                    id,
                    b"" if each.progress is None else msgspec.json.encode(each.progress),
                    used.get(id, b""),
                )
            ]
            answer = await self._store.script(tenant_id, "extend", self._lease_ms, *items)
            for request in page:
                if (hold := request[1].reservation.hold) is not None and request[0].encode() not in answer:
                    hold.charged = max(hold.charged, used[request[0]])
            # A missing lease was lost by Redis, or its request has ended during the call.
            running = self._leases.get(tenant_id, {})
            lost = [each for request_id in answer if (each := running.get(request_id.decode())) is not None]
            await asyncio.gather(*(self._restore(each) for each in lost))

    async def _restore(self, lease: _Lease) -> None:
        """Restore a lease that Redis has lost, with the limits that its settlement corrects.

        Rates of requests are left out, because their state is lost with the lease. If another gateway has settled the
        request while this one could not extend the lease, there is nothing left to restore, and the request's next
        progress ends it.
        """
        reservation = lease.reservation
        tenant_id, request_id = reservation.tenant_id, reservation.request_id
        request_rates = TAKES_ONE & WINDOW_BY_LETTER.keys()
        limits = [limit for limit in lease.limits if limit.letter not in request_rates]
        restored = await self._store.script(
            tenant_id,
            "restore",
            self._lease_ms,
            request_id,
            (reservation.admitted_at - EPOCH) // timedelta(microseconds=1),
            reservation.tokens,
            reservation.completion,
            reservation.cost,
            reservation.held,
            reservation.charged,
            lease.note,
            *(item for limit in limits for item in (limit.field, limit.value)),
        )
        if restored is None and self.has(tenant_id, request_id):
            self.remove(tenant_id, request_id)
            self._settled.add((tenant_id, request_id))
            log.warning("request %s was settled by another gateway while it ran; it is ended", request_id)
        elif restored == TOO_OLD and not lease.is_too_old:
            lease.is_too_old = True
            log.warning("the lease of request %s is not restored: by Redis' clock it is over a day old", request_id)
