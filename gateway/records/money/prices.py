"""Prices of tokens by model, and the price that applies to a request.

Every gateway keeps all prices in memory and reloads them after a change, so that no request waits for SQL.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, Select, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, RecordNotFound
from gateway.records.adapters.catalog import Model
from gateway.records.audit import record_change
from gateway.records.bases.registry import Bases
from gateway.records.caches.changes import PRICES, Changes, count_change
from gateway.records.sql.database import Database
from gateway.records.sql.name_locks import lock_creation
from gateway.records.sql.tables import plans, prices, tenants
from wire.money import MICRO_UNITS

# The base model's name, an adapter as "tenant/name", all of a tenant's adapters as "tenant/*", or everything as "*".
MODEL = re.compile(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,255}")
EVERYTHING = "*"
# All adapters of every tenant, in the prices of a plan.
ALL_ADAPTERS = "*/*"


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Prices in micro-units of the deployment's currency per million tokens. cached: price of prompt tokens from a
    cache.
    """

    input: int = 0
    cached: int = 0
    output: int = 0

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> int:
        """Return the cost in micro-units, rounded up once. cached_tokens: the cached part of the prompt's tokens."""
        computed = prompt_tokens - cached_tokens
        return -(
            -(computed * self.input + cached_tokens * self.cached + completion_tokens * self.output) // MICRO_UNITS
        )

    def highest_cost(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the highest possible cost, before it is known how much of the prompt is cached."""
        return -(-(prompt_tokens * self.highest_input + completion_tokens * self.output) // MICRO_UNITS)

    @property
    def highest_input(self) -> int:
        """Return the highest possible price of a prompt token, before it is known which tokens are cached."""
        return max(self.input, self.cached)


FREE = Price()


class PricedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A price as stored."""

    model: str
    price: Price
    updated_at: datetime


class Prices:
    """The stored prices. Raises RecordNotFound, BadRequest (param "model") and Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> list[PricedModel]:
        async with self._database.read() as connection:
            rows = (await connection.execute(select(prices).order_by(prices.c.model))).all()
        return [_read(row) for row in rows]

    async def of_plans(self) -> dict[str, dict[str, Price]]:
        """Return the prices of each plan that has some."""
        async with self._database.read() as connection:
            rows = (await connection.execute(select(plans.c.name, plans.c.prices).where(plans.c.prices != "{}"))).all()
        return {row.name: msgspec.json.decode(row.prices, type=dict[str, Price]) for row in rows}

    async def put(self, model: str, price: Price, actor: str) -> PricedModel:
        if not MODEL.fullmatch(model):
            raise BadRequest(
                "Expected the base model's name, an adapter as 'tenant/name', all adapters of a tenant as 'tenant/*', "
                "or '*'; 1 to 256 characters.",
                param="model",
            )
        entry = PricedModel(model=model, price=price, updated_at=datetime.now(UTC))
        values = {**msgspec.structs.asdict(price), "updated_at": entry.updated_at}
        async with self._database.write() as connection:
            await lock_creation(connection, "price", model)
            row = (await connection.execute(_locked(model))).one_or_none()
            if row is None:
                await connection.execute(insert(prices).values(model=model, **values))
            else:
                await connection.execute(update(prices).where(prices.c.model == model).values(**values))
            before = None if row is None else msgspec.structs.asdict(_read(row).price)
            await record_change(connection, actor, "price.put", model, msgspec.structs.asdict(price), before=before)
            await _count_change(connection, model)
        return entry

    async def delete(self, model: str, actor: str) -> None:
        # Databases refuse a NUL in a text.
        if not MODEL.fullmatch(model):
            raise RecordNotFound(f"There is no price of '{model[:256]}'.", param="model")
        async with self._database.write() as connection:
            row = (await connection.execute(_locked(model))).one_or_none()
            if row is None:
                raise RecordNotFound(f"There is no price of '{model}'.", param="model")
            await connection.execute(delete(prices).where(prices.c.model == model))
            before = msgspec.structs.asdict(_read(row).price)
            await record_change(connection, actor, "price.delete", model, before=before)
            await _count_change(connection, model)


def _locked(model: str) -> Select[Any]:
    return select(prices).where(prices.c.model == model).with_for_update()


async def _count_change(connection: AsyncConnection, model: str) -> None:
    """Count a change of prices and of the tenant that owns the priced adapter.

    The tenant's counter is needed because `Model.names` depends on prices.
    """
    owner = select(tenants.c.id).where(tenants.c.name == model.partition("/")[0])
    tenant_id = (await connection.execute(owner)).scalar_one_or_none() if "/" in model else None
    await count_change(connection, PRICES, tenant_id or PRICES)


class PriceList:
    """All prices in memory.

    An adapter has the highest price of the tenant's names for its content, so that a further name never makes it
    cheaper. Without such a price, the first existing price of "tenant/*", the tenant's plan, its base model and "*"
    applies. A plan has prices of "*/*" (all adapters), base models and "*". Without any price a model is free. A
    mixture has the highest price of its parts. currency: ISO 4217 code of all prices.
    """

    def __init__(self, prices: Prices, bases: Bases, currency: str = "USD") -> None:
        self.currency = currency
        self._prices = prices
        self._bases = bases
        self._known: dict[str, Price] = {}
        self._of_plans: dict[str, dict[str, Price]] = {}

    def price(self, tenant_name: str, model: Model, plan: str | None = None) -> Price:
        """Return the price of a tenant's request to a model. plan: the tenant's."""
        if model.parts:
            return _dearest([self.price(tenant_name, part, plan) for part in model.parts])
        known = self._known
        own = [known[key] for name in model.names if (key := f"{tenant_name}/{name}") in known]
        if own:
            return own[0] if len(own) == 1 else _dearest(own)
        of_plan = self._of_plans.get(plan or "", {})
        adapters = (known.get(f"{tenant_name}/{EVERYTHING}"), of_plan.get(ALL_ADAPTERS))
        base = self._bases.name_of(model.base) or EVERYTHING
        every = (prices.get(name) for prices in (of_plan, known) for name in (base, EVERYTHING))
        rules = (*(adapters if model.digest is not None else ()), *every)
        return next((price for price in rules if price is not None), FREE)

    def own_names(self, tenant_name: str) -> set[str]:
        """Return the tenant's names of adapters that have a price of their own."""
        start = f"{tenant_name}/"
        return {key.removeprefix(start) for key in self._known if key.startswith(start)} - {EVERYTHING}

    async def refresh(self) -> None:
        """Load all prices. Raises Unavailable; the previous prices then stay in force."""
        known = {entry.model: entry.price for entry in await self._prices.list()}
        self._of_plans = await self._prices.of_plans()
        self._known = known

    async def watch(self, changes: Changes) -> None:
        """Reload prices after each change, until cancelled. Run it as a task."""
        await changes.follow(PRICES, self.refresh)


def _dearest(prices: Sequence[Price]) -> Price:
    return Price(**{name: max(getattr(price, name) for price in prices) for name in Price.__struct_fields__})


def _read(row: Row) -> PricedModel:
    return PricedModel(
        model=row.model,
        price=Price(input=row.input, cached=row.cached, output=row.output),
        updated_at=row.updated_at,
    )
