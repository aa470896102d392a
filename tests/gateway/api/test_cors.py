"""Pages of other origins: only those that the operator allows, only /v1, and without credentials."""

from typing import Any

import pytest

from testing.gateway.running import Gateway

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def cors(answer: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items() if name.lower().startswith("access-control")}


async def test_an_allowed_page_may_call_the_api(serve: Any):
    async with serve(cors_origins=[PAGE, "http://localhost:3000"]) as gateway:
        acme = await gateway.tenant("acme")
        asked = await gateway.nobody.call("OPTIONS", "/v1/chat/completions", headers={"Origin": PAGE} | PREFLIGHT)
        assert (asked.status, asked.body) == (204, b"")
        allowed = cors(asked)
        assert allowed["access-control-allow-origin"] == PAGE
        assert allowed["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in allowed["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in allowed
        for stream in (False, True):
            answer = await acme.post(
                "/v1/completions", {"model": "base", "prompt": "Hi", "stream": stream}, headers={"Origin": PAGE}
            )
            assert answer.status == 200
            assert cors(answer)["access-control-allow-origin"] == PAGE
            assert "x-request-id" in cors(answer)["access-control-expose-headers"]
            assert "Origin" in answer.headers["Vary"]
        # Errors can be read too.
        refused = await gateway.nobody.post("/v1/completions", {}, headers={"Origin": PAGE})
        assert (refused.status, cors(refused)["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "https://chat.example.com.evil.example", "http://chat.example.com", PAGE + ":444", "null"],
)
async def test_a_foreign_page_gets_nothing(origin: str, serve: Any):
    async with serve(cors_origins=[PAGE]) as gateway:
        acme = await gateway.tenant("acme")
        for path in ("/v1/models", "/v1/chat/completions", "/admin/api/tenants", "/readyz"):
            asked = await gateway.nobody.call("OPTIONS", path, headers={"Origin": origin} | PREFLIGHT)
            assert (asked.status, cors(asked)) == (405, {})
        assert cors(await acme.get("/v1/models", headers={"Origin": origin})) == {}


async def test_no_page_reaches_the_admin_api(serve: Any):
    async with serve(cors_origins=[PAGE]) as gateway:
        for path in ("/admin/api/tenants", "/admin/", "/v1/../admin/api/tenants", "/v1/%2e%2e/admin/api/tenants"):
            asked = await gateway.admin.call("OPTIONS", path, headers={"Origin": PAGE} | PREFLIGHT)
            assert (asked.status, cors(asked)) == (405, {}), path
            assert cors(await gateway.admin.get(path, headers={"Origin": PAGE})) == {}, path


async def test_without_the_setting_no_page_may_call(gateway: Gateway):
    asked = await gateway.nobody.call("OPTIONS", "/v1/models", headers={"Origin": PAGE} | PREFLIGHT)
    assert (asked.status, cors(asked)) == (405, {})
    assert cors(await (await gateway.tenant("acme")).get("/v1/models", headers={"Origin": PAGE})) == {}
