"""Keys: admission, the delay of a revocation, and the stored data."""

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.access import auth as auth_module
from gateway.access.auth import Authenticator
from gateway.errors import Forbidden, InvalidKey
from gateway.records.caches.changes import Changes
from gateway.records.keys.keys import ApiKey, Keys
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, PEPPER, Answer, Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream

WRONG_KEYS = (
    None,
    "",
    "nonsense",
    "lpx_0123456789abcdef_" + "0" * 48,
    "lpx_short_x",
    ADMIN_KEY + "x",
    "lpx_0123456789ABCDEF_" + "0" * 48,
    "ключ",
)


# A gateway for each path, because one address may send only so many wrong keys.
@pytest.mark.parametrize("path", ["/v1/models", "/admin/api/tenants"])
async def test_a_wrong_or_missing_key(path: str, gateway: Gateway):
    for key in WRONG_KEYS:
        client = gateway.nobody if key is None else gateway.client(key)
        got = await client.get(path)
        assert (got.status, got.error["code"]) == (401, "invalid_api_key"), key
        assert key is None or len(key) < 4 or key not in got.error["message"], key


async def test_the_secret_of_one_key_does_not_open_another(gateway: Gateway):
    one, other = await gateway.tenant("one"), await gateway.tenant("other")
    assert one.key is not None
    assert other.key is not None
    mixed = "_".join([*one.key.split("_")[:2], other.key.split("_")[2]])
    assert (await gateway.client(mixed).get("/v1/models")).status == 401


async def test_each_key_opens_its_own_side_only(gateway: Gateway):
    tenant = await gateway.tenant("acme")
    got = await tenant.get("/admin/api/tenants")
    assert (got.status, got.error["type"]) == (403, "permission_error")
    assert (await gateway.admin.chat()).status == 403
    assert (await gateway.admin.get("/v1/adapters")).status == 403
    assert (await tenant.chat()).status == 200


async def test_a_key_does_what_its_scopes_say(gateway: Gateway):
    await gateway.tenant("acme")
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["usage"], "label": "billing"})
    billing = gateway.client(made.json["key"])
    assert (await billing.get("/v1/usage")).status == 200
    assert (await billing.chat()).status == 403
    assert (await billing.get("/v1/adapters")).status == 403
    wrong = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["admin"]})
    assert (wrong.status, wrong.error["param"]) == (400, "scopes")


async def test_a_revoked_key_stops_at_once_here(gateway: Gateway):
    tenant = await gateway.tenant("acme")
    assert (await tenant.get("/v1/models")).status == 200
    key_id = (tenant.key or "").split("_")[1]
    assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{key_id}")).status == 200
    assert (await tenant.get("/v1/models")).status == 401
    [listed] = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"]
    assert listed["revoked_at"] is not None
    assert "key" not in listed


def key_id(client: Client) -> str:
    return (client.key or "").split("_")[1]


async def is_refused(client: Client) -> bool:
    return (await client.get("/v1/models")).status in (401, 403)


@pytest.fixture
async def two_gateways(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Start two gateways of one database."""
    shared = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with running(shared) as here, running(shared) as there:
        yield here, there


async def test_a_revoked_key_stops_on_every_other_gateway(two_gateways: tuple[Gateway, Gateway]):
    """A revoked key stops on every other gateway within a second; `benchmarks/revocation.py` measures the delay."""
    here, there = two_gateways
    elsewhere = there.client((await here.tenant("acme")).key or "")
    assert (await elsewhere.get("/v1/models")).status == 200
    await here.admin.call("DELETE", f"/admin/api/keys/{key_id(elsewhere)}")
    await until(lambda: is_refused(elsewhere))
    assert (await elsewhere.get("/v1/models")).error["message"] == "This API key has been revoked."
    # The deletion of a tenant ends its keys as well.
    other = there.client((await here.tenant("other")).key or "")
    assert (await other.get("/v1/models")).status == 200
    await here.admin.call("DELETE", "/admin/api/tenants/other")
    await until(lambda: is_refused(other))


async def start_stream(client: Client, upstream: Upstream) -> "asyncio.Future[Answer]":
    """Start a stream that would last for minutes, and wait until the engine has it."""
    before = len(upstream.requests)
    asked = client.complete(stream=True, max_tokens=200, x_engine={"tokens": 200, "delay": 1.0})
    stream = asyncio.ensure_future(asked)

    async def arrived() -> bool:
        return len(upstream.requests) > before

    await until(arrived)
    return stream


async def test_running_streams_end_with_their_key(two_gateways: tuple[Gateway, Gateway], upstream: Upstream):
    here, there = two_gateways
    acme = await here.tenant("acme")
    streams = [await start_stream(client, upstream) for client in (acme, there.client(acme.key or ""))]
    whole = asyncio.ensure_future(acme.complete(max_tokens=200, x_engine={"tokens": 200, "delay": 1.0}))
    bystander = await here.tenant("bystander")
    other = await start_stream(bystander, upstream)
    await here.admin.call("DELETE", f"/admin/api/keys/{key_id(acme)}")
    for stream in streams:
        last = (await stream).events[-1]
        assert (last["error"]["code"], last["error"]["message"]) == (
            "invalid_api_key",
            "This API key has been revoked.",
        )
    assert (await whole).status == 401
    assert not other.done()
    await here.admin.call("PATCH", "/admin/api/tenants/bystander", json={"suspended": True})
    assert (await other).events[-1]["error"]["code"] == "tenant_suspended"
    deleted = await start_stream(await here.tenant("deleted"), upstream)
    await here.admin.call("DELETE", "/admin/api/tenants/deleted")
    message = "This API key no longer exists: its tenant has been deleted."
    assert (await deleted).events[-1]["error"]["message"] == message

    async def cancelled() -> bool:
        return upstream.cancelled >= 4

    await until(cancelled)
    ends = 'loraplex_gateway_inference_requests_total{endpoint="completions",status="revoked",tenant="%s"} %d.0'

    async def counted() -> bool:
        pages = [(await gateway.admin.get("/metrics")).body.decode() for gateway in (here, there)]
        return ends % ("acme", 2) in pages[0] and ends % ("bystander", 1) in pages[0] and ends % ("acme", 1) in pages[1]

    await until(counted)


async def test_a_suspended_tenant_is_told_so_until_it_is_not(gateway: Gateway):
    acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})
    for path in ("/v1/models", "/v1/adapters", "/v1/usage"):
        got = await acme.get(path)
        assert (got.status, got.error["code"]) == (403, "tenant_suspended")
    assert (await acme.chat()).status == 403
    assert (await other.chat()).status == 200
    # A caller without the tenant's key does not learn of the suspension.
    mixed = gateway.client("_".join([*(acme.key or "").split("_")[:2], (other.key or "").split("_")[2]]))
    assert (await mixed.get("/v1/models")).status == 401
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": False})
    assert (await acme.chat()).status == 200


async def make_key(gateway: Gateway, tenant: str, **fields: Any) -> tuple[Client, dict[str, Any]]:
    # Forced: the named models need not exist.
    made = await gateway.admin.post(f"/admin/api/tenants/{tenant}/keys?force=true", fields)
    assert made.status == 201, made.json
    return gateway.client(made.json["key"]), made.json


async def listed(gateway: Gateway, tenant: str) -> dict[str, dict[str, Any]]:
    return {key["id"]: key for key in (await gateway.admin.get(f"/admin/api/tenants/{tenant}/keys")).json["data"]}


async def test_a_key_expires(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    stream = await start_stream(acme, upstream)
    await gateway.admin.post(f"/admin/api/keys/{key_id(acme)}/rotate", {"grace_seconds": 1})
    await until(lambda: is_refused(acme))
    assert (await acme.get("/v1/models")).error["message"] == "This API key has expired."
    assert (await stream).events[-1]["error"]["message"] == "This API key has expired."


async def test_a_key_asks_the_models_it_is_for(gateway: Gateway):
    everything = await gateway.tenant("acme")
    narrow, made = await make_key(gateway, "acme", allowed_models=["pirate", "json"])
    assert made["allowed_models"] == ["pirate", "json"]
    # The answer is the same for the base model, for another tenant's adapter and for a missing one.
    for name in (BASE_MODEL, "brief", "nothing"):
        for got in (await narrow.chat(model=name), await narrow.get(f"/v1/models/{name}")):
            assert (got.status, got.error["code"], got.error["param"]) == (403, "model_not_allowed", "model")
            assert got.error["message"] == f"This API key may not use the model '{name}', only: pirate, json."
    assert (await narrow.chat(model="pirate")).error["code"] == "model_not_found"
    assert (await narrow.get("/v1/models")).json["data"] == []
    assert [model["id"] for model in (await everything.get("/v1/models")).json["data"]] == [BASE_MODEL]
    based, _ = await make_key(gateway, "acme", allowed_models=[BASE_MODEL])
    assert (await based.chat()).status == 200


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("expires_at", "2020-01-01T00:00:00Z", "in the future"),
        ("expires_at", "2099-01-01T00:00:00", "timezone"),
        ("expires_at", "soon", "RFC3339"),
        ("expires_at", "9999-12-31T23:59:59Z", "within 100 years"),
        ("expires_at", "9999-12-31T23:59:59-12:00", "within 100 years"),
        ("expires_at", "0001-01-01T00:00:00+12:00", "within 100 years"),
        ("allowed_models", [], "at least 1 entries"),
        ("allowed_models", "pirate", "a list or null"),
        ("requests_per_minute", 0, "at least 1"),
        ("budget_per_month", 1.5, "an integer or null"),
        ("label", "x" * 101, "at most 100 characters"),
        ("scopes", [], "Expected some of the scopes"),
        ("weight", 2, "no such field"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.usefixtures("shared_tenant")
async def test_a_key_that_cannot_be(field: str, value: Any, says: str, shared_gateway: Gateway):
    got = await shared_gateway.admin.post("/admin/api/tenants/shared/keys", {field: value})
    assert (got.status, got.error["param"]) == (400, field)
    assert says in got.error["message"]


async def test_what_a_key_was_given_and_when_it_was_used_is_listed(gateway: Gateway):
    await gateway.tenant("acme")
    limits = {"requests_per_minute": 10, "tokens_per_day": 500, "budget_per_month": 2_000_000}
    client, made = await make_key(gateway, "acme", label="ci", scopes=["inference"], **limits)
    assert made | limits == made
    assert (made["label"], made["scopes"], made["max_concurrent"], made["last_used_at"]) == (
        *("ci", ["inference"], None, None),
    )
    assert (await client.get("/v1/models")).status == 200

    async def noted() -> bool:
        return (await listed(gateway, "acme"))[made["id"]]["last_used_at"] is not None

    await until(noted)
    of_list = (await listed(gateway, "acme"))[made["id"]]
    assert of_list == {name: value for name, value in made.items() if name != "key"} | {
        "last_used_at": of_list["last_used_at"]
    }
    first = of_list["last_used_at"]
    await client.get("/v1/models")
    assert (await listed(gateway, "acme"))[made["id"]]["last_used_at"] == first


async def test_rotation_leaves_the_old_key_its_grace(gateway: Gateway):
    await gateway.tenant("acme")
    fields = {"label": "ci", "scopes": ["inference"], "allowed_models": [BASE_MODEL], "tokens_per_minute": 9_000}
    old, made = await make_key(gateway, "acme", expires_at="2099-01-01T00:00:00Z", **fields)
    got = await gateway.admin.post(f"/admin/api/keys/{made['id']}/rotate", {"grace_seconds": 600})
    assert got.status == 201
    assert {name: got.json[name] for name in fields} == fields
    assert got.json["id"] != made["id"]
    # The new key gets the old key's lifetime.
    assert datetime.fromisoformat(got.json["expires_at"]) > datetime.fromisoformat(made["expires_at"])
    new = gateway.client(got.json["key"])
    assert [(await client.chat()).status for client in (old, new)] == [200, 200]
    ends = datetime.fromisoformat((await listed(gateway, "acme"))[made["id"]]["expires_at"])
    assert timedelta(0) < ends - datetime.now(UTC) <= timedelta(seconds=600)

    got = await gateway.admin.post(f"/admin/api/keys/{key_id(new)}/rotate", {"grace_seconds": 0})
    assert (await new.chat()).status == 401
    assert (await gateway.client(got.json["key"]).chat()).status == 200
    again = await gateway.admin.post(f"/admin/api/keys/{key_id(new)}/rotate")
    assert (again.status, again.error["param"]) == (400, "id")
    for unknown in ("0" * 16, "nonsense"):
        assert (await gateway.admin.post(f"/admin/api/keys/{unknown}/rotate")).status == 404


async def test_a_change_is_not_undone_by_a_lookup_that_it_overtook(database: Database):
    tenants, keys = Tenants(database), Keys(database)
    auth = Authenticator(keys, PEPPER, ADMIN_KEY, Changes(database))
    key, clear = auth.issue(await tenants.create("acme", {}, "op"), frozenset({"usage"}), "")
    await keys.add(key, "op")
    for _ in range(5):
        lookup = asyncio.create_task(auth.tenant(f"Bearer {clear}", "usage"))
        await asyncio.sleep(0)
        await tenants.update("acme", {"suspended": True}, "op")
        await auth.catch_up()
        await asyncio.wait({lookup})
        with pytest.raises(Forbidden):
            await auth.tenant(f"Bearer {clear}", "usage")
        lookup.exception()
        await tenants.update("acme", {"suspended": False}, "op")
        await auth.refresh()
        assert (await auth.tenant(f"Bearer {clear}", "usage")).tenant.name == "acme"


async def test_keys_that_do_not_exist_push_no_other_out_of_memory(database: Database, monkeypatch: pytest.MonkeyPatch):
    """A tenant may have made and deleted any number of them."""
    monkeypatch.setattr(auth_module, "CACHE_ENTRIES", 10)
    asked = list[str]()

    class Asked(Keys):
        async def find(self, key_id: str) -> ApiKey | None:
            asked.append(key_id)
            return await super().find(key_id)

    keys, usage = Asked(database), frozenset({"usage"})
    acme, auth = await Tenants(database).create("a", {}, "op"), Authenticator(keys, PEPPER, None, Changes(database))
    key, clear = auth.issue(acme, usage, "")
    await keys.add(key, "op")
    await auth.refresh()
    for _ in range(2):
        assert (await auth.tenant(f"Bearer {clear}", "usage")).key_id == key.id
        for _ in range(30):
            with pytest.raises(InvalidKey):
                await auth.tenant(f"Bearer {auth.issue(acme, usage, '')[1]}", "usage")
    assert (len(asked), asked.count(key.id)) == (61, 1)


async def test_admin_keys_can_be_made_rotated_and_revoked(gateway: Gateway, tmp_path: Path):
    made = await gateway.admin.post("/admin/api/keys", {"label": "second operator"})
    second = gateway.client(made.json["key"])
    assert (await second.get("/admin/api/tenants")).status == 200
    assert (await second.chat()).status == 403
    [shown] = (await gateway.admin.get("/admin/api/keys")).json["data"]
    assert (shown["label"], shown["tenant"], "key" in shown) == ("second operator", None, False)
    await second.post("/admin/api/tenants", {"name": "by-the-second"})
    third = gateway.client((await second.post(f"/admin/api/keys/{shown['id']}/rotate")).json["key"])
    await third.call("DELETE", f"/admin/api/keys/{made.json['id']}")
    assert (await second.get("/admin/api/tenants")).status == 401
    assert (await third.get("/admin/api/tenants")).status == 200
    # The audit names the author.
    connection = sqlite3.connect(tmp_path / "gateway.db")
    did = connection.execute("SELECT actor, action FROM audit ORDER BY at").fetchall()
    connection.close()
    assert did == [
        ("bootstrap", "key.create"),
        (key_id(second), "tenant.create"),
        (key_id(second), "key.rotate"),
        (key_id(third), "key.revoke"),
    ]


async def test_no_secret_is_kept_or_logged(gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A busy session with all loggers at their most verbose stores and logs no secret."""
    caplog.set_level("DEBUG")
    tenant = await gateway.tenant("acme", requests_per_minute=9)
    assert re.fullmatch(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}", tenant.key or "")
    wrong = gateway.client((tenant.key or "")[:-8] + "0badc0de")
    asked = {"messages": [{"role": "user", "content": "a secret prompt"}], "max_tokens": 60}
    upstream = {"tokens": 60, "per_event": 30}
    answers = [
        await tenant.chat(**asked, x_engine=upstream),
        await tenant.chat(**asked, stream=True, x_engine=upstream),
        await tenant.chat(**asked, stream=True, x_engine=upstream | {"fail_after": 30}),
        await tenant.chat(**asked, stream=True, x_engine=upstream | {"drop_after": 30}),
        *[await tenant.chat(**asked, x_engine={"status": status}) for status in (400, 404, 500, 503)],
        await tenant.chat(**asked, temperature="a secret prompt"),
        await tenant.chat(model="a secret prompt"),
        await tenant.post("/v1/chat/completions", "a secret prompt"),
        await tenant.complete(prompt=["a secret prompt"] * 2),
        await wrong.chat(**asked),
        *[await tenant.chat(**asked) for _ in range(15)],
        await gateway.admin.get(f"/admin/api/tenants/{tenant.key}"),
        await gateway.admin.post(f"/admin/api/keys/{key_id(tenant)}/rotate"),
        await gateway.admin.call("DELETE", f"/admin/api/keys/{key_id(tenant)}"),
        await tenant.chat(**asked),
    ]
    assert {200, 201, 400, 401, 404, 429} <= {answer.status for answer in answers}
    assert "a" * 30 in answers[0].body.decode()
    # Refused requests are stored a moment later. This one has the prompt as its model.
    [misplaced] = [answer for answer in answers if answer.status == 404 and b"model_not_found" in answer.body]

    async def is_stored() -> bool:
        found = await gateway.admin.get(f"/admin/api/requests/{misplaced.headers['x-request-id']}")
        return found.status == 200

    await until(is_stored)
    connection = sqlite3.connect(tmp_path / "gateway.db")
    dumped = "\n".join(connection.iterdump())
    connection.close()
    assert "acme" in dumped
    new_key = next(answer.json["key"] for answer in answers if b'"key"' in answer.body)
    secrets = [key.split("_")[2] for key in (tenant.key or "", wrong.key or "", new_key)]
    assert "gateway.api.access_log" in {record.name for record in caplog.records}
    for hidden in (*secrets, ADMIN_KEY, PEPPER, TOKEN, "a secret prompt", "a" * 30):
        assert hidden not in caplog.text
        assert hidden not in dumped
