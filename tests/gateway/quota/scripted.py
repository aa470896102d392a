"""The quota's script on a clock that the test sets."""

import uuid
from typing import Any

import redis

from gateway.limits.kinds import WINDOW_BY_LETTER
from gateway.quota import script
from gateway.quota.demand import Demand
from gateway.quota.limits import Limit
from gateway.quota.local import LocalLimits
from gateway.quota.usage_backfill import UNKNOWN
from gateway.records.money.prices import Price
from gateway.redis.keys import quota_keys

SOURCE = script.source()
CLOCK = "redis.call('TIME')"
# 2026-02-27, 23:59:58: close to the end of a month.
START = 1_772_236_798_000_000
MS, SECOND, DAY = 1000, 1_000_000, 86_400_000_000


def demand(
    request_id: str, prompt: int, completion: int, step: int, price: Price, expected: int | None = None
) -> Demand:
    """Return the demand with which the script's twin reserves the same amounts as `Script.acquire`."""
    return Demand(
        tenant_id="",
        request_id=request_id,
        prompt_tokens=prompt,
        max_tokens=completion,
        step=step,
        price=price,
        expected=expected,
    )


class Script:
    """Limits of one tenant on a real Redis, with a settable clock `now` in microseconds."""

    def __init__(self, client: redis.Redis) -> None:
        assert SOURCE.count(CLOCK) == 1
        self._call = client.register_script(
            SOURCE.replace(CLOCK, "{ARGV[#ARGV - 1], ARGV[#ARGV]}; ARGV[#ARGV] = nil; ARGV[#ARGV] = nil")
        )
        self.keys = quota_keys(uuid.uuid4().hex)
        self.now = START

    def call(self, *arguments: Any) -> Any:
        return self._call(keys=self.keys, args=[*arguments, self.now // SECOND, self.now % SECOND])

    def acquire(
        self,
        request_id: str,
        limits: list[Limit],
        prompt: int,
        completion: int,
        step: int,
        price: Price,
        expected: int | None = None,
    ) -> tuple[bool, int, list[tuple[int, int, int, int]]]:
        flat = [item for limit in limits for item in (limit.field, limit.value)]
        asked = (prompt, completion, completion if expected is None else expected, step)
        call = ("acquire", request_id, 10**9, *asked, price.highest_input, price.output, "{}", *flat)
        reply = self.call(*call)
        if reply[0] == UNKNOWN:
            # No usage before.
            for i in range(1, len(reply), 2):
                limit = limits[reply[i]]
                self.call("backfill", limit.field, limit.value, reply[i + 1], 0, 0)
            reply = self.call(*call)
        allowed, granted, _, *rest = reply[: 3 + 4 * len(limits)]
        states = [(rest[i], rest[i + 1], rest[i + 2], rest[i + 3]) for i in range(0, len(rest), 4)]
        return bool(allowed), granted, states

    def peek(self, limits: list[Limit]) -> list[tuple[int, int, int]]:
        """Return remaining, reset (ms) and `since` of each limit."""
        reply = self.call("peek", *(item for limit in limits for item in (limit.field, limit.value)))
        return [(reply[i], reply[i + 1], reply[i + 2]) for i in range(0, len(reply), 4)]

    def grow(self, request_id: str, used: int, wanted: int, expected: int = 0) -> tuple[int, int, str] | None:
        reply = self.call("grow", request_id, used, wanted, expected)
        return None if reply is None else (reply[0], reply[1], reply[2].decode())

    def extend(self, request_id: str, used: int) -> list[str]:
        return [each.decode() for each in self.call("extend", 10**9, request_id, "", used)]

    def settle(self, request_id: str, tokens: int, cost: int, counts: bool) -> bool:
        return self.call("settle", request_id, tokens, cost, int(counts), "{}") is not None


class Twin:
    """`LocalLimits` with the script's interface."""

    def __init__(self) -> None:
        self._limits = LocalLimits()
        self.now = START

    def acquire(
        self,
        request_id: str,
        limits: list[Limit],
        prompt: int,
        completion: int,
        step: int,
        price: Any,
        expected: int | None = None,
    ) -> Any:
        answer = self._limits.acquire(limits, demand(request_id, prompt, completion, step, price, expected), self.now)
        return answer.allowed, answer.granted, answer.states

    def grow(self, request_id: str, used: int, wanted: int, expected: int = 0) -> tuple[int, int, str] | None:
        grown = self._limits.grow("", request_id, used, wanted, expected, self.now)
        return None if grown is None else (grown.usable_tokens, grown.wait, grown.field)

    def extend(self, request_id: str, used: int) -> list[str]:
        self._limits.grow("", request_id, used, 0, 0, self.now)
        return []

    def settle(self, request_id: str, tokens: int, cost: int, counts: bool) -> bool:
        return self._limits.settle("", request_id, tokens, cost, counts=counts, now=self.now)


class Bucket:
    """Reference leaky bucket: real use fills it when it happens, and passing time empties it, whatever the clock shows.

    Times are microseconds since the test began.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit, self.level, self.at = limit, 0.0, 0

    def use(self, amount: int, moment: int) -> None:
        drained = (moment - self.at) * self.limit.value / WINDOW_BY_LETTER[self.limit.letter]
        self.level, self.at = max(0.0, self.level - drained) + amount, moment
        # The script allows 0.001 token of slack for fractions at each admission.
        assert self.level <= self.limit.value + 1
