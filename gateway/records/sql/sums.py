"""Sums in SQL as whole numbers."""

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, cast, func


def int_sum(values: ColumnElement[Any]) -> ColumnElement[int]:
    """Return the sum of whole numbers, 0 without any. PostgreSQL's sum of bigints is a numeric, a Decimal in Python."""
    return cast(func.coalesce(func.sum(values), 0), BigInteger)
