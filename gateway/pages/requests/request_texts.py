"""Texts about one request: its outcome in words, its stages with their times, and the limit that refused it."""

from typing import NamedTuple

from gateway.limits.kinds import KINDS
from gateway.pages.widgets.limit_titles import limit_title
from gateway.records.requests.log import LogEntry
from wire.error_codes import ADAPTER_FILES_UNREADABLE, ENGINE_SHARE_USED, MODEL_NOT_FOUND, TENANT_SUSPENDED
from wire.money import format_money

KIND_OF = {kind.name: kind for kind in KINDS}
OWNERS = {"tenant": "the tenant", "key": "the key", "model": "the model"}


class Stage(NamedTuple):
    """Stage of a request, in ms from its arrival. tone: colour class of its bar, `c1` to `c8`."""

    name: str
    start: int
    end: int
    tone: str
    hint: str

    @property
    def length(self) -> int:
        return self.end - self.start


def stages(entry: LogEntry) -> list[Stage]:
    """Return the request's stages. A stage whose end was not recorded is part of the following one."""
    if not entry.is_admitted:
        return [Stage("Checks", 0, entry.latency_ms, "c4", "The gateway checked the request and refused it.")]
    marks = [
        ("Admission", entry.admission_ms, "c5", "Key, body, prompt and limits; the tokens are reserved."),
        (
            "Queue",
            None if entry.queue_ms is None else (entry.admission_ms or 0) + entry.queue_ms,
            "c3",
            "The request waits until an engine has a place for it.",
        ),
        (
            "First token",
            entry.ttft_ms,
            "c1",
            "The request goes to the engine, which loads the adapter and reads the prompt.",
        ),
        (
            "Answer",
            entry.latency_ms,
            "c2",
            "The engine writes the rest of the answer."
            if entry.ttft_ms is not None
            else "The engine reads the prompt and writes the answer; without a stream, no first token is seen.",
        ),
    ]
    found: list[Stage] = []
    at = 0
    for name, mark, tone, hint in marks:
        if mark is not None:
            # Times are rounded to ms, so a stage could end before its start.
            end = min(max(at, mark), max(entry.latency_ms, at))
            found.append(Stage(name, at, end, tone, hint))
            at = end
    return found


def settled_tokens(entry: LogEntry) -> int:
    """Return the tokens that count against the token rates."""
    return entry.prompt_tokens + entry.completion_tokens + entry.surcharge


def decode_rate(entry: LogEntry) -> float | None:
    """Return the tokens per second after the first one."""
    if entry.ttft_ms is None or entry.completion_tokens < 2 or entry.latency_ms <= entry.ttft_ms:
        return None
    return 1000 * (entry.completion_tokens - 1) / (entry.latency_ms - entry.ttft_ms)


def amount(limit_name: str, value: int, currency: str) -> str:
    """Return an amount of a limit with its unit."""
    kind = KIND_OF.get(limit_name)
    if kind is not None and kind.takes == "cost":
        return format_money(value, currency)
    unit = {"tokens": " tokens", "bytes": " bytes"}.get("" if kind is None else kind.takes, "")
    return f"{value:,}{unit}"


def reason(entry: LogEntry, currency: str) -> str:
    """Return a sentence about the limit that refused the request or ended its answer; "" without a limit."""
    if entry.ended_by is not None:
        return f"The limit {limit_title(entry.ended_by)} ended the answer: it had no room for the rest."
    if entry.limit is None:
        return ""
    limit = entry.limit
    owner = OWNERS.get(limit.owner, limit.owner)
    value, needed, left = (amount(limit.name, each, currency) for each in (limit.value, limit.needed, limit.remaining))
    return (
        f"The limit {limit_title(limit.name)} of {owner} is {value}. The request needed {needed}, and {left} "
        f"{'was' if limit.remaining == 1 else 'were'} left."
    )


# Sentences about errors without a limit, by their code. Codes by which a program decides are constants; the others are
# only shown.
EXPLANATIONS = {
    "insufficient_permissions": "The key does not have the scope that the route needs.",
    "model_not_allowed": "The key is limited to some models, and this one is not among them.",
    MODEL_NOT_FOUND: "There is no model of this name for the tenant, or its version is not served.",
    "context_length_exceeded": "The prompt and its max_tokens are longer than the model's context.",
    TENANT_SUSPENDED: "The tenant is suspended.",
    "server_overloaded": "The engines were full, and the queue was too long. A repetition later may pass.",
    ENGINE_SHARE_USED: "The tenant used its share of the full engines. A repetition later may pass.",
    "shutting_down": "The gateway was stopped, and the request did not end in the time that running requests get.",
    "engine_died": "The engine died with the request, or the connection to it broke.",
    "engine_error": "The engine failed, or its answer was not valid.",
    "adapter_rank_not_served": "The adapter's rank is larger than the engines serve.",
    "adapter_files_missing": "The adapter store lacks the adapter's files. Check it, or upload the adapter again.",
    ADAPTER_FILES_UNREADABLE: "No engine could read the adapter's files. Check the adapter store.",
    "invalid_body": "The body of the request is not what the route expects.",
}


def explain(entry: LogEntry) -> str:
    """Return a sentence about a refused or failed request without a limit; "" if there is none for its code."""
    if entry.code is None or entry.limit is not None:
        return ""
    text = EXPLANATIONS.get(entry.code, "")
    at_fault = f" The field at fault is '{entry.param}'." if entry.param else ""
    if text:
        return f"{text}{at_fault}"
    if entry.http_status == 400:
        return f"The request is not what the route expects.{at_fault}"
    return ""
