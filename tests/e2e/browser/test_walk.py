"""People at work on a real stack with a real model, in a real browser: an operator, and people who may do less."""

import json
import re
from urllib.parse import quote

import pytest

from testing.browser import Person, expect, person
from testing.gateway.running import until
from testing.stack import ROOT, Stack, http

pytestmark = pytest.mark.asyncio(loop_scope="session")
PIRATE = ROOT / "examples/adapters/pirate"
FILES = (PIRATE / "adapter_config.json", PIRATE / "adapter_model.safetensors")
SECRET = re.compile(r"lpx_\w{20,}")


@pytest.fixture
def admin_key(stack: Stack) -> str:
    return stack.demo["admin_key"]


def status_of(stack: Stack, key: str) -> int:
    return http("GET", f"{stack.demo['gateway']}/v1/models", key).status


async def click(who: Person, text: str, within: str = "main") -> None:
    """Click the link or button with exactly this text."""
    await who.page.locator(f"{within} :is(a, button)").filter(has_text=re.compile(rf"^\s*{text}\s*$")).first.click()


async def confirm(who: Person, name: str) -> None:
    """Type the name on a page that asks for it. Its button is disabled before."""
    button = who.page.locator("main button.danger")
    await expect(button).to_be_disabled()
    await who.page.fill("input[name=typed]", name)
    await button.click()


async def shown_secret(who: Person) -> str:
    """Return the secret of a new key, which no page shows again."""
    secret = await who.page.locator(".narrow .copyable code").inner_text()
    assert SECRET.fullmatch(secret)
    await click(who, "Done")
    await who.page.wait_for_selector("#keys")
    await who.page.wait_for_load_state()
    assert secret not in await who.page.content()
    return secret


async def make_key(who: Person, label: str, *scopes: str) -> str:
    """Fill the form of a new key and return the secret."""
    await who.page.fill("input[name=label]", label)
    for box in await who.page.locator("input[name=scopes]").all():
        await box.set_checked(await box.get_attribute("value") in scopes)
    await click(who, "Create")
    return await shown_secret(who)


async def ask(who: Person, model: str, prompt: str) -> str:
    """Ask in the playground that is open. Return the answer."""
    await who.page.fill("[name=prompt]", prompt)
    await who.page.fill("[name=max_tokens]", "12")
    await who.page.fill("[name=model_a]", model)
    await who.page.click("#run")
    await who.page.wait_for_selector("#side-a [data-part=state]:is(:text-is('complete'), :text('cut'))")
    assert await who.page.locator("#side-a [data-part=error]").is_hidden()
    return await who.page.locator("#side-a [data-part=answer]").inner_text()


async def test_an_operator_takes_a_tenant_from_its_start_to_its_suspension(stack, browser, admin_key):
    async with person(browser, stack.demo["gateway"]) as who:
        page = who.page
        await who.log_in("/admin", admin_key)
        await click(who, "Tenants", "nav")
        await click(who, "New tenant")
        await page.fill("input[name=name]", "initech")
        await click(who, "Create")
        await page.wait_for_url("**/admin/tenants/initech?done=created")

        await click(who, "New key")
        key = await make_key(who, "first", "inference", "adapters", "usage", "keys")
        assert status_of(stack, key) == 200

        await upload(who)
        await click(who, "Adapters", "nav")
        await page.wait_for_selector("#adapters tr:has-text('initech'):has-text('pirate')")

        await who.open("/admin/playground?tenant=initech")
        assert await ask(who, "pirate", "Why is the sky blue?")

        await who.find("/admin/tenants/initech", "table tr:has-text('pirate')")
        await who.find("/admin/engines/residency", "tr:has-text('initech/pirate') .cell-device")
        for action in ("tenant.create", "key.create", "adapter.push"):
            await who.find("/admin/audit", f"tr:has-text('{action}'):has-text('initech')")

        await who.open("/admin/tenants/initech?tab=keys")
        await click(who, "Rotate")
        await page.select_option("select[name=grace]", "0")
        await click(who, "Rotate")
        rotated = await shown_secret(who)
        assert (status_of(stack, key), status_of(stack, rotated)) == (401, 200)

        await click(who, "Revoke")
        await confirm(who, "first")
        await page.wait_for_url("**/admin/keys?done=revoked")
        assert status_of(stack, rotated) == 401

        await who.open("/admin/tenants/initech/keys/new")
        second = await make_key(who, "second", "inference")
        await click(who, "Suspend")
        await confirm(who, "initech")
        await page.wait_for_selector("main .badge:text-is('suspended')")
        assert status_of(stack, second) == 403
        assert who.problems == []


async def upload(who: Person) -> None:
    """Upload the example adapter by the form of the tenant's page."""
    await who.open("/admin/tenants/initech")
    await click(who, "Upload an adapter")
    await who.page.fill("#f-name", "pirate")
    await who.page.set_input_files("#f-files", list(FILES))
    # The button is enabled once the script that sends the form has run.
    await click(who, "Upload")
    await who.page.wait_for_url("**/admin/tenants/initech/adapters/pirate?version=1&done=upload")


def _json(**fields: str) -> bytes:
    return json.dumps(fields).encode()


# Prices belong to the role billing, with their deletion.
PRICES = "/admin/prices"
# Pages that each role of operators may see, with the buttons and links there that only greater roles may use.
READ = ("/admin/", "/admin/engines", "/admin/engines/residency", "/admin/engines/bases",
        "/admin/tenants", "/admin/tenants/acme", "/admin/tenants/acme?tab=limits",
        "/admin/tenants/acme?tab=keys", "/admin/tenants/acme?tab=audit",
        "/admin/keys", "/admin/adapters", "/admin/plans", PRICES, "/admin/audit",
        "/admin/fairness", "/admin/alerts", "/admin/alerts?tab=targets", "/admin/settings",
        "/admin/settings?tab=sessions", "/admin/search?q=acme", "/admin/engines/one?url={engine}",
        "/admin/tenants/acme/adapters/pirate", "/admin/requests/{request}")  # fmt: skip
OF_OPERATORS = re.compile(
    r"(New|End\s+the session|Suspend|Resume|Edit|Delete|Drain|Rotate|Revoke|Upload|Create|Change all)\b"
)
OF_BILLING = re.compile(r"(Budget$|Set\b|Save\b)")


async def places(stack: Stack, admin_key: str) -> dict[str, str]:
    """Return the values of the words in `READ`, after a request of acme is on record."""
    gateway = stack.demo["gateway"]
    [acme] = [each for each in stack.demo["tenants"] if each["name"] == "acme"]
    asked = {"model": "pirate", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = http("POST", f"{gateway}/v1/chat/completions", acme["api_key"], json.dumps(asked).encode())
    assert answer.status == 200, answer.body
    request = answer.headers["x-request-id"]

    async def is_recorded() -> bool:
        return http("GET", f"{gateway}/admin/api/requests/{request}", admin_key).status == 200

    await until(is_recorded)
    [engine, *_] = http("GET", f"{gateway}/admin/api/engines", admin_key).json["data"]
    return {"request": request, "engine": quote(engine["url"], safe="")}


@pytest.mark.parametrize("role", ["viewer", "billing", "operator"])
async def test_a_role_sees_no_buttons_of_a_greater_one(stack, browser, admin_key, role):
    made = http("POST", f"{stack.demo['gateway']}/admin/api/keys", admin_key, _json(label=role, role=role)).json
    operators, billing = set(), set()
    known = await places(stack, admin_key)
    async with person(browser, stack.demo["gateway"]) as who:
        await who.log_in("/admin", made["key"])
        for path in READ:
            answer = await who.page.goto(who.url + path.format(**known))
            assert answer.status == 200, path
            texts = await who.page.locator("main :is(a, button, summary)").all_inner_texts()
            changes = {(path, text) for text in texts if OF_OPERATORS.match(text)}
            (billing if path == PRICES else operators).update(changes)
            billing |= {(path, text) for text in texts if OF_BILLING.match(text)}
        assert (len(operators) > 10) == (role == "operator"), operators
        assert not operators or role == "operator", operators
        assert bool(billing) == (role != "viewer"), billing
        assert ("Playground" in await who.page.inner_text("nav")) == (role == "operator")
        assert who.problems == []
        answer = await who.page.goto(f"{who.url}/admin/playground")
        assert answer.status == (200 if role == "operator" else 403)
