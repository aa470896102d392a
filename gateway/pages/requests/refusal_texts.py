"""Causes of refusals in sentences: what was refused, by which limit, when, and what would help."""

from datetime import UTC, datetime

from gateway.pages.requests.request_texts import KIND_OF, OWNERS, amount
from gateway.pages.widgets.limit_titles import limit_title
from gateway.records.requests.refusal_report import Cause
from wire.error_codes import ENGINE_SHARE_USED

# Advice by the class of the limit, and by the code of a refusal without a limit. Codes by which a program decides are
# constants; the others are only shown.
ADVICE = {
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


def title(cause: Cause) -> str:
    """Return the cause's limit or code for people."""
    return limit_title(cause.limit_name) if cause.limit_name else cause.code.replace("_", " ")


def sentence(cause: Cause, currency: str, now: datetime, step: int) -> str:
    """Return the rest of a sentence after the tenant's name: number, limit, time and peak. step: in seconds."""
    plural = "request was" if cause.requests == 1 else "requests were"
    text = f"{cause.requests:,} {plural} refused"
    evidence = cause.evidence
    if cause.limit_name:
        owner = OWNERS.get(evidence.owner or "", "the tenant") if evidence is not None else "the tenant"
        value = "" if evidence is None or evidence.value is None else amount(cause.limit_name, evidence.value, currency)
        text += f" by the limit {limit_title(cause.limit_name)} of {owner}{f' ({value})' if value else ''}"
    else:
        text += f" with {cause.status or 'the code'} {cause.code}"
    if evidence is not None:
        first, last = (_clock(each, now) for each in (evidence.first, evidence.last))
        text += f", at {first}" if first == last else f", from {first} to {last}"
    if cause.peak is not None and cause.requests > 1:
        text += f", most {_span(cause.peak[0], now, step)} ({cause.peak[1]:,})"
    return f"{text}."


def needs(cause: Cause, currency: str) -> str:
    """Return what the refused requests needed and what was left, on average; "" without a limit."""
    evidence = cause.evidence
    if evidence is None or evidence.needed is None or evidence.remaining is None or evidence.needed <= 1:
        return ""
    needed, left = (amount(cause.limit_name, round(each), currency) for each in (evidence.needed, evidence.remaining))
    return f"On average a refused request needed {needed}, and {left} were left."


def advice(cause: Cause) -> str:
    kind = KIND_OF.get(cause.limit_name)
    return ADVICE.get(cause.code if kind is None else kind.limit_class, "")


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
