"""Limits of ended keys leave Redis once nothing of them counts; those of valid keys and running requests stay."""

import uuid
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.quota import ended_keys
from gateway.quota.ended_keys import EndedKeys
from gateway.quota.limits import Limit
from gateway.quota.quota import Quota
from gateway.quota.store import QuotaStore
from gateway.records.money.prices import FREE
from gateway.records.past_usage import PastUsage
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, tenants
from gateway.redis import sweeps
from gateway.redis.client import Client
from testing.gateway.bases import only
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.running import BASE_MODEL, Gateway, until
from tests.gateway.quota.scripted import SECOND, Script

DAILY = {"tokens_per_day": 1000, "budget_per_month": 10**6, "budget_per_30_days": 10**6, "requests_per_day": 100}
# Limits whose use is paid off after a moment.
KEY = {**DAILY, "requests_per_minute": 600_000, "tokens_per_minute": 10**9, "max_concurrent": 5}


class Valid:
    """Families of which a key is valid."""

    def __init__(self, *families: str) -> None:
        self.families = families

    async def valid_families(self, tenant_id: str, families: Collection[str], since: datetime) -> set[str]:
        return set(self.families) & set(families)


async def fields(redis: Client, tenant_id: str) -> set[str]:
    return {name.decode() for name in await redis.hkeys(f"loraplex:{{{tenant_id}}}:quota")}


async def families(redis: Client, tenant_id: str) -> set[str]:
    return {name.split(":")[1] for name in await fields(redis, tenant_id) if name.startswith("key:")}


@pytest.fixture
def sweep(redis: Client) -> Any:
    store = QuotaStore(redis, 30.0)

    def of(*valid: str) -> EndedKeys:
        return EndedKeys(redis, store, Valid(*valid))

    return of


async def use(quota: Quota, family: str, tenant_id: str) -> None:
    who = principal(tenant={"tokens_per_day": 10**6}, key=KEY, key_family=family, tenant_id=tenant_id)
    await settle(quota, await take(quota, who, 10), 10)


async def test_only_the_fields_of_ended_keys_are_removed(redis: Client, quota: Quota, sweep: Any):
    tenant_id = uuid.uuid4().hex
    for family in ("valid", "ended", "other"):
        await use(quota, family, tenant_id)
    before = await fields(redis, tenant_id)
    assert len([name for name in before if name.startswith("key:ended:")]) >= len(KEY) - 1
    await until(lambda: _removed(sweep("valid"), tenant_id, redis, {"valid"}))
    after = await fields(redis, tenant_id)
    assert after == {name for name in before if not name.startswith(("key:ended:", "key:other:"))}


async def _removed(of: EndedKeys, tenant_id: str, redis: Client, left: set[str]) -> bool:
    await of.remove(tenant_id)
    return await families(redis, tenant_id) == left


async def test_a_running_request_keeps_the_fields_of_its_ended_key_until_it_is_settled(
    redis: Client, quota: Quota, sweep: Any
):
    who = principal(key=KEY, key_family="ended")
    running = await take(quota, who, 10)
    before = await fields(redis, who.tenant.id)
    assert await sweep().remove(who.tenant.id) == 0
    assert await fields(redis, who.tenant.id) == before
    assert await settle(quota, running, 7) is not None
    await until(lambda: _removed(sweep(), who.tenant.id, redis, set()))


async def test_many_fields_are_read_in_every_round_and_few_in_turn(
    redis: Client, quota: Quota, sweep: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ended_keys, "IN_TURN", 1)
    monkeypatch.setattr(ended_keys, "MANY_FIELDS", 20)
    ids = [uuid.uuid4().hex for _ in range(4)]
    await sweeps.register(redis, ids)
    for number, tenant_id in enumerate(ids):
        for family in ("a", "b", "c", "d", "e") if number == 0 else ("a",):
            await use(quota, family, tenant_id)
    of = sweep()

    async def with_keys() -> set[str]:
        return {tenant_id for tenant_id in ids if await families(redis, tenant_id)}

    async def large_is_read() -> bool:
        await of.remove_all()
        return ids[0] not in await with_keys()

    await until(large_is_read)
    for _ in range(60):
        await of.remove_all()
    assert not await with_keys()


@pytest.fixture
def script(redis_url: str) -> Any:
    import redis as client

    with client.Redis.from_url(redis_url) as connection:
        yield Script(connection)


def test_a_minutes_rate_stays_until_it_is_paid_off_and_a_budget_is_backfilled(script: Script):
    rate, budget = Limit("key:a:t", "key", "t", 100), Limit("key:a:b", "key", "b", 10**6)
    names = ["key:a:t", "key:a:t#", "key:a:b", "key:a:b?"]
    assert script.acquire("one", [rate, budget], 0, 50, 1, FREE)[0]
    assert script.call("forget", *names) == 0
    assert script.settle("one", 50, 5, True)
    # Used tokens are paid off in 30 s. A gateway with an older cache would find them forgotten.
    assert script.call("forget", *names) == 3
    assert script.peek([rate])[0][0] == 50
    assert script.peek([budget])[0][2] > 0, "its usage has to be backfilled"
    script.now += 31 * SECOND
    assert script.call("forget", "key:a:t") == 1


async def test_families_are_valid_while_a_key_of_them_is(database: Database):
    now = datetime.now(UTC)
    hour = timedelta(hours=1)

    def key(key_id: str, family: str | None = None, tenant: str = "t1", **values: Any) -> dict[str, Any]:
        own = {"id": key_id, "family_id": family, "tenant_id": tenant, "label": "", "scopes": "", "created_at": now}
        return {**own, "secret_hash": key_id, "expires_at": None, "revoked_at": None, **values}

    values = {"weight": 1.0, "priority": 0, "on_token_limit": "refuse", "suspended": False, "model_limits": "{}"}
    async with database.write() as connection:
        for name in ("t1", "t2"):
            await connection.execute(tenants.insert().values(id=name, name=name, created_at=now, **values))
        await connection.execute(
            api_keys.insert(),
            [
                key("plain"),
                key("revoked", revoked_at=now - hour),
                key("revoked-now", revoked_at=now),
                key("expired", expires_at=now - hour),
                key("expires", expires_at=now + hour),
                key("rotated", "rotated", revoked_at=now - hour),
                key("successor", "rotated"),
                key("another-tenants", tenant="t2"),
            ],
        )
    past = PastUsage(database, only(BASE_MODEL))
    asked = {
        *("plain", "revoked", "revoked-now", "expired", "expires", "rotated", "successor", "another-tenants"),
        "deleted",
    }
    found = await past.valid_families("t1", asked, now - timedelta(minutes=2))
    assert found == {"plain", "revoked-now", "expires", "rotated"}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_keys, "EVERY_SECONDS", 0.1)
    monkeypatch.setattr(ended_keys, "ENDED_SECONDS", 0)


@pytest.mark.usefixtures("often")
async def test_the_gateway_removes_a_revoked_keys_limits_and_a_rotated_keys_limits_stay(serve: Any, redis_url: str):
    import redis.asyncio as client

    async with serve() as gateway, client.Redis.from_url(redis_url) as redis:
        await _revoke_and_rotate(gateway, redis)


async def _revoke_and_rotate(gateway: Gateway, redis: Any) -> None:
    await gateway.tenant("acme")
    tenant_id = (await gateway.admin.get("/admin/api/tenants/acme")).json["id"]
    made = [(await gateway.admin.post("/admin/api/tenants/acme/keys", KEY)).json for _ in range(2)]
    for each in made:
        assert (await gateway.client(each["key"]).complete()).status == 200
    first, second = (each["id"] for each in made)
    assert await families(redis, tenant_id) == {first, second}
    rotated = await gateway.admin.post(f"/admin/api/keys/{first}/rotate", {"grace_seconds": 0})
    assert rotated.status in (200, 201), rotated.body
    assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{second}")).status == 200

    async def only_the_rotated() -> bool:
        return await families(redis, tenant_id) == {first}

    await until(only_the_rotated)
    assert (await gateway.client(rotated.json["key"]).complete()).status == 200
    assert await families(redis, tenant_id) == {first}
