"""A day's tokens of a key after its rotation."""

from testing.gateway.running import Gateway


async def test_a_rotated_key_keeps_its_days_count(gateway: Gateway):
    """The old key has no grace, so the count is not that of a key that still serves."""
    await gateway.tenant("acme")
    made = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"tokens_per_day": 60})).json
    first = gateway.client(made["key"])
    assert (await first.complete(max_tokens=40, x_engine={"tokens": 40})).status == 200
    rotated = await gateway.admin.post(f"/admin/api/keys/{made['id']}/rotate", {"grace_seconds": 0})
    assert (rotated.status, rotated.json["tokens_per_day"]) == (201, 60)
    second = gateway.client(rotated.json["key"])
    assert (await first.complete(max_tokens=1)).status == 401
    refused = await second.complete(max_tokens=40)
    assert refused.status == 429
    assert refused.error["message"].startswith("Rate limit reached for this key: 60 tokens per day")
    # A key of another family has its own day.
    other = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"tokens_per_day": 60})).json
    assert (await gateway.client(other["key"]).complete(max_tokens=40)).status == 200
