"""Changes of one record at the same moment: each is made, or refused as a conflict."""

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from gateway.errors import GatewayError, translate
from gateway.records.money.plans import Plans
from gateway.records.money.prices import Price, Prices
from gateway.records.sql.database import Database
from gateway.records.sql.tables import plans
from gateway.records.tenants.tenants import Tenants
from gateway.records.tenants.terms import NO_TERMS
from gateway.records.webhooks.targets import Webhooks

AT_ONCE = 8


async def at_once(*changes: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*changes, return_exceptions=True)


async def test_first_puts_of_a_plan_all_succeed(connected: Database):
    table = Plans(connected)
    made = await at_once(*(table.put("gold", NO_TERMS, {"*": Price(input=n)}, "op") for n in range(AT_ONCE)))
    assert [type(each).__name__ for each in made] == ["TenantPlan"] * AT_ONCE
    assert [each.name for each in await table.list()] == ["gold"]


async def test_first_puts_of_a_price_all_succeed(connected: Database):
    prices = Prices(connected)
    made = await at_once(*(prices.put("*", Price(input=n), "op") for n in range(AT_ONCE)))
    assert [type(each).__name__ for each in made] == ["PricedModel"] * AT_ONCE
    assert [each.model for each in await prices.list()] == ["*"]


async def test_a_row_that_another_change_made_or_deleted_is_a_conflict(database: Database):
    """Without a lock a change can meet a new row of the same name, or refer to a row that is gone."""
    acme = await Tenants(database).create("acme", {}, "op")
    await Tenants(database).delete("acme", "op", [])
    row = {"name": "gold", "terms": "{}", "prices": "{}", "updated_at": datetime.now(UTC)}

    async def add(**values: Any) -> None:
        async with database.write() as connection:
            await connection.execute(insert(plans).values(**values))

    await add(**row)
    found = [await failure(add(**row))]
    found.append(await failure(Webhooks(database).put("hook", "https://h/", None, acme, "op")))
    assert [(each.status, each.code) for each in found] == [(409, "conflict")] * 2
    # A row that no other change explains is a fault of the gateway.
    assert (await failure(add(**row | {"name": "silver", "terms": None}))).status == 500


async def failure(change: Awaitable[Any]) -> GatewayError:
    """Return the answer to a change that the database refuses."""
    with pytest.raises(IntegrityError) as raised:
        await change
    return translate(raised.value, "req_1")
