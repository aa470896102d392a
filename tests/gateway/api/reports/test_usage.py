"""Usage over HTTP: grouped as requested, by tenants and operators."""

import asyncio
import json
import os
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.api.reports import usage
from gateway.billing.writer import UsageWriter
from gateway.records.adapters.catalog import Catalog
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from loraplex.cli import main
from testing.gateway.bases import only
from testing.gateway.rows import row
from testing.gateway.running import Gateway, until


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


async def test_a_report_is_bounded_and_followed(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page of the report has a bounded number of models, however many were used; the command line reads all pages."""
    monkeypatch.setattr(usage, "MAX_GROUPS", 4)
    acme = await gateway.tenant("acme")
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    tenant = await Tenants(database).get("acme")
    rows = [row(f"r{i}", tenant_id=tenant.id, model=f"m{i}", key_id="k") for i in range(10)]
    await UsageWriter(database).write(rows)
    await database.close()
    first = (await acme.get("/v1/usage")).json
    assert [group["model"] for group in first["data"]] == ["m0", "m1", "m2", "m3"]
    assert first["total"]["requests"] == 10
    second = (await acme.get("/v1/usage", params={"after": first["next"], "limit": 2})).json
    assert [group["model"] for group in second["data"]] == ["m4", "m5"]
    wrong = {"limit": ("0", "5", "x"), "after": ("x", "", "WyJhIl0", first["next"] + "x", "é")}
    for field, values in wrong.items():
        for value in values:
            answer = await acme.get("/v1/usage", params={field: value})
            assert (answer.status, answer.error["param"]) == (400, field), value
    other = await acme.get("/v1/usage", params={"after": first["next"], "group_by": "model,day"})
    assert (other.status, other.error["param"]) == (400, "after")
    for moment in ("2026-01-01T00:00:00", "0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:00"):
        altered = urlsafe_b64encode(json.dumps(["acme", moment, False]).encode()).decode().rstrip("=")
        answer = await acme.get("/v1/usage", params={"after": altered, "group_by": "hour"})
        assert (answer.status, answer.error["param"]) == (400, "after"), moment
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    for who in (["--api-key", acme.key or ""], ["--admin-key", gateway.admin.key or ""]):
        arguments = ["usage", "--gateway", gateway.url, *who, "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=clean)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert sorted(group["model"] for group in found["data"]) == sorted(f"m{i}" for i in range(10))
        assert found["total"]["requests"] == 10


async def test_a_narrow_key_sees_its_models_only(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    tenant, catalog = await Tenants(database).get("acme"), Catalog(database, only())
    for number, name in enumerate(("open", "secret")):
        await catalog.add_version(tenant, name, digest=f"{number:064x}", rank=4, num_bytes=10, actor="a")
    rows = [row(f"r{i}", tenant_id=tenant.id, model=model) for i, model in enumerate(("open", "secret", "base"))]
    await UsageWriter(database).write(rows)
    await database.close()
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["open"]})
    narrow = gateway.client(made.json["key"])
    for path in ("/v1/adapters", "/v1/usage", "/v1/models"):
        assert b"secret" not in (await narrow.get(path)).body, path
        assert b"secret" in (await acme.get(path)).body, path
    report = (await narrow.get("/v1/usage?group_by=day,model")).json
    assert [group["model"] for group in report["data"]] == ["open"]
    assert report["total"]["requests"] == 1
    assert [found["name"] for found in (await narrow.get("/v1/adapters")).json["data"]] == ["open"]
