"""Responses about limits: OpenAI's headers on every answer, and the errors of refusals."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from gateway.errors import BadRequest, Exceeded, RateLimited
from gateway.limits.kinds import REQUEST_KINDS
from gateway.limits.periods import period_words
from gateway.quota.demand import Demand
from gateway.quota.limits import Limit, LimitState
from wire.headers import BUDGET_HEADER
from wire.money import exact_money, format_money

_RATES = [kind for kind in REQUEST_KINDS if kind.window is not None]
# Suffix of the headers -> the names of the limits that they report.
HEADERS = {
    "requests": {kind.name for kind in _RATES if kind.takes_one},
    "tokens": {kind.name for kind in _RATES if kind.is_token_rate},
}
# Requests that share a limit, by its owner.
SHARING = {"tenant": "of all keys of this tenant", "key": "of this key", "model": "for this model"}
WHOLE_ANSWER = (
    " Non-streaming requests to this model reserve all of max_tokens. A streaming request reserves less at first, and "
    "more as its answer grows."
)


def check_possible(limits: Sequence[Limit], demand: Demand) -> None:
    """Raise BadRequest for a request that can never be admitted.

    A growing request may use more than a token rate's limit while it runs, so it needs room only for its prompt and one
    token of each choice.
    """
    prompt, least, grows = demand.prompt_tokens, demand.least, demand.expected is not None
    cost = demand.price.highest_cost(prompt, least)
    for limit in limits:
        is_rate = limit.kind.is_token_rate
        completion = min(demand.choices, least) if is_rate and grows else least
        tokens = prompt + completion
        if limit.kind.takes_one or limit.value == 0 or limit.amount(tokens, cost) <= limit.value:
            # The script reports a budget of 0 as spent, never the request as too large.
            continue
        needs = f"{tokens} tokens ({prompt} of the prompt and {completion} of the answer{_default(demand)})"
        if limit.kind.is_budget:
            needs += f" at a cost of {format_money(cost, demand.currency)}"
        raise BadRequest(
            f"This request needs {needs}, more than the whole limit of {_value(limit, demand.currency)} of this "
            f"{limit.owner}; it can never be admitted. Shorten the prompt, or send a smaller max_tokens."
            + (WHOLE_ANSWER if is_rate and not grows and prompt < limit.value else ""),
            param="max_tokens",
            code="request_exceeds_limit",
        )


def refusal(
    limits: Sequence[Limit], states: Sequence[LimitState], demand: Demand, headers: dict[str, str]
) -> RateLimited:
    """Build the 429 for the exceeded limit with the longest wait."""
    limit, state = max(zip(limits, states, strict=True), key=lambda each: each[1].wait)
    needed, seconds = demand.needed(limit, demand.least), math.ceil(state.wait / 1000)
    # Only running requests are in the way if there is room without their reservations.
    is_reserved = 0 < needed - state.remaining <= state.reserved
    message = _budget_message if limit.kind.is_budget else _rate_message
    return RateLimited(
        message(limit, state, demand, is_reserved=is_reserved),
        limit_class=limit.kind.limit_class,
        code="insufficient_quota" if limit.kind.is_budget and not is_reserved else None,
        headers={**headers, "Retry-After": str(seconds), "retry-after-ms": str(state.wait)},
        exceeded=Exceeded(
            name=limit.name,
            owner=limit.owner,
            value=limit.value,
            needed=needed,
            remaining=max(0, state.remaining),
            retry_after=seconds,
        ),
    )


def counted_as(refusal: RateLimited) -> str:
    """Return the limit's class in metrics. A budget that running requests only reserve has its own, because it is not
    used up: its refusals end with these requests.
    """
    is_reserved = refusal.kind == "budget" and refusal.code == RateLimited.code
    return "reserved_budget" if is_reserved else refusal.kind


def cut_off(limit: Limit, wait: int) -> RateLimited:
    """Build the error that ends an answer or an upload when a limit has no more room.

    wait: ms until the same request is admitted.
    """
    seconds = math.ceil(wait / 1000)
    end = "The answer ends here; the generated tokens are charged."
    if limit.kind.charged == "upload":
        end = "The upload ends here; the received bytes count."
    return RateLimited(
        f"Rate limit reached for this {limit.owner}: {_value(limit)}. {end} Try again in {describe_wait(seconds)}.",
        limit_class=limit.kind.limit_class,
        headers={"Retry-After": str(seconds), "retry-after-ms": str(wait)},
        ended_by=limit.name,
    )


def rate_headers(limits: Sequence[Limit], states: Sequence[LimitState], currency: str = "") -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of requests and tokens, each for the limit with the least remaining, and the
    remaining amount of the tightest budget, such as `37.60 EUR`.
    """
    headers = {}
    budgets = [state.remaining for limit, state in zip(limits, states, strict=True) if limit.kind.is_budget]
    if budgets:
        headers[BUDGET_HEADER] = f"{exact_money(min(budgets))} {currency}".rstrip()
    for name, reported in HEADERS.items():
        found = [each for each in zip(limits, states, strict=True) if each[0].name in reported]
        if found:
            limit, state = min(found, key=lambda each: each[1].remaining)
            headers[f"x-ratelimit-limit-{name}"] = str(limit.value)
            headers[f"x-ratelimit-remaining-{name}"] = str(state.remaining)
            headers[f"x-ratelimit-reset-{name}"] = format_duration(state.reset)
    return headers


def format_duration(milliseconds: int) -> str:
    """Format a duration as OpenAI's headers do: `23h16m48s`, `6m0s`, `1.2s`, `12ms`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def describe_wait(seconds: int) -> str:
    """Format a wait for a message, rounded up: `38 s`, `4 min`, `2 h 5 min`, `1 d 3 h`."""
    if seconds < 120:
        return f"{seconds} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours + bool(minutes), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _default(demand: Demand) -> str:
    """Return the words that say where max_tokens comes from, if not from the client."""
    return f": {demand.max_tokens} is the default, because max_tokens is not set" if demand.by_default else ""


def _value(limit: Limit, currency: str = "") -> str:
    """Return a limit's value with its unit."""
    value = format_money(limit.value, currency) if limit.kind.is_budget else str(limit.value)
    return f"{value} {limit.kind.unit.format(s='' if limit.value == 1 else 's')}"


def _rate_message(limit: Limit, state: LimitState, demand: Demand, *, is_reserved: bool) -> str:
    """Return the message of a refusal by a rate or a number of requests. is_reserved: see `_budget_message`."""
    needed = demand.needed(limit, demand.least)
    return (
        f"Rate limit reached for this {limit.owner}: {_value(limit)}; needed {needed}"
        f"{_parts(demand, needed) if limit.kind.takes == 'tokens' else ''}, remaining {state.remaining}"
        f"{f', and {state.reserved} are {_reserved_by(limit)}' if is_reserved else ''}. "
        f"Try again in {describe_wait(math.ceil(state.wait / 1000))}."
    )


def _parts(demand: Demand, needed: int) -> str:
    """Return the words that say for what a request needs its tokens; none if a limit of 0 refuses it in any case."""
    if needed <= demand.prompt_tokens:
        return ""
    why = _default(demand) or f": max_tokens is {demand.max_tokens}"
    each = f" for each of {demand.choices} answers" if demand.choices > 1 else ""
    answer = needed - demand.prompt_tokens
    # A stream reserves more while it grows, and an answer may be shortened to what is left.
    amount = str(answer) if answer == demand.completion else f"at least {answer}"
    return f" ({demand.prompt_tokens} of the prompt, {amount} for the answer{why}{each})"


def _budget_message(limit: Limit, state: LimitState, demand: Demand, *, is_reserved: bool) -> str:
    """Return the message of a refusal by a budget. is_reserved: whether only running requests are in the way."""
    amounts = (limit.value, demand.needed(limit, demand.least), state.remaining, state.reserved)
    whole, cost, left, reserved = (format_money(max(0, each), demand.currency) for each in amounts)
    budget = f"{period_words(limit.letter)} budget of this {limit.owner}, {whole},"
    if is_reserved:
        # The time of their end is unknown, so `Retry-After` is no promise.
        return (
            f"{budget} has no room while other requests run: the request may cost {cost}, {left} is left, and "
            f"{reserved} is {_reserved_by(limit)}. Try again when one of them has ended."
        )
    words = "is used up" if state.remaining <= 0 else "is nearly used up"
    day = _midnight(math.ceil(state.wait / 1000))
    return f"{budget} {words}: the request may cost {cost}, {left} is left. Try again on {day}."


def _reserved_by(limit: Limit) -> str:
    """Return the words for the requests or uploads that hold a limit's room."""
    users = "uploads" if limit.kind.charged == "upload" else "requests"
    return f"reserved by running {users} {SHARING[limit.owner]}, which return the unused part at their end"


def _midnight(seconds: int) -> str:
    """Return the start of the day on which a budget has room again, as text.

    The seconds until then are by Redis' clock, which may differ from this one by less than 12 hours.
    """
    first = datetime.now(UTC) + timedelta(seconds=seconds, hours=12)
    return f"{first.day} {first:%B %Y} 00:00 UTC"
