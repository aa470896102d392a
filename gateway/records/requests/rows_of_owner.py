"""Rows of one owner, by an index of the owner and the time."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, literal, tuple_

FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


def owned(
    dialect: str,
    owner: ColumnElement[str],
    value: str,
    at: ColumnElement[datetime],
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[ColumnElement[bool]]:
    """Return the conditions for an owner's rows from `since` to `until`, both inclusive; None: no bound.

    PostgreSQL would read the rows of all tenants in the period for a large tenant, by the index of the time alone: it
    expects the rows of one tenant to be far apart on the disk. A comparison of pairs allows only the index of both.
    Order by the owner, then by the time.
    """
    if dialect == "sqlite":
        bounds = [] if since is None else [at >= since]
        return [owner == value, *bounds, *([] if until is None else [at <= until])]
    pair: Any = tuple_(owner, at)

    def bound(moment: datetime) -> Any:
        return tuple_(literal(value, owner.type), literal(moment, at.type))

    return [pair >= bound(since or FIRST), pair <= bound(until or LAST)]


def in_order(dialect: str, rows: Select[Any], order: Sequence[ColumnElement[Any]], most: int) -> Subquery:
    """Return rows as a subquery that is read along the index of `order`, whatever further conditions it gets.

    With these conditions of its own, PostgreSQL reads a large table whole: it assumes that a comparison of pairs
    keeps a third of all rows. It plans a subquery with a limit by itself. SQLite takes the index anyway, and would
    make such a subquery whole before the conditions. most: at least the number of rows.
    """
    return (rows if dialect == "sqlite" else rows.order_by(*order).limit(most)).subquery()
