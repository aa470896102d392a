"""Checks against the present base models, within a transaction that adds a name or a version of a tenant.

A gateway's copy in memory (registry.py) may lack a change that was committed up to KNOWN_SECONDS ago.
"""

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest
from gateway.records.bases.table import bases
from wire.model_names import parse_reference


class _Present(NamedTuple):
    """Columns of a base model's row."""

    id: str
    name: str
    state: str


def reserved_names(names: Collection[str]) -> frozenset[str]:
    """Return the names that no adapter and no saved mixture may have: the bases' names, and the name part of those that
    look like a reference, such as `name@3`.
    """
    lowered = {name.lower() for name in names}
    references = (parse_reference(name) for name in lowered)
    return frozenset(lowered | {each.name for each in references if each is not None})


def taken_by_base(name: str, kind: str) -> BadRequest:
    """Return the error for a name of a base model. kind: `adapter` or `mixture`."""
    return BadRequest(f"'{name}' is a base model's name; choose another for the {kind}.", param="name")


async def check_base(connection: AsyncConnection, name: str, base_id: str) -> None:
    """Check that no base model has the name of an adapter, and that its own accepts adapters. Raises BadRequest.

    No base model changes until the transaction ends.
    """
    found = await _lock_bases(connection)
    _check_free(found, name, "adapter")
    own = next((row for row in found if row.id == base_id), None)
    if own is not None and own.state != "active":
        raise BadRequest(f"base: the base model '{own.name}' is {own.state} and takes no new adapters.", param="base")


async def check_not_base(connection: AsyncConnection, name: str, kind: str) -> None:
    """Check that no base model has the name of a new `kind`, until the transaction ends. Raises BadRequest."""
    _check_free(await _lock_bases(connection), name, kind)


async def _lock_bases(connection: AsyncConnection) -> list[_Present]:
    """Lock the base models against changes until the transaction ends, and return them.

    The tenant is locked before them, so that no two transactions wait for each other.
    """
    if connection.dialect.name == "postgresql":
        # Conflicts with the lock of a change of the base models (records.py), but not with itself.
        await connection.execute(text("LOCK TABLE bases IN ROW EXCLUSIVE MODE"))
    rows = await connection.execute(select(bases.c.id, bases.c.name, bases.c.state))
    return [_Present(*row) for row in rows.all()]


def _check_free(present: Collection[_Present], name: str, kind: str) -> None:
    if name in reserved_names([row.name for row in present]):
        raise taken_by_base(name, kind)
