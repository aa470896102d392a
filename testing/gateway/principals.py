"""Principals with any limits, for tests that need no database."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gateway.access.auth import TenantPrincipal
from gateway.records.tenants.tenants import Limits, Tenant


def principal(
    *,
    tenant: Mapping[str, int] | None = None,
    key: Mapping[str, int] | None = None,
    model: Mapping[str, int] | None = None,
    tenant_id: str | None = None,
    key_id: str = "0123456789abcdef",
    key_family: str = "",
    **fields: Any,
) -> TenantPrincipal:
    """Return a principal.

    tenant, key, model: limits of each, for the model "base". fields: other fields of the tenant.
    """
    return TenantPrincipal(
        key_id=key_id,
        key_family=key_family,
        key_limits=Limits(**key or {}),
        tenant=Tenant(
            id=tenant_id or uuid.uuid4().hex,
            name="t",
            limits=Limits(**tenant or {}),
            created_at=datetime.now(UTC),
            **{"model_limits": {"base": Limits(**model)} if model else {}} | fields,
        ),
    )
