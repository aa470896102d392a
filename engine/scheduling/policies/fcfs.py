"""First come, first served over all tenants: the baseline for fair share. Accounts are kept for reports only."""

from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter

from engine.scheduling.policies.policy import Locality
from engine.scheduling.policies.tenants import OnDeviceAmong, TenantPolicy, Tenants, every_adapter
from engine.scheduling.request import Request

# Maximum number of waiting requests that a step considers.
LOOKED_AT = 256

_arrival_number = attrgetter("arrival_number")


class FirstCome(TenantPolicy):
    """Policy that serves requests in order of arrival and preempts none for fairness."""

    def enter(self, request: Request, now: float, on_device_among: OnDeviceAmong = every_adapter) -> None:
        request.order_key = (0, 0.0, request.arrival_number)
        self._tenants.enter(request, now, on_device_among)

    def put_back(self, request: Request, now: float) -> None:
        self._tenants.push(self._tenants.accounts[request.tenant_id], request, now)

    def turns(
        self, in_progress: Iterable[Request], locality: Locality | None, *, has_seat: bool = True
    ) -> "ArrivalTurns":
        return ArrivalTurns(self._tenants, in_progress)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=_arrival_number)

    def preemptible(
        self, claimant: Request, running: Sequence[Request], now: float, *, keeps_blocks: bool
    ) -> list[Request]:
        return []

    def gives_way(self, tenant_id: str, claimant: str) -> bool:
        return False

    def heavier(self, request: Request, running: Sequence[Request]) -> set[str]:
        return set()

    def step_target(self, now: float) -> float | None:
        return None


class ArrivalTurns:
    """Turns of one step: prompts in progress, then the queue."""

    def __init__(self, tenants: Tenants, in_progress: Iterable[Request]) -> None:
        self._tenants = tenants
        self._prompts = sorted(in_progress, key=_arrival_number, reverse=True)
        self._waiting: list[Request] | None = None

    def next(self, *, admits: bool) -> Request | None:
        if self._prompts:
            return self._prompts.pop()
        if not admits:
            return None
        if self._waiting is None:
            queues = (account.queue for account in self._tenants.waiting.values())
            self._waiting = list(islice(merge(*queues, key=_arrival_number), LOOKED_AT))[::-1]
        return self._waiting.pop() if self._waiting else None

    def pass_over(self) -> None:
        self._waiting = []  # no request overtakes another
