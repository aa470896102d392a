"""Query of the meanings of a reference to an adapter."""

from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, and_, literal, null, or_, select

from gateway.records.adapters.removed_versions import all_versions
from gateway.records.adapters.rows import READY
from gateway.records.tables import (
    UtcDateTime,
    adapter_alias_targets,
    adapter_probes,
    adapter_versions,
    adapters,
    prices,
)
from wire.model_names import LATEST, Reference


def meanings(tenant_id: str, tenant_name: str, reference: Reference, limited: frozenset[str]) -> Select[Any]:
    """Select the ready versions that a reference means, each with the names whose prices and limits apply to it.

    These are the reference's own name, and every name with a price or in `limited` that means, or ever meant, the
    content. Only the operator adds prices and limits, so a tenant's many names for the same content do not add rows.
    """
    own, version, target = adapters.alias(), adapter_versions.alias(), adapter_alias_targets.alias()
    probe = adapter_probes.alias()
    joined = own.join(version, version.c.adapter_id == own.c.id).outerjoin(
        probe, and_(probe.c.adapter_id == own.c.id, probe.c.version == version.c.version)
    )
    weight: ColumnElement[int] = literal(1, Integer)
    end: ColumnElement[Any] = null().cast(UtcDateTime)
    if reference.version is not None:
        is_meant = version.c.version == reference.version
    elif reference.alias == LATEST:
        is_meant = version.c.version == own.c.current_version
    else:
        is_meant, weight, end = target.c.alias == reference.alias, target.c.weight, target.c.expires_at
        joined = joined.join(target, and_(target.c.adapter_id == own.c.id, target.c.version == version.c.version))
    meant = (
        select(version.c.version, version.c.digest, version.c.base_id, version.c.expires_at, weight.label("weight"))
        .add_columns(end.label("target_expires_at"), probe.c.base_digest)
        .select_from(joined)
        .where(own.c.tenant_id == tenant_id, own.c.name == reference.name, version.c.state == READY, is_meant)
        .cte("meant")
    )

    def is_ruled(named: ColumnElement[str], content: ColumnElement[str]) -> ColumnElement[bool]:
        priced = select(prices.c.model).where(prices.c.model == literal(f"{tenant_name}/").concat(named)).exists()
        ruled = or_(named == reference.name, named.in_(sorted(limited)), priced)
        return and_(content.in_(select(meant.c.digest)), ruled)

    ever = all_versions(tenant_id, is_ruled)
    return select(meant, ever.c.name.label("named")).join_from(meant, ever, ever.c.digest == meant.c.digest)
