"""Compatibility of releases and schemas: gateways of two releases share one database during a rolling upgrade.

A change of the schema expands first and contracts a release later. A migration that only expands (a table, a column
with a default or NULL) leaves `schema_support` as it is. A migration that contracts, or that older programs would
misread, sets `oldest_program`: the newest schema version known to the oldest release that still works.
"""

from collections.abc import Sequence

from sqlalchemy import Column, Connection, String, Table, inspect, select

from gateway.records.sql.schema import metadata

# A single row: the newest schema version known to the oldest supported release.
schema_support = Table("schema_support", metadata, Column("oldest_program", String(32), primary_key=True))


def find_problem(connection: Connection, current: str | None, known: Sequence[str]) -> str | None:
    """Return the reason why this program cannot run on a database's schema, None if it can.

    current: the schema's version. known: the versions that this program knows, the newest first; it was made for that.
    """
    if current == known[0]:
        return None
    if current is None or current in known:
        return f"schema is at {current or 'nothing'}, expected {known[0]}; run `loraplex migrate`"
    oldest = _oldest_program(connection)
    if oldest in known:
        return None
    return (
        f"schema is at {current}, of a newer release that supports programs of schema {oldest or 'unknown'} and later; "
        f"this program is of {known[0]}: install a newer release"
    )


def _oldest_program(connection: Connection) -> str | None:
    if not inspect(connection).has_table(schema_support.name):
        return None
    return connection.execute(select(schema_support.c.oldest_program)).scalar_one_or_none()
