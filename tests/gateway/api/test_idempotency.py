"""A POST repeated with its Idempotency-Key gets the same answer and is not executed again."""

import asyncio
import uuid
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.redis.client import connect
from gateway.redis.keys import idempotency_names_key
from testing.gateway.running import Answer, Client, Gateway
from tests.gateway.api.adapters.test_adapters import files, push


@pytest.fixture
def once() -> dict[str, str]:
    # The tests share one Redis, which keeps old keys.
    return {"Idempotency-Key": uuid.uuid4().hex}


async def create(client: Client, name: str, headers: dict[str, str], **fields: Any) -> Answer:
    return await client.post("/admin/api/tenants", {"name": name} | fields, headers=headers)


async def test_a_call_sent_twice_is_done_once(gateway: Gateway, once: dict[str, str]):
    first, second = await create(gateway.admin, "acme", once), await create(gateway.admin, "acme", once)
    assert (first.status, second.status) == (201, 201)
    assert first.json == second.json
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    # Without the header, or with another key, it is another request.
    assert (await create(gateway.admin, "acme", {})).status == 409
    assert (await create(gateway.admin, "acme", {"Idempotency-Key": uuid.uuid4().hex})).status == 409


async def test_two_at_once_are_one(gateway: Gateway, once: dict[str, str]):
    answers = await asyncio.gather(*(create(gateway.admin, "acme", once) for _ in range(8)))
    assert {answer.status for answer in answers} <= {201, 409}
    made = [answer for answer in answers if answer.status == 201]
    assert made
    assert all(answer.json == made[0].json for answer in made)
    assert all(a.error["code"] == "idempotency_in_progress" for a in answers if a.status == 409)
    assert len((await gateway.admin.get("/admin/api/tenants")).json["data"]) == 1


async def test_another_request_under_the_same_key(gateway: Gateway, once: dict[str, str]):
    await create(gateway.admin, "acme", once)
    other = await create(gateway.admin, "acme", once, weight=2)
    assert (other.status, other.error["code"]) == (422, "idempotency_key_reused")


async def test_another_query_is_another_request(gateway: Gateway, once: dict[str, str]):
    path = "/admin/api/adapters/collect?dry_run="
    asked = ("true", "true", "false")
    first, same, other = [await gateway.admin.post(path + value, {}, headers=once) for value in asked]
    assert (first.status, same.status, same.headers["Idempotent-Replayed"]) == (200, 200, "true")
    assert (other.status, other.error["code"]) == (422, "idempotency_key_reused")


async def test_keys_of_different_callers_do_not_meet(gateway: Gateway, once: dict[str, str]):
    made = await gateway.admin.post("/admin/api/keys", {"label": "second"})
    second = gateway.client(made.json["key"])
    assert (await create(gateway.admin, "acme", once)).status == 201
    assert (await create(second, "other", once)).status == 201
    # A stored answer is returned only to its own caller.
    assert (await create(gateway.nobody, "acme", once)).status == 401


async def test_what_failed_may_be_tried_again(gateway: Gateway, once: dict[str, str]):
    assert (await create(gateway.admin, "acme", once, weight=-1)).status == 400
    assert (await create(gateway.admin, "acme", once)).status == 201


async def test_a_secret_is_shown_once(gateway: Gateway, once: dict[str, str]):
    await create(gateway.admin, "acme", {})
    first, second = [await gateway.admin.post("/admin/api/tenants/acme/keys", {}, headers=once) for _ in range(2)]
    assert first.json["key"].startswith("lpx_")
    assert second.json == first.json | {"key": None}
    assert len((await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"]) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_is_none(key: str, gateway: Gateway):
    got = await create(gateway.admin, "acme", {"Idempotency-Key": key})
    assert (got.status, got.error["param"]) == (400, "Idempotency-Key")


async def test_an_upload_sent_again_does_not_undo_the_next(gateway: Gateway, once: dict[str, str]):
    acme = await gateway.tenant("acme")
    first = await push(acme, "helper", files(seed=0), headers=once)
    assert (await push(acme, "helper", files(seed=1))).json["version"] == 2
    again = await push(acme, "helper", files(seed=0), headers=once)
    assert (again.status, again.json) == (201, first.json)
    assert (await acme.get("/v1/adapters/helper")).json["version"] == 2
    other = await push(acme, "helper", files(seed=2), headers=once)
    assert (other.status, other.error["code"]) == (422, "idempotency_key_reused")


async def test_a_tenant_has_a_bounded_number_of_kept_answers(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.idempotency.MAX_OF_TENANT", 2)
    acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
    given = [{"Idempotency-Key": uuid.uuid4().hex} for _ in range(4)]
    first = await push(other, "helper", files(seed=0), headers=given[0])
    answers = [await push(acme, "helper", files(seed=seed), headers=each) for seed, each in enumerate(given)]
    assert [answer.json["version"] for answer in answers] == [1, 2, 3, 4]
    for seed in (2, 3):
        again = await push(acme, "helper", files(seed=seed), headers=given[seed])
        assert (again.json, again.headers["Idempotent-Replayed"]) == (answers[seed].json, "true")
    again = await push(acme, "helper", files(seed=0), headers=given[0])
    assert (again.json["version"], "Idempotent-Replayed" in again.headers) == (5, False), "the oldest is not kept"
    assert (await push(other, "helper", files(seed=0), headers=given[0])).json == first.json, "another tenant's stays"
    made = [{"Idempotency-Key": uuid.uuid4().hex} for _ in range(4)]
    tenants = [await create(gateway.admin, f"tenant-{number}", each) for number, each in enumerate(made)]
    assert (await create(gateway.admin, "tenant-0", made[0])).json == tenants[0].json, "an operator's all stay"


async def test_an_answer_is_kept_even_if_it_cannot_be_counted(gateway: Gateway, once: dict[str, str], redis_url: str):
    """If Redis failed between counting and keeping, the request stayed in progress and was then done again."""
    acme = await gateway.tenant("acme")
    [tenant] = (await gateway.admin.get("/admin/api/tenants")).json["data"]
    redis = connect(redis_url, 30.0)
    try:
        await redis.set(idempotency_names_key(tenant["id"]), "no sorted set")
        first, again = [await push(acme, "helper", files(seed=0), headers=once) for _ in range(2)]
    finally:
        await redis.aclose()
    assert (first.status, first.json["version"]) == (201, 1)
    assert (again.status, again.json, again.headers["Idempotent-Replayed"]) == (201, first.json, "true")


async def test_an_answer_that_was_not_deleted_is_still_counted(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """A gateway that died, or lost Redis, before the deletion left the answer for a day, beyond the limit."""
    monkeypatch.setattr("gateway.api.idempotency.MAX_OF_TENANT", 2)
    acme = await gateway.tenant("acme")
    given = [{"Idempotency-Key": uuid.uuid4().hex} for _ in range(4)]

    async def fail(*_: Any) -> None:
        raise RedisError("away")

    for seed, each in enumerate(given):
        with monkeypatch.context() as outage:
            if seed == 2:
                outage.setattr(Redis, "delete", fail)
            assert (await push(acme, "helper", files(seed=seed), headers=each)).json["version"] == seed + 1
    again = [await push(acme, "helper", files(seed=seed), headers=given[seed]) for seed in (2, 3, 0)]
    assert ["Idempotent-Replayed" in each.headers for each in again] == [True, True, False]
