"""Keys: who gets in, how soon not any more, and what is kept of them."""

import asyncio
import re
import sqlite3
import time
from pathlib import Path

import pytest

from tests.gateway.running import ADMIN_KEY, Gateway, running, settings
from tests.gateway.upstream import Upstream


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "nonsense",
        "lpx_0123456789abcdef_" + "0" * 48,
        "lpx_short_x",
        ADMIN_KEY + "x",
        "lpx_0123456789ABCDEF_" + "0" * 48,
        "ключ",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/admin/api/tenants"])
async def test_a_wrong_or_missing_key(path: str, key: str | None, gateway: Gateway):
    client = gateway.nobody if key is None else gateway.client(key)
    got = await client.get(path)
    assert (got.status, got.error["code"]) == (401, "invalid_api_key")
    assert key is None or len(key) < 4 or key not in got.error["message"]


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


async def test_a_revoked_key_stops_within_a_second_on_every_other_gateway(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    shared = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with running(shared) as here, running(shared) as there:
        tenant = await here.tenant("acme")
        elsewhere = there.client(tenant.key or "")
        assert (await elsewhere.get("/v1/models")).status == 200
        revoked = time.monotonic()
        await here.admin.call("DELETE", f"/admin/api/keys/{(tenant.key or '').split('_')[1]}")
        while (await elsewhere.get("/v1/models")).status == 200:
            assert time.monotonic() - revoked < 1.0
            await asyncio.sleep(0.02)
        # Deleting a whole tenant ends its keys as well.
        other = await here.tenant("other")
        assert (await there.client(other.key or "").get("/v1/models")).status == 200
        await here.admin.call("DELETE", "/admin/api/tenants/other")
        await asyncio.sleep(0.6)
        assert (await there.client(other.key or "").get("/v1/models")).status == 401


async def test_admin_keys_can_be_made_and_revoked(gateway: Gateway):
    made = await gateway.admin.post("/admin/api/keys", {"label": "second operator"})
    second = gateway.client(made.json["key"])
    assert (await second.get("/admin/api/tenants")).status == 200
    assert (await second.chat()).status == 403
    await gateway.admin.call("DELETE", f"/admin/api/keys/{made.json['id']}")
    assert (await second.get("/admin/api/tenants")).status == 401


async def test_no_secret_is_kept(gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    tenant = await gateway.tenant("acme")
    assert re.fullmatch(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}", tenant.key or "")
    await tenant.chat(messages=[{"role": "user", "content": "a secret prompt"}])
    secret = (tenant.key or "").split("_")[2]
    connection = sqlite3.connect(tmp_path / "gateway.db")
    dumped = "\n".join(connection.iterdump())
    connection.close()
    assert "acme" in dumped
    for kept in (dumped, caplog.text):
        assert secret not in kept
        assert ADMIN_KEY not in kept
        assert "a secret prompt" not in kept
