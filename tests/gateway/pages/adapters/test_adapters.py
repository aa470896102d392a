"""Page of all adapters: rows, filters, sorts, CSV, roles, and names that would be markup."""

import csv
import io
import re
from pathlib import Path

from testing.gateway.running import Gateway, change_database, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

LIST = "/admin/adapters"
HOSTILE = "<img src=x onerror=alert(1)>\"'"


def names(text: str) -> list[str]:
    return re.findall(r'<th scope="row"[^>]*><a href="/admin/tenants/(\S+?)">', text)


async def test_the_list_has_all_tenants_adapters(gateway: Gateway, upstream: Upstream, tmp_path: Path):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    digest = (await push(acme, "pirate", files(1))).json["digest"]
    for name in ("json", "x" * 64):
        assert (await push(globex, name, files(2))).status == 201
    assert (await push(globex, "json", {**files(2), "adapter_config.json": b"{}"})).status == 400
    upstream.resident = [digest]
    async with gateway.browser() as browser:

        async def resident() -> bool:
            return "1 of 1 engines" in (await browser.get(f"{LIST}?q=pirate")).body.decode()

        await until(resident)
        page = await browser.get(LIST)
        text = page.body.decode()
        assert page.status == 200
        assert names(text) == ["globex/adapters/json", "acme/adapters/pirate", f"globex/adapters/{'x' * 64}"]
        assert "newest 2" in text
        assert "2 rejected" in text
        assert "1–3 of 3" in text
        for query, found in (
            ("q=PIR", ["acme/adapters/pirate"]),
            ("tenant=globex&sort=-name", [f"globex/adapters/{'x' * 64}", "globex/adapters/json"]),
            ("state=rejected", ["globex/adapters/json"]),
            ("unused=true&state=&rank=", []),
            ("idle_days=7&tenant=acme", []),
            ("rank=77", []),
        ):
            assert names((await browser.get(f"{LIST}?{query}")).body.decode()) == found, query
        await change_database(
            tmp_path, "UPDATE adapters SET created_at = datetime('now', '-10 days') WHERE name = 'pirate'"
        )
        for query, found in (("unused=true", []), ("idle_days=7", ["acme/adapters/pirate"])):
            assert names((await browser.get(f"{LIST}?{query}")).body.decode()) == found, query
        chosen = (await browser.get(f"{LIST}?idle_days=45")).body.decode()
        assert '<option value="45" selected>not for 45 days</option>' in chosen
        for query, field in (("state=lost", "state"), ("rank=many", "rank")):
            refused = await browser.get(f"{LIST}?{query}")
            assert (refused.status, f'id="e-{field}"' in refused.body.decode()) == (400, True)
        exported = await browser.get(f"{LIST}?format=csv&tenant=acme")
        [row] = csv.DictReader(io.StringIO(exported.body.decode()))
        assert (row["tenant"], row["name"], row["version"], row["resident"]) == ("acme", "pirate", "1", upstream.url)
        assert f"sha256:{row['digest']}" == digest


async def test_the_list_names_base_models_and_says_that_a_rejected_upload_has_no_content(gateway: Gateway):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    assert (await push(acme, "broken", {**files(2), "adapter_config.json": b"{}"})).status == 400
    async with gateway.browser() as browser:
        text = (await browser.get(LIST)).body.decode()
    broken, pirate = re.findall(r"<tr><th scope=\"row\"><a href=\"/admin/tenants/.*?</tr>", text, re.DOTALL)
    cell = '<td class="n none" data-label="{}">no content</td>'
    assert cell.format("Rank") in broken
    assert cell.format("Size") in broken
    assert 'data-label="Trained for">base<' in pirate
    assert 'data-label="Trained for"><span class="none">–<' in broken


async def test_a_tenant_without_adapters_leads_to_the_upload(gateway: Gateway):
    await gateway.tenant("acme")
    async with gateway.browser() as browser:
        listed = (await browser.get(f"{LIST}?tenant=acme")).body.decode()
        assert '<a class="button" href="/admin/tenants/acme">Tenant acme</a>' in listed
        tenant = (await browser.get("/admin/tenants/acme")).body.decode()
        [form] = re.findall(r'href="(\S+)">Upload an adapter</a>', tenant)
        assert (await browser.get(form)).status == 200


async def test_an_address_without_a_page_is_not_found(gateway: Gateway):
    async with gateway.browser() as browser:
        page = await browser.get("/admin/no/such/page", headers={"Accept": "text/html"})
        assert (page.status, "No page has this address." in page.body.decode()) == (404, True)


async def test_what_is_typed_into_the_filters_is_no_markup(gateway: Gateway):
    async with gateway.browser() as browser:
        for name in ("q", "tenant"):
            page = await browser.get(LIST, params={name: HOSTILE})
            assert page.status == 200
            assert "<img" not in page.body.decode()
            assert "&lt;img src=x" in page.body.decode()


async def test_readers_see_the_list_and_tenants_do_not(gateway: Gateway):
    acme = await gateway.tenant("acme")
    made = await gateway.admin.post("/admin/api/keys", {"role": "viewer", "label": "reader"})
    async with gateway.browser(made.json["key"]) as reader:
        assert (await reader.get(LIST)).status == 200
    async with gateway.browser(acme.key, "/console") as tenant:
        assert (await tenant.get(LIST)).status == 303
    async with gateway.browser(None) as nobody:
        assert (await nobody.get(LIST)).headers["Location"] == f"/admin/login?next={LIST}"
