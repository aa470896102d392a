"""Reservation of a running request: the amounts it holds, and the data with which another gateway settles it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gateway.quota.growing_hold import Hold

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts that are reserved for a request in its limits.

    tokens: the prompt and the maximum completion of all choices. max_tokens: maximum tokens of a single choice; fewer
    than requested if the tenant's answers are shortened. cost: the highest possible, in micro-units. headers: OpenAI's
    `x-ratelimit-*`, and `x-loraplex-max-tokens` if shortened. admitted_at: by Redis' clock, which defines the periods
    of limits; the ledger's row must have it (`created_at`). currency: currency of the cost, for people. hold: set if
    only a part is reserved in the token rates at first.
    """

    request_id: str
    tenant_id: str
    tokens: int
    max_tokens: int
    headers: dict[str, str]
    admitted_at: datetime
    completion: int = 0
    cost: int = 0
    currency: str = ""
    hold: Hold | None = None

    @property
    def held(self) -> int:
        """Return the tokens of the rates that are held."""
        return self.tokens if self.hold is None else max(0, self.hold.pace.allowed - self.hold.charged)

    @property
    def charged(self) -> int:
        """Return the tokens of the rates that have become debt."""
        return 0 if self.hold is None else self.hold.charged


class LeaseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of a request whose gateway lives and whose engine is away: fields of its usage row, as the gateway saw it."""

    status: str
    error_code: str | None = None
    limit_name: str | None = None
    latency_ms: int = 0
    ttft_ms: int | None = None
    admission_ms: int | None = None
    queue_ms: int | None = None
    served_digest: str | None = None


class LeaseProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a request: its engine and its counts so far. Gateways of the previous release ignore further fields.

    is_free: whether it costs no money, because its engine died and it has no answer. end: None while it runs.
    """

    engine_url: str
    prompt_tokens: int
    completion_tokens: int
    is_free: bool = False
    end: LeaseEnd | None = None


class ExpiredLease(msgspec.Struct, frozen=True, kw_only=True):
    """Lease that its gateway stopped extending.

    note: as given to `Quota.acquire`.
    progress: the last that the gateway sent, None if the request had not begun.
    last_extended: when its gateway last extended it.
    ended: when it ended.
    """

    reservation: Reservation
    note: dict[str, Any]
    progress: LeaseProgress | None
    last_extended: datetime
    ended: datetime


def read_expired(
    tenant_id: str, lease_ms: int, request_id: bytes, tokens: int, note: bytes, progress: bytes, at: int, ended_ms: int
) -> ExpiredLease:
    """Return a lease from the script's reply."""
    ended = moment(ended_ms * 1000)
    return ExpiredLease(
        reservation=Reservation(
            request_id=request_id.decode(),
            tenant_id=tenant_id,
            tokens=tokens,
            max_tokens=0,
            headers={},
            admitted_at=moment(at),
        ),
        note=msgspec.json.decode(note),
        progress=msgspec.json.decode(progress, type=LeaseProgress) if progress else None,
        last_extended=ended - timedelta(milliseconds=lease_ms),
        ended=ended,
    )


def moment(microseconds: int) -> datetime:
    """Return a time given in microseconds since 1970."""
    return EPOCH + timedelta(microseconds=microseconds)
