"""Changes of one record at the same moment: each is made, or refused as a conflict."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from gateway.records.database import Database
from gateway.records.events.webhooks import MAX_OF_TENANT, Webhooks
from gateway.records.money.prices import Price, Prices
from gateway.records.tenants.plans import Plans
from gateway.records.tenants.tenants import Tenants
from gateway.records.tenants.terms import NO_TERMS

AT_ONCE = 8


async def at_once(*changes: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*changes, return_exceptions=True)


async def test_first_puts_of_a_plan_all_succeed(connected: Database):
    plans = Plans(connected)
    made = await at_once(*(plans.put("gold", NO_TERMS, {"*": Price(input=n)}, "op") for n in range(AT_ONCE)))
    assert [type(each).__name__ for each in made] == ["Plan"] * AT_ONCE
    assert [each.name for each in await plans.list()] == ["gold"]


async def test_first_puts_of_a_price_all_succeed(connected: Database):
    prices = Prices(connected)
    made = await at_once(*(prices.put("*", Price(input=n), "op") for n in range(AT_ONCE)))
    assert [type(each).__name__ for each in made] == ["PricedModel"] * AT_ONCE
    assert [each.model for each in await prices.list()] == ["*"]


async def test_first_puts_of_a_webhook_make_one(connected: Database):
    webhooks = Webhooks(connected)
    made = await at_once(*(webhooks.put("pager", f"https://h/{n}", None, None, "op") for n in range(AT_ONCE)))
    assert sorted(is_new for _, is_new in made) == [False] * (AT_ONCE - 1) + [True]
    assert len({webhook.id for webhook, _ in made}) == 1


async def test_webhooks_that_are_added_at_once_stay_within_the_limit(connected: Database):
    acme = await Tenants(connected).create("acme", {}, "op")
    webhooks = Webhooks(connected)
    await at_once(*(webhooks.put(f"hook{n}", "https://h/", None, acme, "op") for n in range(AT_ONCE)))
    assert len(await webhooks.all()) == MAX_OF_TENANT
