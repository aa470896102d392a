"""Routes of the request log and the activity: for operators, for a tenant's own requests, and nothing beyond."""

from typing import Any

import pytest

from testing.gateway.running import BASE_MODEL, Client, Gateway, until


async def entries(client: Client, path: str, number: int) -> list[dict[str, Any]]:
    """Return the entries of a page, once there are so many."""
    found: list[dict[str, Any]] = []

    async def are_there() -> bool:
        nonlocal found
        answer = await client.get(path)
        assert answer.status == 200, answer.body
        found = answer.json["data"]
        return len(found) >= number

    await until(are_there)
    return found


async def test_an_operator_sees_admitted_and_refused_requests_of_all_tenants(gateway: Gateway):
    acme, globex = await gateway.tenant("acme", requests_per_minute=1), await gateway.tenant("globex")
    served = await acme.chat(user="ann")
    limited = await acme.chat()
    await globex.complete()
    found = await entries(gateway.admin, "/admin/api/requests", 3)
    assert {each["tenant"] for each in found} == {"acme", "globex"}
    mine = await entries(gateway.admin, "/admin/api/requests?tenant=acme", 2)
    assert {each["request_id"] for each in mine} == {each.headers["x-request-id"] for each in (served, limited)}
    [refused] = await entries(gateway.admin, "/admin/api/requests?status=not_admitted&code=rate_limit_exceeded", 1)
    assert 0 < refused["limit"].pop("retry_after") <= 60
    limit = {"name": "requests_per_minute", "owner": "tenant", "value": 1, "needed": 1, "remaining": 0}
    assert (refused["http_status"], refused["limit"]) == (429, limit)
    [anns] = await entries(gateway.admin, "/admin/api/requests?end_user=ann&engine=" + mine[-1]["engine"], 1)
    assert anns["status"] == "ok"

    story = (await gateway.admin.get(f"/admin/api/requests/{served.json['id']}")).json
    assert story["request_id"] == served.headers["x-request-id"]
    assert story["cost"] == "0.00"
    assert [step["name"] for step in story["steps"]] == ["admission", "queue", "engine"]
    assert story["steps"][-1]["end_ms"] == story["latency_ms"]
    assert (await gateway.admin.get("/admin/api/requests/req_none")).status == 404
    bad = await gateway.admin.get("/admin/api/requests/none")
    assert (bad.status, bad.error["param"]) == (400, "id")


async def test_a_tenant_sees_only_its_own_requests_and_no_engine(gateway: Gateway):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    served, others = await acme.chat(), await globex.chat()
    assert (await acme.chat(model="none")).status == 404
    found = await entries(acme, "/v1/requests", 2)
    assert {each["status"] for each in found} == {"ok", "not_admitted"}
    for each in found:
        assert each["tenant"] == "acme"
        assert not {"engine", "tenant_id"} & set(each)
    await entries(globex, "/v1/requests", 1)
    assert (await acme.get(f"/v1/requests/{served.json['id']}")).json["status"] == "ok"
    foreign = await acme.get(f"/v1/requests/{others.json['id']}")
    absent = await acme.get("/v1/requests/chatcmpl-none")
    assert (foreign.status, foreign.body) == (absent.status, absent.body) == (404, absent.body)
    for query in ("tenant=globex", "engine=http://e"):
        assert (await acme.get(f"/v1/requests?{query}")).status == 400
    assert (await acme.get("/admin/api/requests")).status == 403


async def test_a_limited_key_sees_only_the_requests_of_its_models(gateway: Gateway):
    acme = await gateway.tenant("acme")
    served = await acme.chat()
    made = await gateway.admin.post("/admin/api/tenants/acme/keys?force=true", {"allowed_models": ["other"]})
    limited = gateway.client(made.json["key"])
    await entries(acme, "/v1/requests", 1)
    assert (await limited.get("/v1/requests")).json["data"] == []
    assert (await limited.get(f"/v1/requests/{served.json['id']}")).status == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("status=bad", "status"),
        ("version=x", "version"),
        ("min_latency_ms=-1", "min_latency_ms"),
        ("model=%00", "model"),
        ("model=" + "x" * 300, "model"),
        ("after=x", "after"),
        ("limit=0", "limit"),
        ("since=soon", "since"),
        ("since=2026-01-02&until=2026-01-01", "since"),
        ("who=x", "who"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_filters_are_named(shared_gateway: Gateway, shared_tenant: Client, query: str, param: str):
    for client, path in ((shared_gateway.admin, "/admin/api/requests"), (shared_tenant, "/v1/requests")):
        answer = await client.get(f"{path}?{query}")
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_activity(gateway: Gateway):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    for client in (acme, acme, globex):
        assert (await client.chat(stream=True)).status == 200
    assert (await acme.chat(model="none")).status == 404

    async def is_complete() -> bool:
        found = (await gateway.admin.get("/admin/api/activity")).json
        return found["total"]["requests"] == 3 and sum(each["requests"] for each in found["refusals"]) == 1

    await until(is_complete)
    report = (await gateway.admin.get("/admin/api/activity?group_by=tenant&order=requests")).json
    assert [(group["name"], group["sums"]["requests"]) for group in report["groups"]] == [("acme", 2), ("globex", 1)]
    assert report["active_tenants"] == report["num_groups"] == 2
    assert report["total"]["cost"] == "0.00"
    assert sum(report["curve"]["requests"]) == 3
    assert sum(report["curve"]["cost_micros"]) == report["total"]["cost_micros"] == 0
    assert report["total"]["ttft"]["p50"] > 0
    assert [(each["code"], each["status"]) for each in report["refusals"]] == [("model_not_found", 404)]
    models = (await gateway.admin.get("/admin/api/activity?group_by=model&tenant=acme")).json
    assert [(group["name"], group["tenant"]) for group in models["groups"]] == [(BASE_MODEL, "acme")]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("group_by=key", "group_by"),
        ("group_by=engine&tenant=acme", "group_by"),
        ("order=name", "order"),
        ("step=7", "step"),
        ("limit=51", "limit"),
        ("since=2999-01-01", "since"),
        ("since=1970-01-01", "step"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_questions_about_activity_are_named(shared_gateway: Gateway, query: str, param: str):
    answer = await shared_gateway.admin.get(f"/admin/api/activity?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)
