"""Webhooks that several requests write at the same moment: one of each name, and no more than a tenant may have."""

from gateway.errors import BadRequest
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from gateway.records.webhooks.targets import MAX_OF_TENANT, Webhooks
from tests.gateway.records.test_simultaneous_changes import AT_ONCE, at_once


async def test_first_puts_of_a_webhook_make_one(connected: Database):
    webhooks = Webhooks(connected)
    made = await at_once(*(webhooks.put("pager", f"https://h/{n}", None, None, "op") for n in range(AT_ONCE)))
    assert sorted(is_new for _, is_new in made) == [False] * (AT_ONCE - 1) + [True]
    assert len({webhook.id for webhook, _ in made}) == 1


async def test_webhooks_that_are_added_at_once_stay_within_the_limit(connected: Database):
    acme = await Tenants(connected).create("acme", {}, "op")
    webhooks = Webhooks(connected)
    made = await at_once(*(webhooks.put(f"hook{n}", "https://h/", None, acme, "op") for n in range(AT_ONCE)))
    assert sum(isinstance(each, BadRequest) for each in made) == AT_ONCE - MAX_OF_TENANT
    assert len(await webhooks.all()) == MAX_OF_TENANT
