"""Adapters and the playground in a real browser: an upload, a roll-back, a comparison, and no markup."""

import pytest

from testing.browser import Person, expect, faults, person
from testing.gateway.running import ADMIN_KEY, Client, Gateway
from tests.gateway.api.adapters.test_adapters import files, push

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOME = "/admin/tenants/acme/adapters/pirate"
HOSTILE = '<img src=x onerror="window.stolen = 1"><script>window.stolen = 1</script>'


async def fill(gateway: Gateway) -> Client:
    """Add adapters with versions, an alias that was moved, a long name and some use."""
    acme = await gateway.tenant("acme")
    for seed in (1, 2):
        assert (await push(acme, "pirate", files(seed))).status == 201
    assert (await push(acme, "pirate", {**files(3), "adapter_config.json": b'{"r": "<b>"}'})).status == 400
    assert (await push(acme, "x" * 64, files(4))).status == 201
    path, tag = "/v1/adapters/pirate/aliases/prod", {}
    for targets in ([{"version": 1}], [{"version": 1, "weight": 9}, {"version": 2}]):
        moved = await acme.call("PUT", path, json={"targets": targets}, headers=tag)
        tag = {"If-Match": moved.headers["ETag"]}
    for user in ("ada", HOSTILE, "u" * 100):
        assert (await acme.chat(model="pirate", user=user)).status == 200
    return acme


async def test_an_operator_uploads_a_version_and_rolls_an_alias_back(gateway, upstream, browser, tmp_path):
    acme = await fill(gateway)
    for name, content in files(7).items():
        (tmp_path / name).write_bytes(content)
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/adapters?q=pir")
        await operator.page.click("th a:has-text('pirate')")
        await operator.page.click("text=Upload a version")
        await operator.page.wait_for_selector("#f-files")
        await operator.page.wait_for_load_state()  # the script sends the form
        await operator.page.set_input_files("#f-files", [tmp_path / name for name in files()])
        await operator.page.click("button:has-text('Upload')")
        await operator.page.wait_for_url(f"**{HOME}?version=4&done=upload")
        await operator.sees("Requests for this name use version 4.")
        await operator.page.click("tr:has-text('prod') >> text=Roll back")
        await operator.sees("version 1 (90 %), version 2 (10 %)")
        await operator.page.click("button:has-text('Roll back')")
        await operator.page.wait_for_url(f"**{HOME}?done=rollback")
        await operator.page.click("a:has-text('Changes')")
        await operator.sees("rolled back")
        assert not operator.problems
    [prod] = [each for each in (await acme.get("/v1/adapters/pirate/aliases")).json["data"] if each["alias"] == "prod"]
    assert [target["version"] for target in prod["targets"]] == [1]


async def ask(operator: Person, prompt: str) -> None:
    await operator.open("/admin/playground?tenant=acme&a=pirate&b=base")
    await operator.page.fill("#f-prompt", prompt)
    # The test model's context is short.
    await operator.page.fill("#f-max_tokens", "16")
    await operator.page.click("#run")
    for side in ("a", "b"):
        await operator.page.wait_for_selector(f"#side-{side} [data-part=state]:has-text('complete')")


async def test_two_models_answer_side_by_side_as_text(gateway, upstream, browser):
    await fill(gateway)
    price = {"input": 1_000_000, "output": 1_000_000}
    assert (await gateway.admin.call("PUT", "/admin/api/prices/base", json=price)).status == 200
    upstream.says = [HOSTILE, " and more"]
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await ask(operator, HOSTILE)
        page = operator.page
        for side in ("a", "b"):
            assert await page.inner_text(f"#side-{side} .answer") == f"{HOSTILE} and more"
            assert "2 tokens" in await page.inner_text(f"#side-{side} [data-part=out]")
            assert "USD" in await page.inner_text(f"#side-{side} [data-part=cost]")
            assert "ms" in await page.inner_text(f"#side-{side} [data-part=ttft]")
        await page.hover("#side-a .token >> nth=1")
        tip = await page.inner_text("#token-tip")
        assert "50 %" in tip
        assert "other" in tip
        await page.click("summary:has-text('curl')")
        assert "chat/completions" in await page.inner_text("#curl")
        assert await page.evaluate("window.stolen") is None
        assert await page.locator("main img, main script").count() == 0
        # A link leads to the story of the request.
        assert (await page.get_attribute("#side-a [data-part=request] a", "href")).startswith("/admin/requests/req_")
        assert not await faults(operator)
    models = {request["model"] for _, request in upstream.requests[-2:]}
    assert "base" in models


async def test_stop_ends_both_requests(gateway, upstream, browser):
    await fill(gateway)
    upstream.holds = True
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/playground?tenant=acme&a=pirate&b=base")
        await operator.page.fill("#f-prompt", "Hi")
        await operator.page.fill("#f-max_tokens", "16")
        await operator.page.click("#run")
        await operator.page.wait_for_selector("#run:disabled")
        await operator.page.click("#stop")
        for side in ("a", "b"):
            await operator.page.wait_for_selector(f"#side-{side} [data-part=state]:has-text('stopped')")
        await expect(operator.page.locator("#run")).to_be_enabled()
    upstream.holds = False


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("/admin/playground?tenant=acme", "playground.js"),
        ("/admin/tenants/acme/adapter-upload?name=pirate", "upload.js"),
    ],
)
async def test_a_form_without_its_script_sends_nothing(gateway, browser, path, script):
    """The browser itself would put the prompt into the URL, and so into logs of proxies."""
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open(path)
        button = operator.page.locator("form .buttons button.primary")
        await expect(button).to_be_enabled()
        await operator.context.route(f"**/{script}*", lambda route: route.abort())
        await operator.open(path)
        await operator.page.wait_for_load_state()
        assert await button.is_disabled()
        requests: list[str] = []
        operator.page.on("request", lambda request: requests.append(request.url))
        await button.evaluate("button => button.form.querySelector('input').focus()")
        await operator.page.keyboard.press("Enter")
        await operator.page.wait_for_timeout(200)
        assert not [url for url in requests if "prompt" in url or "name=" in url]
        assert operator.page.url == gateway.url + path
