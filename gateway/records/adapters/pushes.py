"""New versions of adapters, and the conditions under which they are added."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.adapters.limits import check_room
from gateway.records.adapters.rows import Version, lock_name, versions_of
from gateway.records.adapters.saved_mixtures import check_not_saved
from gateway.records.bases.base import FIRST
from gateway.records.bases.checks import check_base
from gateway.records.tenants.tenants import Tenant
from gateway.records.version_state import READY, State


async def _already_stored() -> None:
    """Do nothing, because the content is already in the store."""


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """A new version. base: id of its base model.

    publish: puts the content into the store. It is called after the version is allowed and before it is added, so that
    a refused version stores nothing and every version has content. state: ready or validating; a version that is
    validating becomes ready or rejected by `Versions.set_state`, and `latest` moves then.
    """

    digest: str
    rank: int
    num_bytes: int
    publish: Callable[[], Awaitable[None]] = _already_stored
    state: State = READY
    base: str = FIRST


async def admit(
    connection: AsyncConnection, tenant: Tenant, name: str, push: Push
) -> tuple[Row[Any] | None, dict[int, Version], Version | None]:
    """Check that a version may be added, and lock until the transaction ends everything that this depends on.

    Returns the name's row, None for a new name; its versions; and `latest` if the push repeats it. Raises
    RecordNotFound, BadRequest, AdapterLimitExceeded.
    """
    own = await lock_name(connection, tenant.id, name)
    present = await versions_of(connection, tenant.id, name)
    current = None if own is None else present.get(own.current_version)
    if current is not None and current.is_served and (current.digest, current.base) == (push.digest, push.base):
        await check_base(connection, name, push.base)
        return own, present, current
    is_new = not any(each.digest for each in present.values())
    await check_room(connection, tenant.id, push.digest, push.num_bytes, new_name=is_new)
    if is_new:
        await check_not_saved(connection, tenant.id, name)
    await check_base(connection, name, push.base)
    return own, present, None
