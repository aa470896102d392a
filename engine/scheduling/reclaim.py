"""Running requests that give way: for a waiting request's seat and blocks, or for the pages of a waiting adapter.

The policy decides which tenants give way; this module chooses as few of their requests as suffice.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from adapters.tiers.device_pool import AdapterPool
from engine.scheduling.block_demand import BlockDemand
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.policies.policy import Policy
from engine.scheduling.request import Request

# Least lead of other tenants, as a factor of the tokens to compute again once their streams are preempted, for which a
# tenant takes blocks that these streams are expected to need. With 4, two tenants of 20 long answers each computed 12 %
# of their tokens again; with 6, 9 %, as if no tenant with a seat could take such blocks.
OVERCOMMIT = 6


@dataclass(slots=True)
class _Held:
    """Seats and blocks of one tenant's running requests."""

    seats: int = 0
    blocks: int = 0

    def add(self, request: Request) -> None:
        self.seats += 1
        self.blocks += len(request.blocks)

    def remove(self, request: Request) -> None:
        self.seats -= 1
        self.blocks -= len(request.blocks)


def find_victims(
    claimant: Request,
    preemptible: Sequence[Request],
    running: Sequence[Request],
    cache: KVCache,
    lacking: tuple[int, int],
) -> list[Request] | None:
    """Return the requests whose seats and blocks make room for the claimant; None if there are not enough.

    preemptible: the requests that may give way, in order. lacking: the missing seats and blocks.

    A tenant with nothing running may take from any debtor. Another may only take from a tenant that afterwards still
    holds as much per weight as it does itself, so that two tenants never take the same seat from each other in turn.
    """
    if not preemptible:
        return None
    seats, blocks = lacking
    has_seats = claimant.tenant_id in [r.tenant_id for r in running]
    need = max(blocks, cache.blocks_for(claimant.num_tokens))
    held: defaultdict[str, _Held] = defaultdict(_Held)
    for request in running if has_seats else ():
        held[request.tenant_id].add(request)
    own = held[claimant.tenant_id]
    victims: list[Request] = []
    # Requests that share a prefix free it only together: choices of one request would otherwise never give way.
    leaving: Counter[int] = Counter()
    for request in preemptible:
        theirs = held[request.tenant_id]
        if has_seats:
            ratio = request.weight / claimant.weight
            if seats > 0 and theirs.seats - 1 < (own.seats + 1) * ratio:
                continue
            if blocks > 0 and theirs.blocks - len(request.blocks) < (own.blocks + need) * ratio:
                continue
        victims.append(request)
        theirs.remove(request)
        seats -= 1
        blocks -= cache.num_freed(request, leaving)
        if seats <= 0 and blocks <= 0:
            return victims
    return None


def may_overcommit(
    claimant: Request,
    preemptible: Sequence[Request],
    running: Sequence[Request],
    cache: KVCache,
    demand: BlockDemand,
    policy: Policy,
) -> bool:
    """Return whether a claimant is admitted into free blocks that running requests are expected to need.

    A tenant with nothing running needs only a request that may give way. Another tenant needs streams that hold all the
    blocks its requests are expected to need further, of tenants so far ahead that computing these streams again costs
    little. Nothing gives way before blocks run out.
    """
    own = [r for r in running if r.tenant_id == claimant.tenant_id]
    if not preemptible or not own:
        return bool(preemptible)
    need = demand.further_blocks([*own, claimant])
    victims = find_victims(claimant, preemptible, running, cache, (0, need))
    if not victims:
        return False
    lead = min([policy.counter(r.tenant_id) for r in victims]) - policy.counter(claimant.tenant_id)
    return lead > OVERCOMMIT * sum([r.num_computed / r.weight for r in victims])


def find_page_victims(running: Sequence[Request], adapters: AdapterPool, policy: Policy) -> list[tuple[Request, str]]:
    """Return the requests whose adapters hold the pages that overdue reservations need, each with the reservation's
    tenant. The least served tenant's reservation comes first. An adapter is chosen only if the policy lets the
    reservation's tenant preempt every tenant that runs requests with it.
    """
    if not adapters.overdue:
        return []
    counters = {r.tenant_id: policy.counter(r.tenant_id) for r in running}
    claims = sorted(adapters.claims(counters.keys()), key=lambda c: policy.counter(c.tenant_id))
    users = _users_of_adapters(running)
    chosen = adapters.holders_to_preempt(
        (c, _order_adapters(users, counters, [t for t in counters if policy.gives_way(t, c.tenant_id)])) for c in claims
    )
    return [(request, claimant) for digest, claimant in chosen.items() for request in users[digest]]


def _users_of_adapters(running: Sequence[Request]) -> dict[str, list[Request]]:
    """Return the running requests of each adapter."""
    users: dict[str, list[Request]] = {}
    for request in running:
        if request.adapter_digest:
            users.setdefault(request.adapter_digest, []).append(request)
    return users


def _order_adapters(
    users: Mapping[str, Sequence[Request]], counters: Mapping[str, float], giving_way: Collection[str]
) -> list[str]:
    """Return the adapters that only tenants in `giving_way` use. Adapters with the fewest requests come first; among
    these, adapters of the tenants furthest ahead.
    """
    found = [digest for digest, requests in users.items() if all(r.tenant_id in giving_way for r in requests)]
    return sorted(found, key=lambda d: (len(users[d]), -min(counters[r.tenant_id] for r in users[d])))
