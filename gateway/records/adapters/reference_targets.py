"""Query of the meanings of a reference to an adapter."""

from functools import cache
from typing import Any, Literal

from sqlalchemy import ColumnElement, Integer, Select, Text, and_, bindparam, literal, null, or_, select

from gateway.records.adapters.removed_versions import all_versions
from gateway.records.sql.tables import (
    UtcDateTime,
    adapter_alias_targets,
    adapter_probes,
    adapter_versions,
    adapters,
    prices,
)
from gateway.records.version_state import READY
from wire.model_names import LATEST, Reference

Kind = Literal["version", "latest", "alias"]


def meanings(
    tenant_id: str, tenant_name: str, reference: Reference, limited: frozenset[str]
) -> tuple[Select[Any], dict[str, Any]]:
    """Return the query of the ready versions that a reference means, and its parameters.

    Each row has a name whose prices and limits apply to the version. These are the reference's own name, and every name
    with a price or in `limited` that means, or ever meant, the content. Only the operator adds prices and limits, so a
    tenant's many names for the same content do not add rows.
    """
    kind: Kind = "alias"
    if reference.version is not None:
        kind = "version"
    elif reference.alias == LATEST:
        kind = "latest"
    meant = {} if kind == "latest" else {kind: reference.version if kind == "version" else reference.alias}
    own = {"tenant_id": tenant_id, "name": reference.name, "prefix": f"{tenant_name}/", "limited": sorted(limited)}
    return _query(kind), own | meant


# Made once: a query for each request would cost 1 ms, and leave 600 objects that refer to each other.
@cache
def _query(kind: Kind) -> Select[Any]:
    own, version, target = adapters.alias(), adapter_versions.alias(), adapter_alias_targets.alias()
    probe = adapter_probes.alias()
    tenant_id, name = bindparam("tenant_id", type_=Text), bindparam("name", type_=Text)
    joined = own.join(version, version.c.adapter_id == own.c.id).outerjoin(
        probe, and_(probe.c.adapter_id == own.c.id, probe.c.version == version.c.version)
    )
    weight: ColumnElement[int] = literal(1, Integer)
    end: ColumnElement[Any] = null().cast(UtcDateTime)
    if kind == "version":
        is_meant = version.c.version == bindparam("version")
    elif kind == "latest":
        is_meant = version.c.version == own.c.current_version
    else:
        is_meant, weight, end = target.c.alias == bindparam("alias"), target.c.weight, target.c.expires_at
        joined = joined.join(target, and_(target.c.adapter_id == own.c.id, target.c.version == version.c.version))
    meant = (
        select(version.c.version, version.c.digest, version.c.base_id, version.c.expires_at, weight.label("weight"))
        .add_columns(end.label("target_expires_at"), probe.c.base_digest)
        .select_from(joined)
        .where(own.c.tenant_id == tenant_id, own.c.name == name, version.c.state == READY, is_meant)
        .cte("meant")
    )

    def is_ruled(named: ColumnElement[str], content: ColumnElement[str]) -> ColumnElement[bool]:
        full_name = bindparam("prefix", type_=Text).concat(named)
        priced = select(prices.c.model).where(prices.c.model == full_name).exists()
        ruled = or_(named == name, named.in_(bindparam("limited", expanding=True)), priced)
        return and_(content.in_(select(meant.c.digest)), ruled)

    ever = all_versions(tenant_id, is_ruled)
    return select(meant, ever.c.name.label("named")).join_from(meant, ever, ever.c.digest == meant.c.digest)
