"""`loraplex key` against a real gateway."""

import json
from datetime import UTC, datetime, timedelta

from testing.gateway.commands import runner
from testing.gateway.running import Gateway


async def test_a_key_from_create_to_revoke(gateway: Gateway):
    run = runner(gateway)
    await gateway.tenant("acme")
    made = await run("key", "create", "acme", "--label", "ci", "--expires", "30d", "--scopes", "inference,usage",
                     "--models", "base, pirate", "--force", "--tokens-per-day", "500")  # fmt: skip
    key_id = made.stdout.split("_")[1]
    assert f"id {key_id}, valid until 2" in made.stderr
    key = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"][-1]
    expected = {"label": "ci", "scopes": ["inference", "usage"], "allowed_models": ["base", "pirate"]}
    assert key | expected | {"id": key_id, "tokens_per_day": 500} == key
    left = datetime.fromisoformat(key["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29) < left < timedelta(days=30)

    rotated = (await run("key", "rotate", key_id, "--grace", "0s")).stdout.strip()
    assert (await gateway.client(made.stdout.strip()).chat()).status == 401
    assert (await gateway.client(rotated).chat()).status == 200
    # The whole key works like its id, and the output does not repeat its secret.
    assert rotated.split("_")[2] not in (await run("key", "revoke", rotated)).output
    assert (await gateway.client(rotated).chat()).status == 401
    lines = (await run("key", "list", "acme")).stdout.splitlines()
    head, *rows = (line.split() for line in lines)
    assert head[:6] == ["ID", "LABEL", "STATE", "SCOPES", "MODELS", "LIMITS"]
    assert [row[2] for row in rows] == ["active", "expired", "revoked"]
    assert rows[1][:2] + rows[1][3:6] == [key_id, "ci", "inference,usage", "base,pirate", "tokens_per_day=500"]
    assert rotated.split("_")[2] not in "".join(lines)
    assert [key["id"] for key in json.loads((await run("key", "list", "acme", "--json")).stdout)][1] == key_id

    admin = (await run("key", "create", "--admin", "--label", "second")).stdout.strip()
    assert (await gateway.client(admin).get("/admin/api/tenants")).status == 200
    assert "second" in (await run("key", "list", "--admin")).stdout
