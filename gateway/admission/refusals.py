"""What a client is told of its limits: OpenAI's headers on every answer, and why a request was refused."""

import math
from collections.abc import Sequence

from gateway.admission.limits import CLASSES, Limit
from gateway.errors import BadRequest, RateLimited
from gateway.records.prices import Price

# Remaining, wait (ms) and reset (ms) of each limit.
States = Sequence[tuple[int, int, int]]

# How a limit is said after its number.
UNITS = {
    "r": "requests per minute",
    "t": "tokens per minute",
    "d": "tokens per day",
    "c": "concurrent requests",
    "o": "concurrent tokens",
    "b": "micro-units of budget per month",
}
# Those that have headers.
HEADERS = {"r": "requests", "t": "tokens"}


def check_possible(limits: Sequence[Limit], prompt_tokens: int, completion_tokens: int, price: Price) -> None:
    """completion_tokens: the fewest that will do. Raises BadRequest for what no waiting helps."""
    tokens = prompt_tokens + completion_tokens
    for limit in limits:
        kind = limit.kind
        if kind in "rc" or (kind != "b" and tokens <= limit.value):
            continue
        needs = f"{tokens} tokens (prompt and max_tokens)"
        if kind == "b":
            cost = price.highest_cost(prompt_tokens, completion_tokens)
            if cost <= limit.value:
                continue
            needs += f" at a cost of {cost}"
        raise BadRequest(
            f"This request needs {needs}, more than the whole limit of {limit.value} {UNITS[kind]} of this "
            f"{limit.owner}; it can never be admitted. Reduce either.",
            param="max_tokens",
            code="request_exceeds_limit",
        )


def refusal(limits: Sequence[Limit], states: States, tokens: int, cost: int, headers: dict[str, str]) -> RateLimited:
    """Of the limits in the way, the one that is longest in it. tokens, cost: what was needed."""
    index = max(range(len(limits)), key=lambda i: states[i][1])
    limit, (remaining, wait, _) = limits[index], states[index]
    seconds = math.ceil(wait / 1000)
    needed = limit.amount(tokens, cost)
    return RateLimited(
        f"Rate limit reached for this {limit.owner}: {limit.value} {UNITS[limit.kind]}; needed {needed}, "
        f"remaining {remaining}. Try again in {seconds} s.",
        limit=CLASSES[limit.kind],
        code="insufficient_quota" if limit.kind == "b" else None,
        headers={**headers, "Retry-After": str(seconds), "retry-after-ms": str(wait)},
    )


def rate_headers(limits: Sequence[Limit], states: States) -> dict[str, str]:
    """`x-ratelimit-*`, of each kind for the limit with the least remaining."""
    headers = {}
    for kind, name in HEADERS.items():
        tightest = None
        for limit, state in zip(limits, states, strict=True):
            if limit.kind == kind and (tightest is None or state[0] < tightest[1][0]):
                tightest = limit, state
        if tightest is not None:
            limit, (remaining, _, reset) = tightest
            headers[f"x-ratelimit-limit-{name}"] = str(limit.value)
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = format_duration(reset)
    return headers


def format_duration(milliseconds: int) -> str:
    """As OpenAI's headers write it: `6m0s`, `1.2s`, `12ms`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
