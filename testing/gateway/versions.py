"""Versions of adapters for tests of the records; their contents are numbers."""

from typing import Any

from gateway.records.adapters.catalog import Catalog
from gateway.records.tenants.tenants import Tenant


def digest(number: int) -> str:
    return f"{number:064x}"


async def add(catalog: Catalog, tenant: Tenant, name: str, *numbers: int, **options: Any) -> None:
    """Add a version for each number. options: as in `Catalog.add_version`."""
    for number in numbers:
        content = {"digest": digest(number), "rank": 8, "num_bytes": 10}
        await catalog.add_version(tenant, name, **content, actor="key", **options)
