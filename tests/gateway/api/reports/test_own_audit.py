"""`/v1/audit` and `loraplex audit --api-key`: changes that concern a tenant."""

import asyncio
import json

from click.testing import CliRunner

from loraplex.cli import main
from testing.gateway.running import Client, Gateway


async def manager(gateway: Gateway, tenant: str) -> Client:
    made = await gateway.admin.post(f"/admin/api/tenants/{tenant}/keys", {"scopes": ["keys"], "label": "boss"})
    return gateway.client(made.json["key"])


async def test_a_tenant_reads_its_own_changes_page_by_page(gateway: Gateway):
    member, _ = await gateway.tenant("acme"), await gateway.tenant("globex")
    boss, changes = await manager(gateway, "acme"), {"note": "pays late", "budget_per_30_days": 5_000_000}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=changes)).status == 200
    made = await boss.post("/v1/keys", {"label": "own", "scopes": ["keys"]})
    assert made.status == 201
    refused = await member.get("/v1/audit")
    assert (refused.status, refused.error["code"]) == (403, "insufficient_permissions")

    found = []
    after = ""
    while after is not None:
        page = (await boss.get(f"/v1/audit?limit=1&after={after}")).json
        found += page["data"]
        after = page["next"]
    assert [entry["action"] for entry in found][:2] == ["key.create", "tenant.update"]
    own, operators, *_ = found
    assert (own["own"], own["actor_label"], own["target"]) == (True, "boss", made.json["id"])
    assert (operators["actor"], operators["address"]) == ("operator", None)
    assert operators["detail"] == {"budget_per_30_days": 5_000_000}
    assert {entry["tenant"] for entry in found} == {"acme"}
    assert [entry["id"] for entry in (await boss.get("/v1/audit")).json["data"]] == [entry["id"] for entry in found]
    of_keys = (await boss.get("/v1/audit?action=key&since=2020-01-01T00:00:00Z")).json["data"]
    assert {entry["action"] for entry in of_keys} == {"key.create"}
    for query, param in (("action=price", "action"), ("after=none", "after"), ("tenant=globex", "tenant")):
        answer = await boss.get(f"/v1/audit?{query}")
        assert (answer.status, answer.error["param"]) == (400, param)

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["audit", "--gateway", gateway.url, "--api-key", boss.key or "", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    shown = await asyncio.to_thread(run, "--limit", "2")
    assert "budget_per_30_days=none -> 5.00" in shown
    assert f"--after {operators['id']}" in shown
    assert "--actor is for operators" in await asyncio.to_thread(run, "--actor", "bootstrap", code=2)
    assert len(json.loads(await asyncio.to_thread(run, "--json"))["data"]) == len(found)
