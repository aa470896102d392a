"""Interface of a scheduling policy: the order of waiting requests and prompts, and the streams that give way.

The scheduler owns seats, blocks and adapters; a policy owns the queue and each tenant's account. A new policy is a
module in this folder, a line in `registry.py` and a name in `engine.config.PolicyName`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Protocol

from engine.scheduling.policies.tenants import FairShareSnapshot, OnDeviceAmong, every_adapter
from engine.scheduling.request import Request


class Locality(Protocol):
    """Locality of waiting requests: whether the device has what they need."""

    def lacks_adapter(self, request: Request) -> bool:
        """Return whether the request's adapter is off the device."""
        ...

    def key(self, request: Request) -> tuple[bool, bool]:
        """Return a key that sorts requests of better locality first: (lacks its adapter, lacks its first blocks)."""
        ...

    def on_device_among(self, adapters: Set[str | None]) -> Collection[str | None]:
        """Return those of the adapters (None: the base model) that are on the device. Takes time by the smaller of
        the two sets.
        """
        ...


class Turns(Protocol):
    """Order of the prompt work in one step."""

    def next(self, *, admits: bool) -> Request | None:
        """Return the next request, None at the end. Service added since the last call counts.

        admits: whether waiting requests may be returned; otherwise only prompts in progress are.
        """
        ...

    def pass_over(self) -> None:
        """Return no further waiting request of the last one's tenant, because the step has no room for it."""
        ...


class Policy(Protocol):
    """Queue of waiting requests, and the accounts of their tenants."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...

    def num_waiting(self, tenant_id: str) -> int: ...

    def counter(self, tenant_id: str) -> float:
        """Return the tenant's service divided by its weight."""
        ...

    def enter(self, request: Request, now: float, on_device_among: OnDeviceAmong = every_adapter) -> None:
        """Queue a new request. Its tenant is active until `leave`. on_device_among: see `Locality`."""
        ...

    def put_back(self, request: Request, now: float) -> None:
        """Queue a preempted request, ahead of its tenant's others."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a waiting request that is admitted or ends."""
        ...

    def leave(self, request: Request) -> None:
        """Forget a request that has ended, after `remove` if it waited."""
        ...

    def add_service(self, request: Request, cost: float) -> None:
        """Add the cost of planned work to the tenant's account; a negative cost returns it."""
        ...

    def add_tenant_service(self, tenant_id: str, cost: float) -> None:
        """Add the cost of work that no running request did. A tenant that has left pays nothing."""
        ...

    def add_service_elsewhere(self, costs: Mapping[str, float], now: float) -> int:
        """Add tenants' costs of service at other engines. Return the number of those with requests here; the others pay
        nothing.
        """
        ...

    def forgive_elsewhere(self, now: float) -> None:
        """Cancel the debt for service elsewhere of tenants that have nothing running and have waited
        ELSEWHERE_WAIT_S.
        """
        ...

    def turns(self, in_progress: Iterable[Request], locality: Locality | None, *, has_seat: bool = True) -> Turns:
        """Begin a step.

        locality: None: no request is preferred for it. has_seat: whether a seat is free. If so, `locality` sorts the
        requests of almost equally served tenants. If not, the least served tenant's request comes first, because it may
        claim one.
        """
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the running request that gives way when no block is left for a running request's next token."""
        ...

    def preemptible(
        self, claimant: Request, running: Sequence[Request], now: float, *, keeps_blocks: bool
    ) -> list[Request]:
        """Return the running requests that may be preempted for the waiting claimant, the first choice first. The list
        is empty if the claimant has to wait until running requests end.

        keeps_blocks: the claimant needs no block of theirs, so their blocks probably stay cached.
        """
        ...

    def gives_way(self, tenant_id: str, claimant: str) -> bool:
        """Return whether a tenant's running requests may be preempted when the claimant's adapter needs their pages."""
        ...

    def count_target(self, request: Request, *, is_met: bool) -> None:
        """Count a sequence with a target of the time to first token, for its tenant's reports."""
        ...

    def heavier(self, request: Request, running: Sequence[Request]) -> set[str]:
        """Return the tenants whose streams may be left out of a step with the request's prompt."""
        ...

    def step_target(self, now: float) -> float | None:
        """Return the limit of a step's prompt work in seconds, because prompts may arrive during it; None: no limit."""
        ...

    def tenants(self, running: Sequence[Request], now: float, limit: int) -> list[FairShareSnapshot]:
        """Return snapshots of the accounts of the tenants with most waiting requests and service, at most `limit`."""
        ...
