"""Keys that a tenant's own people make, and roles of admin keys."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.api.admin import keys as key_routes
from gateway.records.cooperative_rows import AT_ONCE
from gateway.records.keys import keys as key_records
from testing.gateway.running import BASE_MODEL, Client, Gateway

ALL = ["adapters", "inference", "keys", "usage"]


async def tenant_admin(gateway: Gateway, name: str, **fields: Any) -> Client:
    """Create a tenant if it is new, and return a client with a key that manages keys."""
    await gateway.admin.post("/admin/api/tenants", {"name": name})
    made = await gateway.admin.post(f"/admin/api/tenants/{name}/keys?force=true", {"scopes": ALL} | fields)
    assert made.status == 201, made.body
    return gateway.client(made.json["key"])


async def admin_key(gateway: Gateway, role: str) -> Client:
    made = await gateway.admin.post("/admin/api/keys", {"role": role})
    assert (made.status, made.json["role"]) == (201, role)
    return gateway.client(made.json["key"])


def key_id(client: Client) -> str:
    return (client.key or "").split("_")[1]


async def test_a_tenant_makes_rotates_and_revokes_its_keys(gateway: Gateway):
    acme = await tenant_admin(gateway, "acme")
    made = await acme.post("/v1/keys", {"label": "ci", "requests_per_minute": 5})
    assert made.status == 201
    assert (made.json["scopes"], made.json["role"]) == (["adapters", "inference", "usage"], "tenant_member")
    member = gateway.client(made.json["key"])
    assert (await member.chat()).status == 200
    # A key without the scope manages no keys.
    assert (await member.get("/v1/keys")).error["code"] == "insufficient_permissions"
    rotated = await acme.post(f"/v1/keys/{key_id(member)}/rotate", {"grace_seconds": 0})
    assert (rotated.status, rotated.json["requests_per_minute"]) == (201, 5)
    assert (await member.chat()).status == 401
    new = gateway.client(rotated.json["key"])
    assert (await new.chat()).status == 200
    assert (await acme.call("DELETE", f"/v1/keys/{key_id(new)}")).status == 200
    assert (await new.chat()).status == 401
    listed = (await acme.get("/v1/keys")).json["data"]
    assert {key["id"] for key in listed} == {key_id(acme), key_id(member), key_id(new)}
    assert not any("key" in key or "secret_hash" in key for key in listed)
    audit = (await gateway.admin.get("/admin/api/audit?tenant=acme&action=key")).json["data"]
    own = [(entry["action"], entry["actor"], entry["own"]) for entry in audit][:3]
    assert own == [(f"key.{act}", key_id(acme), True) for act in ("revoke", "rotate", "create")]


async def test_no_key_gives_more_than_it_has(gateway: Gateway):
    await tenant_admin(gateway, "acme")
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    later = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    narrow = await tenant_admin(
        gateway, "acme", scopes=["inference", "keys"], allowed_models=[BASE_MODEL], expires_at=soon
    )
    for body, status, param in (
        ({"scopes": ["usage"]}, 403, "scopes"),
        ({"scopes": ["inference", "adapters"]}, 403, "scopes"),
        ({"scopes": ["admin"]}, 400, "scopes"),
        ({"scopes": ["operator"]}, 400, "scopes"),
        ({"allowed_models": ["pirate"]}, 403, "model"),
        ({"allowed_models": [BASE_MODEL, "pirate"]}, 403, "model"),
        ({"expires_at": later}, 400, "expires_at"),
        ({"role": "operator"}, 400, "role"),
        ({"tenant": "globex"}, 400, "tenant"),
    ):
        for path in ("/v1/keys", "/v1/keys?force=true"):
            got = await narrow.post(path, body)
            assert (got.status, got.error["param"]) == (status, param), body
    made = (await narrow.post("/v1/keys")).json
    assert made["scopes"] == ["inference"]
    assert made["allowed_models"] == [BASE_MODEL]
    assert datetime.fromisoformat(made["expires_at"]) == datetime.fromisoformat(soon)
    # A rotation would show the secret of a key with more rights, or prolong the own one.
    wide = key_id(await tenant_admin(gateway, "acme"))
    assert (await narrow.post(f"/v1/keys/{wide}/rotate")).status == 403
    scoped = await tenant_admin(gateway, "acme", scopes=["inference", "keys"])
    assert (await narrow.post(f"/v1/keys/{key_id(scoped)}/rotate")).status == 403
    itself = (await narrow.post(f"/v1/keys/{key_id(narrow)}/rotate")).json
    assert datetime.fromisoformat(itself["expires_at"]) == datetime.fromisoformat(soon)


async def test_no_key_gives_limits_above_its_own(gateway: Gateway):
    """A key could remove its own budget, and make keys without limits."""
    wide = await tenant_admin(gateway, "acme")
    budget = {"requests_per_minute": 10, "budget_per_month": 50_000_000}
    narrow = await tenant_admin(gateway, "acme", **budget)
    free = (await wide.post("/v1/keys")).json["id"]
    low = (await wide.post("/v1/keys", {"requests_per_minute": 2, "budget_per_month": 1_000_000})).json["id"]
    for limits, field, own in (
        ({"requests_per_minute": 11}, "requests_per_minute", "10"),
        ({"requests_per_minute": None}, "requests_per_minute", "10"),
        ({"budget_per_month": 50_000_001}, "budget_per_month", "50.00 (50000000 micro-units)"),
        ({"budget_per_month": None, "requests_per_minute": 5}, "budget_per_month", "50.00 (50000000 micro-units)"),
    ):
        for got in (
            await narrow.post("/v1/keys", limits),
            await narrow.call("PATCH", f"/v1/keys/{key_id(narrow)}", json=limits),
            await narrow.call("PATCH", f"/v1/keys/{low}", json=limits),
        ):
            assert (got.status, got.error["param"]) == (403, field), limits
            assert got.error["message"] == f"{field}: your key can give at most its own limit, {own}."
    # A rotation would show the secret of a key with larger limits.
    assert (await narrow.post(f"/v1/keys/{free}/rotate")).error["param"] == "requests_per_minute"
    # A new key has the own limits where it has no lower ones.
    made = (await narrow.post("/v1/keys", {"requests_per_minute": 5, "max_concurrent": 2})).json
    assert {name: made[name] for name in (*budget, "max_concurrent")} == {
        "requests_per_minute": 5,
        "budget_per_month": 50_000_000,
        "max_concurrent": 2,
    }
    for id_ in (made["id"], key_id(narrow)):
        changed = await narrow.call("PATCH", f"/v1/keys/{id_}", json={"label": "x", "requests_per_minute": 9})
        assert (changed.status, changed.json["requests_per_minute"]) == (200, 9)
        assert (await narrow.post(f"/v1/keys/{id_}/rotate")).status == 201
    # It may lower every limit, also one above its own, but not raise that again.
    larger = {"requests_per_minute": 1000, "budget_per_month": None}
    high = (await wide.post("/v1/keys", larger)).json["id"]
    for limits, status in (
        ({"requests_per_minute": 500}, 200),
        ({"requests_per_minute": 501}, 403),
        ({"requests_per_minute": None}, 403),
        ({"budget_per_month": None, "label": "y"}, 200),
        ({"budget_per_month": 60_000_000}, 200),
        ({"budget_per_month": 60_000_001}, 403),
        ({"requests_per_minute": 10, "budget_per_month": 50_000_000}, 200),
        ({"requests_per_minute": 11}, 403),
    ):
        assert (await narrow.call("PATCH", f"/v1/keys/{high}", json=limits)).status == status, limits
    # A key without limits and an operator set any.
    assert (await wide.call("PATCH", f"/v1/keys/{free}", json={"requests_per_minute": 1000})).status == 200
    got = await gateway.admin.call("PATCH", f"/admin/api/keys/{made['id']}", json={"budget_per_month": None})
    assert (got.status, got.json["budget_per_month"]) == (200, None)


async def test_keys_of_others_are_not_there(gateway: Gateway):
    acme, globex = await tenant_admin(gateway, "acme"), await tenant_admin(gateway, "globex")
    operators = (await gateway.admin.post("/admin/api/keys")).json["id"]
    for other in (key_id(globex), operators, "0" * 16, "nonsense"):
        for got in (await acme.post(f"/v1/keys/{other}/rotate"), await acme.call("DELETE", f"/v1/keys/{other}")):
            assert (got.status, got.error["param"]) == (404, "id")
    assert (await globex.get("/v1/keys")).status == 200
    assert {key["tenant"] for key in (await acme.get("/v1/keys")).json["data"]} == {"acme"}


async def test_a_tenant_has_bounded_keys_and_changes(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(key_records, "MAX_VALID", 3)
    monkeypatch.setattr(key_records, "MAX_ENDED", 2)
    acme = await tenant_admin(gateway, "acme")
    made = [await acme.post("/v1/keys") for _ in range(3)]
    assert [got.status for got in made] == [201, 201, 403]
    assert made[2].error["code"] == "key_limit_exceeded"
    last = made[1].json["id"]
    assert (await acme.post(f"/v1/keys/{last}/rotate", {"grace_seconds": 60})).status == 403
    for _ in range(4):
        rotated = await acme.post(f"/v1/keys/{last}/rotate", {"grace_seconds": 0})
        assert rotated.status == 201
        last = rotated.json["id"]
    # The oldest ended keys are gone; the operator is not bounded.
    assert len((await acme.get("/v1/keys")).json["data"]) <= 3 + 2 + 1
    assert (await gateway.admin.post("/admin/api/tenants/acme/keys")).status == 201
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"adapter_changes_per_minute": 1})
    refused = [await acme.call("DELETE", f"/v1/keys/{last}") for _ in range(3)][-1]
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")


async def test_admin_keys_do_what_their_role_allows(gateway: Gateway):
    await gateway.tenant("acme")
    viewer, billing, operator = [await admin_key(gateway, role) for role in ("viewer", "billing", "operator")]
    for client in (viewer, billing, operator):
        for path in ("/admin/api/tenants", "/admin/api/usage", "/admin/api/keys", "/metrics", "/admin/api/sessions"):
            assert (await client.get(path)).status == 200, path
    price = {"input": 1, "output": 2}
    path = f"/admin/api/prices/{BASE_MODEL}"
    assert [(await client.call("PUT", path, json=price)).status for client in (viewer, billing)] == [403, 200]
    budget = {"budget_per_month": 5_000_000}
    tenant = "/admin/api/tenants/acme"
    assert [(await client.call("PATCH", tenant, json=budget)).status for client in (viewer, billing)] == [403, 200]
    got = await billing.call("PATCH", tenant, json=budget | {"suspended": True})
    assert (got.status, got.error["code"]) == (403, "role_needed")
    assert "'operator'" in got.error["message"]
    assert "'billing'" in got.error["message"]
    # No role below operator makes keys.
    for client in (viewer, billing):
        for body in ({"role": "operator"}, {"role": "viewer"}, None):
            assert (await client.post("/admin/api/keys", body)).error["code"] == "role_needed"
        assert (await client.post(f"/admin/api/keys/{key_id(client)}/rotate")).error["code"] == "role_needed"
        assert (await client.post(f"{tenant}/keys")).error["code"] == "role_needed"
    # A rotated key keeps its role.
    rotated = await operator.post(f"/admin/api/keys/{key_id(viewer)}/rotate")
    assert (rotated.status, rotated.json["role"]) == (201, "viewer")
    assert (await operator.post("/admin/api/keys", {"role": "root"})).status == 400


async def test_errors_name_the_role_that_suffices_and_the_values_that_fit(gateway: Gateway):
    await gateway.tenant("acme")
    for role in ("viewer", "billing"):
        client = gateway.client((await gateway.admin.post("/admin/api/keys", {"role": role})).json["key"])
        refused = await client.call("PATCH", "/admin/api/tenants/acme", json={"priority": 3})
        assert (refused.status, "'operator'" in refused.error["message"]) == (403, True), refused.error
    refused = await gateway.admin.post("/admin/api/keys", {"role": "root"})
    assert "expected one of" in refused.error["message"]
    assert all(role in refused.error["message"] for role in ("viewer", "billing", "operator"))
    for path, body in (
        ("tenants/acme", {"budget_per_month": 12.5}),
        ("tenants/acme", {"model_limits": {"base": {"budget_per_day": "12.50"}}}),
    ):
        refused = await gateway.admin.call("PATCH", f"/admin/api/{path}", json=body)
        assert "micro-units of the currency: 12.50 is 12500000" in refused.error["message"], refused.error
    refused = await gateway.admin.call("PUT", "/admin/api/prices/base", json={"input": 0.5, "output": 1})
    assert "micro-units" in refused.error["message"]
    refused = await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"requests_per_minute": 1.5})
    assert "micro-units" not in refused.error["message"]


async def test_a_long_list_of_keys_leaves_the_event_loop_turns(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    acme = await tenant_admin(gateway, "acme")
    for _ in range(2 * AT_ONCE):
        assert (await gateway.admin.post("/admin/api/tenants/acme/keys")).status == 201
    calls, most = Counter[str](), Counter[str]()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            most[name] = max(most[name], calls[name])
            return function(*args)

        monkeypatch.setattr(module, name, counted)

    async def turns() -> None:
        while True:
            calls.clear()
            await asyncio.sleep(0)

    count(key_records, "read_key")
    count(key_routes, "describe_key")
    ticking = asyncio.create_task(turns())
    listed = (await acme.get("/v1/keys")).json["data"]
    ticking.cancel()
    assert len(listed) == 2 * AT_ONCE + 1
    assert most == {"read_key": AT_ONCE, "describe_key": AT_ONCE}
