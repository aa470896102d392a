"""Checks after `ledger_chaos`: the ledger against the engine's books, its sums, and the tenants' budgets in Redis."""

import asyncio
import contextlib
import shutil
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import asyncpg
from redis.asyncio import Redis

from engine.answering.usage_log import KILLED, UsageLog
from wire.responses import FinishedRequest

COMPARED = ("prompt_tokens", "completion_tokens", "cached_tokens")
COSTS = "SELECT tenant_id, sum(cost) AS cost FROM usage GROUP BY tenant_id"


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        await asyncio.sleep(0.1)


async def check(
    database_url: str, books_file: Path, redis_socket: Path, ask: Callable[[], Awaitable[None]], seconds: float
) -> dict[str, Any]:
    """Compare the ledger with the engine's books after settlement. ask: sends a request of each tenant."""
    connection = await asyncpg.connect(database_url)
    await until_there(connection, books_file, seconds)
    await until_budgets_agree(connection, redis_socket, ask, seconds)
    # Includes the requests sent for the budget check.
    engines = await until_there(connection, books_file, seconds)
    ledger = {row["request_id"]: row for row in await connection.fetch("SELECT * FROM usage")}
    sums = "requests", *COMPARED
    totals = []
    for table, columns in (
        ("usage", ", ".join(["count(*)", *(f"sum({name})" for name in COMPARED)])),
        ("usage_hourly", ", ".join(f"sum({name})" for name in sums)),
        ("usage_daily", ", ".join(f"sum({name})" for name in sums)),
    ):
        [row] = await connection.fetch(f"SELECT {columns} FROM {table}")
        totals.append([int(value or 0) for value in row])
    counts = await connection.fetch("SELECT tableoid::regclass::text AS name, count(*) AS rows FROM usage GROUP BY 1")
    tables: dict[str, int] = {row["name"]: row["rows"] for row in counts}
    rejected = await connection.fetchval("SELECT count(*) FROM usage_rejected")
    costs = {row["tenant_id"]: int(row["cost"]) for row in await connection.fetch(COSTS)}
    await connection.close()
    spent = await read_spent(redis_socket, costs, seconds)
    missing = sorted(engines.keys() - ledger.keys())
    wrong = {
        id_: (
            [ledger[id_][name] for name in COMPARED],
            [getattr(found, name) for name in COMPARED],
            found.finish_reason,
        )
        for id_, found in engines.items()
        if id_ in ledger and any(ledger[id_][name] != getattr(found, name) for name in COMPARED)
    }
    invented = [id_ for id_, row in ledger.items() if id_ not in engines and row["completion_tokens"]]
    return {
        "engine_requests": len(engines),
        "engine_completion_tokens": sum(found.completion_tokens for found in engines.values()),
        "ledger_rows": len(ledger),
        "ledger_completion_tokens": totals[0][2],
        "missing": len(missing),
        "missing_books": {id_: repr(engines[id_]) for id_ in missing[:5]},
        "invented": len(invented),
        "invented_ids": invented[:5],
        "different": len(wrong),
        "different_by_engine_kill": sum(reason == KILLED for *_, reason in wrong.values()),
        "examples": dict(list(wrong.items())[:5]),
        "sums_agree": totals[0] == totals[1] == totals[2],
        "sums": dict(zip(("usage", "usage_hourly", "usage_daily"), totals, strict=True)),
        "cost": sum(costs.values()),
        "budgets_agree": spent == costs,
        "budgets_in_redis_and_ledger": {id_: (spent[id_], cost) for id_, cost in costs.items() if spent[id_] != cost},
        "rejected": rejected,
        "tables": tables,
        "statuses": dict(Counter(row["status"] for row in ledger.values())),
    }


async def until_there(connection: Any, books_file: Path, seconds: float) -> dict[str, FinishedRequest]:
    """Wait until each request in the engine's books has a row; return the books."""
    # A copy, because the engine continues to write its own.
    books = UsageLog(Path(await asyncio.to_thread(shutil.copy, books_file, f"{books_file}-copy")))
    engines = {id_: found for id_ in books.ids() if (found := books.get(id_)) is not None}
    books.close()

    async def all_there() -> bool:
        rows = await connection.fetch("SELECT request_id FROM usage")
        return engines.keys() <= {row["request_id"] for row in rows}

    with contextlib.suppress(TimeoutError):
        await until(all_there, seconds, "")
    return engines


async def until_budgets_agree(
    connection: Any, socket_path: Path, ask: Callable[[], Awaitable[None]], seconds: float
) -> None:
    """Wait until Redis holds the ledger's spending against each budget.

    A request that was admitted before Redis lost its state reaches the budget through the ledger, when a later request
    of its tenant triggers another query of the ledger (quota.lua, `backfill`). Each tenant sends requests until then.
    """

    async def agree() -> bool:
        costs = {row["tenant_id"]: int(row["cost"]) for row in await connection.fetch(COSTS)}
        if await read_spent(socket_path, costs, seconds) == costs:
            return True
        await ask()
        await asyncio.sleep(1.0)
        return False

    with contextlib.suppress(TimeoutError):
        await until(agree, seconds, "")


async def read_spent(socket_path: Path, tenant_ids: Iterable[str], seconds: float) -> dict[str, int]:
    """Return what Redis holds against each tenant's budget, after all their reservations are released."""
    found = {}
    async with Redis(unix_socket_path=str(socket_path)) as redis:

        async def all_settled() -> bool:
            return not any([await redis.exists(f"loraplex:{{{tenant_id}}}:held") for tenant_id in tenant_ids])

        with contextlib.suppress(TimeoutError):
            await until(all_settled, seconds, "")
        for tenant_id in tenant_ids:
            state = await redis.hget(f"loraplex:{{{tenant_id}}}:quota", "tenant:b")
            # The client decodes no answers.
            assert state is None or isinstance(state, bytes)
            found[tenant_id] = int(struct.unpack_from("dd", state)[1]) if state else 0
    return found


def amiss(found: dict[str, Any]) -> list[str]:
    """Return the names of the failed checks."""
    failed = [name for name in ("missing", "invented", "different", "rejected") if found[name]]
    if found["engine_completion_tokens"] != found["ledger_completion_tokens"]:
        failed.append("completion_tokens")
    return failed + [name for name in ("sums_agree", "budgets_agree") if not found[name]]


def is_exact(found: dict[str, Any]) -> bool:
    """Return whether every check passed."""
    return not amiss(found)
