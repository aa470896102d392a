"""Versions and aliases in requests: the engine's adapter, the answer's name, the ledger's row, and permissions."""

from testing.gateway.running import Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.test_adapters import files, push


async def test_references_from_the_request_to_the_ledger(gateway: Gateway, upstream: Upstream):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    digests = [(await push(acme, "pirate", files(seed))).json["digest"] for seed in (1, 2)]
    for text, digest in (("pirate", digests[1]), ("pirate@1", digests[0]), ("pirate:latest", digests[1])):
        for stream in (False, True):
            answer = await acme.chat(model=text, stream=stream)
            assert answer.status == 200, answer.body
            assert answer.headers["x-loraplex-adapter-digest"] == digest
            assert upstream.requests[-1][1]["model"] == digest
            shown = answer.events[0]["model"] if stream else answer.json["model"]
            assert shown == ("pirate" if text == "pirate:latest" else text)
    mixed = await acme.chat(model="pirate@1*0.5+pirate@2*0.5")
    assert mixed.json["model"] == "pirate@1*0.5+pirate@2*0.5"

    async def recorded() -> bool:
        rows = {row["model"]: row["requests"] for row in await acme.usage()}
        return rows == {"pirate": 6, "pirate*0.5+pirate*0.5": 1}

    await until(recorded)
    # Another tenant's version and an absent one get the same answer.
    for text in ("pirate@1", "pirate@9", "pirate:latest", "pirate:prod", "none@1"):
        refused = await globex.chat(model=text)
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
        assert refused.error["message"] == f"The model '{text}' does not exist or you do not have access to it."
    for text in ("pirate@9", "pirate:prod", "PIRATE@1", "pirate@1@1"):
        assert (await acme.chat(model=text)).status == 404, text


async def test_keys_limits_and_prices_take_plain_names(gateway: Gateway):
    acme = await gateway.tenant("acme")
    for name in ("pirate", "json"):
        assert (await push(acme, name, files())).status == 201
    for path, body in (
        ("/admin/api/tenants/acme/keys", {"allowed_models": ["pirate@1"]}),
        ("/admin/api/tenants", {"name": "new", "model_limits": {"pirate:prod": {}}}),
    ):
        assert (await gateway.admin.post(path, body)).error["code"] == "unknown_model"
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["pirate"]})
    scoped = gateway.client(made.json["key"])
    for text, status in (("pirate@1", 200), ("pirate:latest", 200), ("json@1", 403), ("pirate@1*1+json@1*1", 403)):
        assert (await scoped.chat(model=text)).status == status, text
    limits = {"model_limits": {"pirate": {"requests_per_minute": 2}}}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=limits)).status == 200
    # `json` has the same content, so it counts too.
    statuses = [(await acme.chat(model=text)).status for text in ("pirate@1", "json:latest", "pirate", "pirate@1")]
    assert statuses == [200, 200, 429, 429]
