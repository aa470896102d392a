"""Limits in the database: migration of an existing database, and gateways of the previous release beside this one."""

from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text

import migrations
from gateway.records.keys.keys import Keys
from gateway.records.sql.database import Database
from gateway.records.tenants.limits import DEFAULT_LIMITS, Limits
from gateway.records.tenants.tenants import Tenants

TENANT = (
    "INSERT INTO tenants (id, name, requests_per_minute, tokens_per_day, budget_per_month, weight, priority,"
    " on_token_limit, suspended, model_limits, created_at) VALUES ('t1', 'acme', 600, 5000, 10000000000000, 1.0, 5,"
    " 'refuse', false, '{}', '2026-01-01 00:00:00')"
)
KEY = (
    "INSERT INTO api_keys (id, tenant_id, label, scopes, secret_hash, max_concurrent, created_at)"
    " VALUES ('0123456789abcdef', 't1', 'old', 'inference', 'x', 7, '2026-01-01 00:00:00')"
)
OF_TENANT = Limits(requests_per_minute=600, tokens_per_day=5000, budget_per_month=10**13)


def to(revision: str) -> Any:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    def upgrade(connection: Any) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    return upgrade


async def test_limits_of_an_existing_database_are_carried_over(database_url: str):
    database = Database(database_url)
    async with database.write() as connection:
        await connection.run_sync(to("0006"))
        await connection.execute(text(TENANT))
        await connection.execute(text(KEY))
    await database.upgrade()
    tenant = await Tenants(database).get("acme")
    assert tenant.limits == OF_TENANT
    [key] = await Keys(database).list(tenant)
    assert key.limits == Limits(max_concurrent=7)
    async with database.read() as connection:
        stored = (await connection.execute(text("SELECT limits FROM tenants"))).scalar_one()
    assert stored == '{"requests_per_minute": 600, "tokens_per_day": 5000, "budget_per_month": 10000000000000}'
    await database.close()


async def test_gateways_of_the_release_before_add_and_change_limits(database: Database):
    tenants = Tenants(database)
    async with database.write() as connection:
        await connection.execute(text(TENANT))
    assert (await tenants.get("acme")).limits == OF_TENANT
    changed = await tenants.update("acme", {"requests_per_day": 9, "tokens_per_day": 6000}, "op")
    assert changed.limits == Limits(
        requests_per_minute=600, tokens_per_day=6000, budget_per_month=10**13, requests_per_day=9
    )
    async with database.write() as connection:
        # The release before reads our change, and makes one.
        stored = (await connection.execute(text("SELECT tokens_per_day FROM tenants"))).scalar_one()
        await connection.execute(text("UPDATE tenants SET tokens_per_day = NULL, requests_per_minute = 5"))
    assert stored == 6000
    expected = Limits(requests_per_minute=5, budget_per_month=10**13, requests_per_day=9)
    assert (await tenants.get("acme")).limits == expected
    assert (await tenants.update("acme", {"weight": 2.0}, "op")).limits == expected


async def test_kinds_of_a_newer_release_stay_as_they_are(database: Database):
    tenants = Tenants(database)
    await tenants.create("acme", {}, "op")
    async with database.write() as connection:
        await connection.execute(text("UPDATE tenants SET limits = '{\"images_per_hour\": 3}'"))
    assert (await tenants.get("acme")).limits == DEFAULT_LIMITS
    await tenants.update("acme", {"requests_per_day": 1}, "op")
    async with database.read() as connection:
        stored = (await connection.execute(text("SELECT limits FROM tenants"))).scalar_one()
    assert '"images_per_hour":3' in stored


@pytest.mark.parametrize("value", [0, -1, 10**10, "1", 1.5])
async def test_a_value_out_of_range_is_refused(gateway: Any, value: Any):
    refused = await gateway.admin.post("/admin/api/tenants", {"name": "acme", "requests_per_day": value})
    assert refused.status == 400
    assert refused.error["param"] == "requests_per_day"


async def test_a_kind_is_enforced_shown_and_removed(gateway: Any):
    """`requests_per_day` has no code of its own: it is only an entry of KINDS."""
    tenant = await gateway.tenant("acme", requests_per_day=2)
    for left in (1, 0):
        got = await tenant.chat()
        assert (got.status, got.headers["x-ratelimit-remaining-requests"]) == (200, str(left))
    refused = await tenant.chat()
    assert (refused.status, refused.json["error"]["type"]) == (429, "requests")
    assert (
        "this tenant: 2 requests per day; needed 1, remaining 0. Try again in 12 h" in refused.json["error"]["message"]
    )
    assert (await gateway.admin.get("/admin/api/tenants/acme")).json["requests_per_day"] == 2
    changed = await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"requests_per_day": None})
    assert changed.json["requests_per_day"] is None
    assert (await tenant.chat()).status == 200
