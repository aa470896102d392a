"""What was used, over HTTP: told apart as asked for, by tenants and operators."""

import pytest

from tests.gateway.running import Gateway, until


async def test_usage_is_told_apart_as_asked_for(gateway: Gateway):
    tenant = await gateway.tenant("grouper")
    made = await gateway.admin.post("/admin/api/tenants/grouper/keys", {"label": "second"})
    second = gateway.client(made.json["key"])
    for client in (tenant, second, second):
        assert (await client.complete()).status == 200

    async def all_written() -> bool:
        return (await tenant.get("/v1/usage")).json["total"]["requests"] == 3

    await until(all_written, 60)
    by_key = (await tenant.get("/v1/usage?group_by=key")).json["data"]
    assert sorted((found["key"], found["requests"]) for found in by_key) == [("", 1), ("second", 2)]
    assert all("model" not in found and "day" not in found for found in by_key)
    [by_day] = (await tenant.get("/v1/usage?group_by=day,model")).json["data"]
    assert (by_day["requests"], by_day["model"], by_day["day"][10:]) == (3, "base", "T00:00:00Z")
    by_admin = (await gateway.admin.get("/admin/api/usage?tenant=grouper&group_by=key")).json
    assert by_admin["data"] == by_key
    assert by_admin["total"]["requests"] == 3
    assert (await tenant.get("/v1/usage?until=1")).json["data"] == []


@pytest.mark.parametrize("groups", ["", "endpoint", "model,", "model;day"])
async def test_groups_that_there_are_not(groups: str, gateway: Gateway):
    tenant = await gateway.tenant("grouper")
    refused = await tenant.get("/v1/usage", params={"group_by": groups})
    assert (refused.status, refused.error["param"]) == (400, "group_by")
