"""The same change to many tenants: a preview, and the change itself once its count is confirmed."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, select

from gateway.errors import Conflict
from gateway.process.background import run_to_end
from gateway.records.cooperative_rows import in_pieces
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants
from gateway.records.tenants.list import TenantFilter, TenantLists
from gateway.records.tenants.tenants import Tenant, change_tenant, plan_terms, read_tenant

# Maximum tenants per transaction, because other changes of these tenants wait for its end.
AT_ONCE = 50


class BulkChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Change of every matching tenant. fields: `plan` and `suspended`, as in `change_tenant`. inherit: the
    tenants' own terms to remove.
    """

    fields: dict[str, Any] = {}
    inherit: tuple[str, ...] = ()
    add_tags: tuple[str, ...] = ()
    remove_tags: tuple[str, ...] = ()

    def of(self, tenant: Tenant) -> dict[str, Any]:
        """Return the changes that this tenant needs; empty if none."""
        changes = {name: value for name, value in self.fields.items() if getattr(tenant, name) != value}
        tags = tuple(sorted((set(tenant.tags) | set(self.add_tags)) - set(self.remove_tags)))
        if tags != tenant.tags:
            changes["tags"] = tags
        if inherited := tuple(name for name in self.inherit if getattr(tenant.own, name) is not msgspec.UNSET):
            changes["inherit"] = inherited
        return changes


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant to change. before: the present values of the changed fields and of the terms to inherit."""

    tenant: str
    before: dict[str, Any]
    after: dict[str, Any]


class TenantBulk:
    """Changes of many tenants, in transactions of at most AT_ONCE, each tenant with its own audit entry."""

    def __init__(self, database: Database, lists: TenantLists) -> None:
        self._database = database
        self._lists = lists

    async def plan(self, criteria: TenantFilter, change: BulkChange) -> list[Planned]:
        """Return the tenants that would change, in the order of their names. Raises BadRequest for an unknown plan."""
        planned = await in_pieces(await self._changing(criteria, change), lambda each: _planned(*each))
        return sorted(planned, key=lambda each: each.tenant)

    async def apply(self, criteria: TenantFilter, change: BulkChange, expect: int, actor: str) -> list[str]:
        """Change the matching tenants; return the names of those that were changed.

        A tenant that another change has deleted, or changed in the same way, meanwhile is left out. Raises Conflict,
        before anything is changed, if another number of tenants than `expect` would change, and BadRequest for an
        unknown plan.
        """
        # Changes of plans lock tenants in the order of ids too, so that neither waits for the other in a deadlock.
        found = await self._changing(criteria, change)
        if len(found) != expect:
            raise Conflict(
                f"expect: {len(found)} tenants would change, not {expect}. Look at them again with ?dry_run=true.",
                param="expect",
                code="count_differs",
            )
        return await run_to_end(self._apply(found, change, actor))

    async def _apply(
        self, selected: Sequence[tuple[Tenant, dict[str, Any]]], change: BulkChange, actor: str
    ) -> list[str]:
        changed: list[str] = []
        for some in _chunks(selected):
            async with self._database.write() as connection:
                # A change of the plan locks the plan before its tenants too.
                await plan_terms(connection, change.fields.get("plan"), lock=True)
                for tenant, _ in some:
                    row = (await connection.execute(_locked(tenant.id))).one_or_none()
                    # The present row, so that no change since the first reading is lost.
                    changes = {} if row is None else change.of(read_tenant(row))
                    if changes:
                        await change_tenant(connection, tenant.name, changes, actor)
                        changed.append(tenant.name)
        return sorted(changed)

    async def _changing(self, criteria: TenantFilter, change: BulkChange) -> list[tuple[Tenant, dict[str, Any]]]:
        """Return the matching tenants that would change, in the order of their ids, with their changes.

        Raises BadRequest for an unknown plan.
        """
        async with self._database.read() as connection:
            await plan_terms(connection, change.fields.get("plan"), required=True)
        found = await in_pieces(await self._lists.all(criteria), lambda tenant: (tenant, change.of(tenant)))
        return [(tenant, changes) for tenant, changes in found if changes]


def _locked(tenant_id: str) -> Select[Any]:
    return select(tenants).where(tenants.c.id == tenant_id).with_for_update()


def _chunks(selected: Sequence[tuple[Tenant, dict[str, Any]]]) -> Iterator[Sequence[tuple[Tenant, dict[str, Any]]]]:
    for first in range(0, len(selected), AT_ONCE):
        yield selected[first : first + AT_ONCE]


def _planned(tenant: Tenant, changes: dict[str, Any]) -> Planned:
    inherited = changes.get("inherit", ())
    fields = {name: value for name, value in changes.items() if name != "inherit"}
    terms = tenant.terms()
    before = {name: getattr(tenant, name) for name in fields} | {name: terms[name] for name in inherited}
    return Planned(tenant=tenant.name, before=before, after=fields | dict.fromkeys(inherited, "inherited"))
