"""Words and colours for the outcomes of requests and the states of adapters."""

from typing import Literal

from gateway.records.requests.log import NOT_ADMITTED, LogEntry

Tone = Literal["good", "warn", "bad", "info", "quiet"]

OUTCOMES: dict[str, tuple[str, Tone]] = {
    "ok": ("completed", "good"),
    "cancelled": ("client left", "quiet"),
    "revoked": ("key revoked", "warn"),
    "limited": ("ended by a limit", "warn"),
    "refused": ("refused by the engine", "warn"),
    "error": ("failed", "bad"),
    "abandoned": ("gateway died", "bad"),
    NOT_ADMITTED: ("refused", "warn"),
}
# Colours of the badges of adapters' states.
TONES = {
    "ready": "good",
    "validating": "info",
    "uploading": "info",
    "rejected": "bad",
    "retired": "quiet",
    "deleted": "quiet",
}


def outcome(entry: LogEntry) -> tuple[str, Tone]:
    """Return the outcome in words, and the tone of its badge."""
    words, tone = OUTCOMES.get(entry.status, (entry.status, "quiet"))
    if entry.status == NOT_ADMITTED and (entry.http_status or 0) >= 500:
        tone = "bad"
    return words, tone
