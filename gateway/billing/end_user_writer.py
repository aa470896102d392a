"""Writer of the sums by end user (gateway/records/usage/end_user_tables.py), in the transaction of their usage rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Executable, Row, case, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.usage.end_user_tables import SUMMED, usage_end_user_days, usage_end_users
from gateway.usage_row import UsageRow

Key = tuple[datetime, str, str]
"""Day, tenant's id and end user."""

KEYS = ("day", "tenant_id", "end_user")
DAY_KEYS = KEYS[:2]


class EndUserWriter:
    """Adds usage rows to the sums. dialect: "sqlite" or "postgresql"."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._add_days = _adding_days(dialect)

    async def add(self, connection: AsyncConnection, rows: Iterable[UsageRow]) -> None:
        """Add rows that are new. All writers lock the sums in the same order: by day, tenant and end user."""
        sums = sums_of(rows)
        given = [sums[key] for key in sorted(sums)]
        if self._dialect == "postgresql":
            found = await connection.execute(ADD_ON_POSTGRESQL, {"rows": msgspec.json.encode(given).decode()})
        else:
            found = await connection.execute(ADD_ON_SQLITE, given)
        await connection.execute(self._add_days, _days_of(sums, found.all()))


def sums_of(rows: Iterable[UsageRow]) -> dict[Key, dict[str, Any]]:
    """Return the sums of each day, tenant and end user, as rows of `usage_end_users`."""
    sums: dict[Key, dict[str, Any]] = {}
    for row in rows:
        day = row.created_at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        key = (day, row.tenant_id, row.end_user or "")
        entry = sums.get(key)
        if entry is None:
            entry = sums[key] = {**dict(zip(KEYS, key, strict=True)), "tenant": row.tenant, **dict.fromkeys(SUMMED, 0)}
        entry["requests"] += 1
        for name in SUMMED[1:]:
            entry[name] += getattr(row, name)
    return sums


def _days_of(added: Mapping[Key, Mapping[str, Any]], sums: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    """Return the changes of `usage_end_user_days`. added: the added sums. sums: the sums after the addition."""
    days: dict[tuple[datetime, str], dict[str, Any]] = {}
    for row in sums:
        more = added[row.day, row.tenant_id, row.end_user]
        empty = {"day": row.day, "tenant_id": row.tenant_id, "end_users": 0, "requests": 0}
        entry = days.setdefault((row.day, row.tenant_id), empty | {f"most_{name}": 0 for name in SUMMED})
        # A sum that has no other requests is new.
        entry["end_users"] += row.requests == more["requests"]
        entry["requests"] += more["requests"]
        for name in SUMMED:
            entry[f"most_{name}"] = max(entry[f"most_{name}"], getattr(row, name))
    return [days[key] for key in sorted(days)]


def _adding_on_sqlite() -> Executable:
    insert = sqlite.insert(usage_end_users)
    adding = insert.on_conflict_do_update(
        index_elements=KEYS, set_={name: usage_end_users.c[name] + insert.excluded[name] for name in SUMMED}
    )
    return adding.returning(*(usage_end_users.c[name] for name in (*KEYS, *SUMMED)))


def _adding_on_postgresql() -> Executable:
    """Return the statement. It has one parameter for all sums, so that the server prepares it only once."""
    table, dialect = usage_end_users.name, postgresql.dialect()
    names = ", ".join(usage_end_users.c.keys())
    columns = ", ".join(f"{column.name} {column.type.compile(dialect)}" for column in usage_end_users.c)
    changes = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in SUMMED)
    keys = ", ".join(KEYS)
    return text(
        f"INSERT INTO {table} ({names}) SELECT {names} FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS row({columns}) "
        f"ORDER BY {keys} ON CONFLICT ({keys}) DO UPDATE SET {changes} RETURNING {keys}, {', '.join(SUMMED)}"
    ).columns(*(usage_end_users.c[name] for name in (*KEYS, *SUMMED)))


def _adding_days(dialect: str) -> Executable:
    table = usage_end_user_days
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    changes: dict[str, Any] = {name: table.c[name] + insert.excluded[name] for name in ("end_users", "requests")}
    for name in (f"most_{name}" for name in SUMMED):
        own, new = table.c[name], insert.excluded[name]
        changes[name] = case((new > own, new), else_=own)
    return insert.on_conflict_do_update(index_elements=DAY_KEYS, set_=changes)


ADD_ON_SQLITE, ADD_ON_POSTGRESQL = _adding_on_sqlite(), _adding_on_postgresql()
