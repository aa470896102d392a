"""Usage row of an admitted request: JSON in the quota's stream or in a journal, later a row of the ledger in SQL."""

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**62)]
Id = Annotated[str, Meta(max_length=32)]
# Characters of a request's `user`, and of an engine's reason for an answer's end, that records keep.
MAX_USER_CHARS, MAX_REASON_CHARS = 128, 32


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Usage row of a request. Times are in ms from the request's arrival.

    cost: in micro-units.
    status: "ok", "cancelled" (the client left), "revoked" (its key became invalid), "limited" (a token rate ended it),
        "refused" (the engine refused the request, which costs no money), "error" or "abandoned" (its gateway died).
    served_digest: the engine's receipt (gateway/fleet/calls/receipts.py), None if it sent none.
    surcharge: the tokens of the token rates beyond prompt and completion.
    version: the adapter's version; None for the base model and for mixtures.
    admission_ms: time until the reservation.
    queue_ms: wait after the reservation in the gateway's queue, and in that of an engine of ours that began to answer.
    reserved_tokens: number reserved in the token rates.
    end_user: the request's `user`, as `shown_user` returns it.
    error_code: error code of a failed request.
    limit_name: name of the limit that cut the answer; None if none did, and in rows of the previous release.
    base: name of the base model; None in rows of the previous release.
    """

    request_id: Annotated[str, Meta(max_length=64)]
    tenant_id: Id
    tenant: Annotated[str, Meta(max_length=64)]
    key_id: Id
    endpoint: Id
    model: Annotated[str, Meta(max_length=256)]
    adapter_digest: Annotated[str, Meta(max_length=64)] | None
    engine: Annotated[str, Meta(max_length=256)] | None
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    cost: Count = 0
    latency_ms: Count
    ttft_ms: Count | None
    status: Annotated[str, Meta(max_length=16)]
    finish_reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] | None
    created_at: Annotated[datetime, Meta(tz=True)]
    served_digest: Annotated[str, Meta(max_length=64)] | None = None
    surcharge: Count = 0
    version: Count | None = None
    admission_ms: Count | None = None
    queue_ms: Count | None = None
    reserved_tokens: Count | None = None
    end_user: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None
    error_code: Annotated[str, Meta(max_length=64)] | None = None
    base: Annotated[str, Meta(max_length=256)] | None = None
    limit_name: Annotated[str, Meta(max_length=64)] | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(UsageRow)


def shown_user(user: str | None) -> str | None:
    """Return a request's `user` for records."""
    return printable(user, MAX_USER_CHARS) if user else None


def printable(text: str, most: int) -> str:
    """Return the first characters of a client's or engine's text, with U+FFFD for each that is not printable."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:most])


def encode(row: UsageRow) -> bytes:
    return _encoder.encode(row)


def decode(event: bytes) -> UsageRow:
    """Decode a usage row. Raises ValueError if the event is not one."""
    try:
        return _decoder.decode(event)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
