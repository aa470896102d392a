"""Faults and rate limits in answer to forms: each keeps its own status, its text and `Retry-After`."""

import gc
from pathlib import Path

import pytest

from gateway.records.tenants.tenants import Tenants
from testing.gateway.running import Answer, Browser, Gateway, change_database, running_alone, settings
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

ADAPTER, TARGET = "/admin/tenants/acme/adapters/pirate", "/admin/alerts/pager"


async def sent(browser: Browser, path: str, **form: str) -> Answer:
    """Send a form and return the direct answer to it."""
    data = {"csrf": await browser.csrf()} | form
    return await browser.call("POST", path, data=data, headers={"Accept": "text/html"})


async def every_form(gateway: Gateway) -> dict[str, dict[str, str]]:
    """Return a valid form of a change by path, except the key forms of tenants. Makes the records that they change."""
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    assert (await gateway.admin.call("PUT", "/admin/api/plans/gold", json={})).status == 200
    hook = {"url": "https://127.0.0.1:9/hook"}
    assert (await gateway.admin.call("PUT", "/admin/api/webhooks/pager", json=hook)).status == 201
    [key] = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"]
    return {
        "/admin/prices": {"model": "*", "input": "1", "output": "1"},
        "/admin/plans/-/new": {"name": "silver"},
        "/admin/plans/gold": {"requests_per_minute": "9"},
        "/admin/plans/gold/prices": {"prices": ""},
        "/admin/tenants/-/new": {"name": "initech"},
        "/admin/tenants/acme/edit": {"requests_per_minute": "9", "act": "save"},
        "/admin/tenants/acme/keys/new": {"label": "phone", "scopes": "inference", "expires": ""},
        "/admin/keys/new": {"label": "ops", "role": "viewer", "expires": ""},
        f"/admin/keys/{key['id']}/edit": {"label": "tablet"},
        f"/admin/keys/{key['id']}/rotate": {"grace": "0"},
        "/admin/alerts/-/new": {"name": "mail", **hook},
        f"{TARGET}/edit": {"types": "budget.exhausted"},
        "/admin/engines/bases/edit?name=base": {"digest": "ab" * 32},
        "/admin/engines/bases/drain": {"name": "base", "typed": "base"},
        f"{ADAPTER}/act": {"act": "delete", "typed": "pirate"},
    }


@pytest.mark.usefixtures("starts_servers")
async def test_a_fault_in_answer_to_a_form_is_no_error_of_the_form(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with running_alone(of) as gateway, gateway.browser() as browser:
        forms = await every_form(gateway)
        # Each change writes its entry in the audit.
        await change_database(tmp_path, "ALTER TABLE audit RENAME TO away")
        for path, form in forms.items():
            answer = await sent(browser, path, **form)
            assert (path, answer.status) == (path, 503), answer.body.decode()
            assert int(answer.headers["Retry-After"]) > 0, path
            assert b"Not available now" in answer.body, path


async def test_a_fault_of_the_first_check_of_a_new_tenant_leaves_no_check_behind(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    check_free = Tenants.check_free

    async def without_table(self: Tenants, name: str) -> None:
        await change_database(tmp_path, "ALTER TABLE tenants RENAME TO away")
        await check_free(self, name)

    monkeypatch.setattr(Tenants, "check_free", without_table)
    async with gateway.browser() as browser:
        assert (await sent(browser, "/admin/tenants/-/new", name="initech")).status == 503
    # A coroutine that is never awaited warns when it is collected, and warnings are errors.
    gc.collect()


async def test_changes_of_keys_beyond_the_limit_are_answered_with_retry_after(gateway: Gateway):
    await gateway.tenant("acme", adapter_changes_per_minute=1)
    scopes = {"scopes": ["keys", "inference"]}
    key = (await gateway.admin.post("/admin/api/tenants/acme/keys", scopes)).json["key"]
    async with gateway.browser(key, "/console") as browser:
        form = {"label": "phone", "scopes": "inference", "expires": ""}
        assert (await sent(browser, "/console/keys/new", **form)).status == 200
        refused = await sent(browser, "/console/keys/new", **form)
    assert refused.status == 429
    assert int(refused.headers["Retry-After"]) > 0
    assert b"1 adapter change per minute" in refused.body
