"""Prices of many adapters of a tenant at once, for lists of models."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select

from gateway.records.adapters.catalog import Adapter, Model
from gateway.records.adapters.removed_versions import all_versions
from gateway.records.money.prices import Price, PriceList
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant


class AdapterPrices:
    """Prices of adapters, with one query if the tenant has prices of its own. Raises Unavailable."""

    def __init__(self, database: Database, prices: PriceList) -> None:
        self._database = database
        self.list = prices

    async def of(self, tenant: Tenant, adapters: Sequence[Adapter]) -> list[Price]:
        """Return the price of each adapter: its own name's, or that of another name that ever had its content."""
        names = defaultdict(set)
        priced = self.list.own_names(tenant.name)
        if priced and adapters:
            ever = all_versions(tenant.id, lambda name, _: name.in_(sorted(priced)))
            async with self._database.read() as connection:
                for row in await connection.execute(select(ever.c.digest, ever.c.name)):
                    names[row.digest].add(row.name)
        return [
            self.list.price(
                tenant.name,
                Model(
                    name=each.name,
                    digest=each.digest,
                    names=(each.name, *sorted(names[each.digest])),
                    base=each.base,
                ),
                tenant.plan,
            )
            for each in adapters
        ]
