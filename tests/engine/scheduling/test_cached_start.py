"""Among tenants within the slack, a request whose first block is cached is admitted first."""

import pytest

from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.world import Pool

SLACK = 256


def request(name: str, first_token: int, arrival: int, max_tokens: int = 1) -> Request:
    """Return a request of the tenant `name`, with a prompt of 40 tokens: two blocks and a half."""
    prompt = list(range(first_token, first_token + 40))
    new = NewRequest(f"{name}-{arrival}", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, name)
    return Request(new, arrival_number=arrival)


def step(scheduler: Scheduler) -> list[str]:
    """Run a step and return the tenants that had work in it."""
    plan = scheduler.schedule()
    ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
    scheduler.advance(plan)
    scheduler.commit(ready)
    return [r.tenant_id for r in plan]


@pytest.mark.parametrize(
    ("ahead", "caches", "expected"),
    [(SLACK - 56, True, "cached"), (SLACK + 44, True, "least"), (SLACK - 56, False, "least")],
)
def test_within_the_slack_a_cached_first_block_comes_first(ahead: float, caches: bool, expected: str) -> None:
    """Without prefix caching, or beyond the slack, the least served tenant is first."""
    scheduler = Scheduler(KVCache(200, 16, caches), Pool(), StepLimits(1, 64), policy=FairShare(SLACK))  # type: ignore[arg-type]
    scheduler.add(request("cached", 1000, 0))
    assert step(scheduler) == ["cached"]
    # A third tenant's stream holds the only seat while the two come.
    holder = request("holder", 2000, 1, max_tokens=100)
    scheduler.add(holder)
    step(scheduler)
    scheduler.add(request("least", 3000, 2))
    scheduler.add(request("cached", 1000, 3))
    scheduler.policy.add_tenant_service(
        "cached", scheduler.policy.counter("least") - scheduler.policy.counter("cached")
    )
    scheduler.policy.add_tenant_service("cached", ahead)
    scheduler.abort(holder.request_id)
    assert step(scheduler) == [expected]
