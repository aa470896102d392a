"""Requests that wait now, in the gateway's queue and in the engines' queues: of each tenant, and in total."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from gateway.fleet.engines.engine import EngineRecord, EngineState


class Waits(NamedTuple):
    """Requests that wait now. in_gateway: in the queue of this process. on_engines: in the queues of the available
    engines, of all gateways; None if no engine reports it. oldest: longest wait of one of them so far, in seconds, in
    the queue that it is in; 0 if none waits, None if only requests wait whose engine does not report it.
    """

    in_gateway: int
    on_engines: int | None
    oldest: float | None

    @property
    def waiting(self) -> int:
        """Return the number of waiting requests, in all queues that are known."""
        return self.in_gateway + (self.on_engines or 0)

    @property
    def counts(self) -> dict[str, Any]:
        """Return the numbers of waiting requests, by their names in the admin API."""
        return {
            "waiting": self.waiting,
            "waiting_in_gateway": self.in_gateway,
            "waiting_on_engines": self.on_engines,
        }


class EngineQueues:
    """Queues of the available engines, as they last reported them.

    Our engines report the tenants with most waiting requests. Other kinds report no tenants, so they count in the
    total only.
    """

    def __init__(self, engines: Iterable[EngineRecord]) -> None:
        self._waiting: int | None = None
        self._tenants: dict[str, tuple[int, float]] = {}
        states = [engine.state for engine in engines]
        # Whether each tenant that no engine reports may wait on one.
        self._is_partial = not states or any(_leaves_tenants_out(state) for state in states)
        for state in states:
            if "waiting" in state.reported:
                self._waiting = (self._waiting or 0) + state.waiting
            for share in state.tenants:
                waiting, oldest = self._tenants.get(share.tenant, (0, 0.0))
                self._tenants[share.tenant] = waiting + share.waiting, max(oldest, share.oldest_wait_seconds)

    def total(self, in_gateway: int, oldest: float) -> Waits:
        """Return the waits of all tenants. in_gateway, oldest: those in this process's queue."""
        longest = max((oldest for _, oldest in self._tenants.values()), default=0.0)
        return _waits(in_gateway, oldest, self._waiting, longest)

    def of(self, tenant_id: str, in_gateway: int, oldest: float) -> Waits:
        """Return a tenant's waits. in_gateway, oldest: those in this process's queue."""
        if (found := self._tenants.get(tenant_id)) is not None:
            return _waits(in_gateway, oldest, *found)
        return _waits(in_gateway, oldest, None if self._is_partial else 0, 0.0)


def _leaves_tenants_out(state: EngineState) -> bool:
    """Return whether tenants that the report leaves out may wait there: it has those with most waiting requests."""
    counts = [share.waiting for share in state.tenants]
    return "waiting" not in state.reported or (min(counts, default=1) > 0 and sum(counts) < state.waiting)


def _waits(in_gateway: int, oldest: float, on_engines: int | None, oldest_on_engines: float) -> Waits:
    longest = max(oldest if in_gateway else 0.0, oldest_on_engines if on_engines else 0.0)
    is_unknown = not longest and bool(on_engines) and not in_gateway
    return Waits(in_gateway, on_engines, None if is_unknown else longest)
