"""Holds of running requests: their creation, their growth, and the completion lengths learnt from their ends."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from gateway.errors import RateLimited
from gateway.quota.demand import Demand
from gateway.quota.growing_hold import Expectations, Hold, Pace
from gateway.quota.limits import Limit
from gateway.quota.local import Grown
from gateway.quota.rate_debt import GAUGE_WAIT_MS
from gateway.quota.refusals import cut_off
from gateway.quota.reservation import Reservation
from gateway.quota.without_redis import WithoutRedis
from gateway.records.adapters.catalog import Model


class Holds:
    """Creates holds and predicts their first size.

    script: calls the quota's script for a tenant. without: admits requests and grows holds while Redis is away.
    """

    def __init__(self, script: Callable[..., Awaitable[Any]], without: WithoutRedis) -> None:
        self._script = script
        self._without_redis = without
        self._expectations = Expectations()

    def expected(self, tenant_id: str, model: Model | str, max_tokens: int, choices: int) -> int:
        """Return the completion tokens that a request holds at first, for all its choices together."""
        return min(max_tokens, self._expectations.expect(tenant_id, _key(model))) * choices

    def attach(
        self, reservation: Reservation, demand: Demand, model: Model | str, limits: Sequence[Limit]
    ) -> Reservation:
        """Return the reservation with a hold, or unchanged if no token rate applies to it or its hold does not grow.

        model: empty for an upload, from whose length nothing is learnt.
        """
        rates = {limit.field: limit for limit in limits if limit.kind.is_token_rate}
        if demand.expected is None or not rates:
            return reservation
        tenant_id, request_id = demand.tenant_id, demand.request_id

        def expected_next(used: int) -> int:
            """Return the completion tokens that the same request would hold at first after an end of this one now."""
            if not model:
                return demand.first_completion
            completion, seconds = (used - demand.prompt_tokens) / demand.choices, time.monotonic() - hold.started
            each = self._expectations.expect_after(tenant_id, _key(model), completion, seconds)
            expected = min(demand.max_tokens, each) * demand.choices
            return msgspec.structs.replace(demand, expected=expected).within(limits).first_completion

        async def grow(used: int, wanted: int) -> Grown:
            expected = expected_next(used)
            local = self._without_redis.grow(tenant_id, request_id, used, wanted, expected)
            if local is not None:
                return local
            reply = await self._script(tenant_id, "grow", request_id, used, wanted, expected)
            if reply is None:
                # Redis has lost the lease; the next extension restores it.
                return Grown(used + wanted, 0, "")
            return Grown(reply[0], reply[1], reply[2].decode())

        def refusal(grown: Grown) -> RateLimited:
            return cut_off(rates.get(grown.field) or next(iter(rates.values())), grown.wait or GAUGE_WAIT_MS)

        def ended(tokens: int) -> None:
            completion = (tokens - demand.prompt_tokens) / demand.choices
            if completion > 0 and model:
                self._expectations.learn(tenant_id, _key(model), completion, time.monotonic() - hold.started)

        pace = Pace(demand.prompt_tokens, demand.first_completion, reservation.tokens, demand.choices)
        hold = Hold(pace, grow, refusal, ended)
        return msgspec.structs.replace(reservation, hold=hold)


def _key(model: Model | str) -> str:
    return model if isinstance(model, str) else model.digest or model.name
