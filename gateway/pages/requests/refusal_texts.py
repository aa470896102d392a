"""Causes of refusals in sentences: what was refused, by which limit, when, and what would help."""

from datetime import UTC, datetime

from gateway.errors import RateLimited
from gateway.pages.requests.request_texts import KIND_OF, OWNERS, amount
from gateway.pages.widgets.limit_titles import limit_title, reason_title
from gateway.quota.refusals import describe_wait
from gateway.records.requests.refusal_report import Cause, Evidence
from wire.error_codes import ENGINE_SHARE_USED

# Advice by the class of the limit, and by the code of a refusal without a limit. Codes by which a program decides are
# constants; the others are only shown.
CUT, RESERVED = "cut", "reserved"
ADVICE = {
    CUT: "The rest of the answers had no room in a token rate. A smaller max_tokens, fewer requests at once or a "
    "higher limit would help.",
    RESERVED: "Running requests reserved the budget: a smaller max_tokens, fewer requests at once or a higher budget "
    "would help.",
    "requests": "The client should wait as long as Retry-After says, or the limit should be raised.",
    "tokens": "Fewer or shorter requests, a smaller max_tokens or a higher limit would help; see the tokens below.",
    "concurrency": "The client sends more requests at once than the limit allows: it should queue them itself.",
    "budget": "The budget is spent until it resets; only a higher one helps before.",
    "server_overloaded": "Every engine was full and the queue too: more engines would help, a limit would not.",
    ENGINE_SHARE_USED: "The tenant used up its share of an engine; other tenants were served.",
    "too_many_bodies": "The gateway's memory for request bodies was full; see LORAPLEX_BODY_MEMORY_BYTES.",
    "too_many_wrong_keys": "Too many wrong keys came from one address.",
    "too_many_refused_requests": "Too many of the tenant's requests were invalid; their errors name the fields.",
}
NO_KEY = "requests without a valid key"
# Words for `Cause.outcome` in tables.
OUTCOMES = {"refused": "refused", "cut": "cut in mid-stream", "failed": "failed after admission"}


def title(cause: Cause) -> str:
    """Return the cause's limit or code for people."""
    return reason_title(cause.code, cause.limit_name)


def sentence(cause: Cause, currency: str, now: datetime, step: int) -> str:
    """Return the rest of a sentence after the tenant's name: number, limit, time and peak. step: in seconds."""
    evidence = cause.evidence
    text = _what(cause)
    if cause.limit_name:
        of = f" {_owner(cause, evidence[0], currency)}" if len(evidence) == 1 else ""
        text += f" by the limit {limit_title(cause.limit_name)}{of}"
    if evidence:
        first, last = min(each.first for each in evidence), max(each.last for each in evidence)
        first_shown, last_shown = _clock(first, now), _clock(last, now)
        text += f", at {first_shown}" if first_shown == last_shown else f", from {first_shown} to {last_shown}"
    if cause.peak is not None and cause.requests > 1:
        text += f", most {_span(cause.peak[0], now, step)} ({cause.peak[1]:,})"
    return f"{text}."


def limits_shown(cause: Cause, currency: str) -> list[str]:
    """Return a line for each limit of the cause's name that refused requests: its owner, value, number and figures."""
    if len(cause.evidence) == 1:
        return [line] if (line := _figures(cause, cause.evidence[0], currency)) else []
    return [
        f"Limit {_owner(cause, each, currency)}: {each.rows:,} of the recorded refusals. "
        f"{_figures(cause, each, currency)}".strip()
        for each in cause.evidence
    ]


def advice(cause: Cause) -> str:
    kind = KIND_OF.get(cause.limit_name)
    if cause.outcome == "cut":
        return ADVICE[CUT]
    if kind is not None and kind.is_budget and cause.code == RateLimited.code:
        return ADVICE[RESERVED]
    return ADVICE.get(cause.code if kind is None else kind.limit_class, "")


def _what(cause: Cause) -> str:
    """Return the number of requests and their outcome, with the code if no limit is known."""
    is_one = cause.requests == 1
    if cause.outcome == "cut":
        text = f"{cause.requests:,} {'answer was' if is_one else 'answers were'} cut in mid-stream"
        return text if cause.limit_name else f"{text} by a limit"
    verb = "failed after admission" if cause.outcome == "failed" else f"{'was' if is_one else 'were'} refused"
    text = f"{cause.requests:,} request{'' if is_one else 's'} {verb}"
    return text if cause.limit_name else f"{text} with {cause.status or 'the code'} {cause.code}"


def _owner(cause: Cause, evidence: Evidence, currency: str) -> str:
    value = "" if evidence.value is None else f" ({amount(cause.limit_name, evidence.value, currency)})"
    return f"of {OWNERS.get(evidence.owner or '', 'the tenant')}{value}"


def _figures(cause: Cause, evidence: Evidence, currency: str) -> str:
    """Return what requests needed and what was left, on average, and the longest wait; "" without a limit."""
    found = []
    if evidence.needed is not None and evidence.remaining is not None and evidence.needed > 1:
        amounts = (evidence.needed, evidence.remaining)
        needed, left = (amount(cause.limit_name, round(each), currency) for each in amounts)
        found.append(f"On average a refused request needed {needed}, and {left} were left.")
    if evidence.longest_wait is not None:
        found.append(f"The longest wait was {describe_wait(evidence.longest_wait)}.")
    return " ".join(found)


def _span(start: datetime, now: datetime, step: int) -> str:
    """Return the words for the step that begins at `start`, such as `at 12:03`. step: its length in seconds."""
    if step >= 86_400:
        return f"on {start.astimezone(UTC):%-d %b}"
    clock = _clock(start, now, seconds=False)
    if step <= 60:
        return f"at {clock}"
    return f"in the hour from {clock}" if step == 3600 else f"in the {step // 60} minutes from {clock}"


def _clock(moment: datetime, now: datetime, *, seconds: bool = True) -> str:
    moment = moment.astimezone(UTC)
    shown = moment.strftime("%H:%M:%S" if seconds else "%H:%M")
    return shown if moment.date() == now.date() else f"{moment.day} {moment:%b} {shown}"
