"""The gateway's root, and what lists of models tell of them."""

from typing import Any

from testing.gateway.running import ADMIN_KEY, CONTEXT, Browser
from testing.ports import free_port
from tests.gateway.api.adapters.test_adapters import files, push


async def test_the_root_names_the_services_addresses(serve: Any):
    async with serve() as gateway:
        links = (await gateway.nobody.get("/")).json["links"]
        assert {"/v1", "/openapi.json", "/readyz", "/admin/"} <= links.keys()
        page = await gateway.nobody.get("/", headers={"Accept": "text/html,*/*"})
        assert page.headers["Content-Type"].startswith("text/html")
        assert b'<a href="/openapi.json">' in page.body
        assert b'<a href="/admin/">' in (await gateway.nobody.get("/console/login")).body
        async with Browser(gateway.url, "/console") as browser:
            refused = await browser.log_in(ADMIN_KEY)
            assert (refused.status, b'<a href="/admin/">' in refused.body) == (401, True)
    async with serve(admin_port=free_port()) as separate:
        assert "/admin/" not in (await separate.nobody.get("/")).json["links"]
        assert b'<a href="/admin/">' not in (await separate.nobody.get("/console/login")).body


async def test_models_have_their_context_and_their_price(serve: Any):
    """An adapter's price is the highest of its content's names, in the list as for a request."""
    async with serve(currency="EUR") as gateway:
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        [free] = (await acme.get("/v1/models")).json["data"]
        assert (free["max_model_len"], free["context_length"]) == (CONTEXT, CONTEXT)
        assert "price" not in free
        for name in ("a", "b"):
            assert (await push(acme, name, files(1))).status == 201
        for path, price in (("base", 1_000_000), ("acme/b", 2_500_000)):
            body = {"input": price, "output": price, "cached": 0}
            assert (await gateway.admin.call("PUT", f"/admin/api/prices/{path}", json=body)).status == 200
        listed = {model["id"]: model for model in (await acme.get("/v1/models")).json["data"]}
        own = {"input": "2.50", "cached": "0.00", "output": "2.50", "currency": "EUR"}
        assert [listed[name]["price"] for name in ("a", "b")] == [own, own]
        assert listed["base"]["price"] == {"input": "1.00", "cached": "0.00", "output": "1.00", "currency": "EUR"}
        for name, model in listed.items():
            assert (await acme.get(f"/v1/models/{name}")).json == model
        assert [model["id"] for model in (await other.get("/v1/models")).json["data"]] == ["base"]
