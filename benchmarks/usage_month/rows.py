"""Made-up usage rows of a month, by the hour, made in this process or in a child beside the writer."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NamedTuple

from gateway.billing.writer import failures_of
from gateway.records.requests.refusal_tables import refusal_counts
from gateway.records.sql.tables import usage
from gateway.usage_row import UsageRow

TENANTS, ADAPTERS, ENGINES, DAYS = 1000, 20, 8, 30
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(minutes=31)
STATUSES = ("ok",) * 96 + ("cancelled", "error", "error", "limited")
Maker = Callable[[random.Random, datetime, int], Iterable[UsageRow]]
# Encoder of rows in the form in which a filler writes them.
Encoder = Callable[[Sequence[tuple[Any, ...]]], Any]
_values = attrgetter(*usage.c.keys())
_failure = tuple(name for name in refusal_counts.c.keys() if name != "requests")  # noqa: SIM118


class Hour(NamedTuple):
    """Encoded usage rows and refused requests of an hour. failures: numbers by the keys of `refusal_counts`."""

    rows: Any
    refused: Any
    failures: Counter[tuple[Any, ...]]


def make_rows(chance: random.Random, hour: datetime, number: int) -> Iterable[UsageRow]:
    """Yield the rows of an hour. Popularity is log-uniform, which is Zipf's law with the exponent 1."""
    for i in range(number):
        tenant, adapter = int(TENANTS ** chance.random()), int((ADAPTERS + 1) ** chance.random())
        is_base, status = adapter == 1, STATUSES[int(chance.random() * len(STATUSES))]
        ttft = int(50 * 2 ** (6 * chance.random()))
        yield UsageRow(
            request_id=f"req_{hour:%m%d%H}{i:026}",
            tenant_id=f"{tenant:032}",
            tenant=f"tenant-{tenant}",
            key_id=f"{tenant:016}",
            endpoint="chat.completions",
            model="base" if is_base else f"adapter-{adapter}",
            adapter_digest=None if is_base else "d" * 64,
            engine=f"http://engine-{(tenant + adapter) % ENGINES}:8000",
            prompt_tokens=int(chance.random() * 1000),
            completion_tokens=int(chance.random() * 300),
            cached_tokens=0,
            cost=int(chance.random() * 10_000),
            latency_ms=ttft + int(4000 * chance.random()),
            ttft_ms=ttft,
            status=status,
            finish_reason="stop",
            created_at=hour + timedelta(seconds=3600 * chance.random()),
            version=None if is_base else 1,
            admission_ms=3,
            queue_ms=int(40 * chance.random()),
            reserved_tokens=800,
            end_user=f"user-{int(500 * chance.random())}",
            error_code="engine_error" if status == "error" else "rate_limit_exceeded" if status == "limited" else None,
        )


def make_hours(rows: int, make: Maker, encode: Encoder, now: datetime) -> Iterator[Hour]:
    """Yield the hours of a month, the oldest first."""
    chance, hours = random.Random(1), DAYS * 24
    first = now.replace(minute=0) - timedelta(hours=hours - 1)
    for i in range(hours):
        hour = first + timedelta(hours=i)
        made = list(make(chance, hour, rows // hours))
        failures: Counter[tuple[Any, ...]] = Counter()
        for failed in failures_of(made):
            if failed["level"] > 60 or hour > now - timedelta(hours=50):
                failures[tuple(failed[name] for name in _failure)] += failed["requests"]
        refused = [_refused(row, f"{i}-{j}") for j, row in enumerate(made) if j % 50 == 0]
        yield Hour(encode([_values(row) for row in made]), encode(refused), failures)


async def hours_here(rows: int, make: Maker, encode: Encoder) -> AsyncIterator[Hour]:
    """Yield the hours of a month, made in this process."""
    for hour in make_hours(rows, make, encode, NOW):
        yield hour


async def hours_of_child(rows: int, make: Maker, encode: Encoder) -> AsyncIterator[Hour]:
    """Yield the hours of a month, made in another process while the caller writes the hour before.

    make, encode: functions of modules, which a new process can import.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_hours, args=(sender, partial(make_hours, rows, make, encode, NOW)))
    child.start()
    # Or the end of the child would not end the pipe.
    sender.close()
    try:
        while (hour := await asyncio.to_thread(receiver.recv)) is not None:
            yield hour
    finally:
        receiver.close()
        child.join()


def _send_hours(sender: Connection, hours: Callable[[], Iterator[Hour]]) -> None:
    # The receiver is gone if the writer has failed.
    with suppress(BrokenPipeError):
        for hour in hours():
            sender.send(hour)
        sender.send(None)


def _refused(row: UsageRow, number: str) -> tuple[Any, ...]:
    limit = ("requests_per_minute", "tenant", 60, 1, 0)
    of = (
        row.created_at,
        row.tenant_id,
        row.tenant,
        row.key_id,
        "POST",
        "/v1/chat/completions",
        row.model,
        row.end_user,
    )
    return f"req_refused{number}", *of, 429, "rate_limit_exceeded", None, *limit, 3, "192.0.2.1", 1
