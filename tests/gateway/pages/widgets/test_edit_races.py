"""Edits of one record at the same moment: one is saved and the other is a conflict, unless their fields differ."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.api.key_manager import KeyManager
from gateway.records.keys.keys import ApiKey
from testing.gateway.running import Answer, Browser, Gateway, save_model
from tests.gateway.pages.records import fields, send

TENANT, KEYS, PLAN = "/admin/api/tenants/acme", "/admin/api/tenants/acme/keys", "/admin/api/plans/gold"
TARGET, BASE = "/admin/api/webhooks/pager", "/admin/api/bases"
TYPES = ("budget.soft", "budget.exhausted", "engine.down", "engine.up", "key.expiring", "adapter.rejected")


async def at_once(browsers: tuple[Browser, Browser], path: str, *forms: dict[str, str]) -> list[Answer]:
    """Open a form in two browsers, then send both with different values at the same moment."""
    pages = [fields(await browser.get(path)) for browser in browsers]
    sent = (
        browser.call("POST", path, data=page | {"csrf": await browser.csrf()} | form)
        for browser, page, form in zip(browsers, pages, forms, strict=True)
    )
    return list(await asyncio.gather(*[asyncio.ensure_future(each) async for each in sent]))


async def test_one_of_two_saves_of_a_field_is_a_conflict(gateway: Gateway, tmp_path: Path):
    await gateway.tenant("acme")
    await gateway.admin.call("PUT", PLAN, json={})
    await gateway.admin.call("PUT", TARGET, json={"url": "https://127.0.0.1:9/hook"})
    base = {"name": "second", "tokenizer": str(save_model(tmp_path / "second", context=512))}
    assert (await gateway.admin.post(BASE, base)).status == 201
    [key] = (await gateway.admin.get(KEYS)).json["data"]
    # Path of a form, its field and other fields, by the record and the field of the API.
    forms: dict[str, tuple[str, str, dict[str, str]]] = {
        "tenant": ("/admin/tenants/acme/edit", "requests_per_minute", {"act": "save"}),
        "budget": ("/admin/tenants/acme/budget", "budget_per_month", {"act": "save"}),
        "plan": ("/admin/plans/gold", "max_concurrent", {}),
        "prices": ("/admin/plans/gold/prices", "base_input", {"base_output": "1"}),
        "key": (f"/admin/keys/{key['id']}/edit", "label", {}),
        "base": ("/admin/engines/bases/edit?name=second", "context_length", {}),
        "target": ("/admin/alerts/pager/edit", "types", {}),
    }
    async with gateway.browser() as one, gateway.browser() as two:
        for record, (path, field, others) in forms.items():
            for number in (0, 2, 4):
                values = TYPES[number : number + 2] if field == "types" else (100 + number, 101 + number)
                answers = await at_once((one, two), path, *({field: str(value)} | others for value in values))
                assert sorted(answer.status for answer in answers) == [303, 409], (record, number)
                [conflict] = [answer for answer in answers if answer.status == 409]
                assert b"Another change was saved since you opened the form" in conflict.body, record


async def test_two_saves_of_different_fields_are_both_kept(gateway: Gateway):
    await gateway.tenant("acme")
    await gateway.admin.call("PUT", PLAN, json={})
    async with gateway.browser() as one, gateway.browser() as two:
        for number in (10, 20, 30):
            given: dict[str, Any] = {"max_concurrent": number, "requests_per_minute": number + 1}
            forms = [{name: str(value)} for name, value in given.items()]
            answers = await at_once((one, two), "/admin/plans/gold", *forms)
            assert [answer.status for answer in answers] == [303, 303], number
            plan = (await gateway.admin.get(PLAN)).json
            assert {name: plan[name] for name in given} == given


async def test_a_repeated_save_counts_once_against_the_limit_of_changes(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    await gateway.tenant("acme", adapter_changes_per_minute=1)
    own = (await gateway.admin.post(KEYS, {"scopes": ["keys", "inference"]})).json
    change, labels = KeyManager.change, iter(("by another",))

    async def after_another(self: KeyManager, key_id: str, *args: Any, **options: Any) -> ApiKey:
        """Change the key as another person would, once, right before the change."""
        for label in labels:
            assert (await gateway.admin.call("PATCH", f"/admin/api/keys/{key_id}", json={"label": label})).status == 200
        return await change(self, key_id, *args, **options)

    async with gateway.browser(own["key"], "/console") as browser:
        path = f"/console/keys/{own['id']}/edit"
        form = fields(await browser.get(path)) | {"max_concurrent": "3"}
        monkeypatch.setattr(KeyManager, "change", after_another)
        assert (await send(browser, path, form)).status == 303
        assert next(labels, None) is None
        form = fields(await browser.get(path)) | {"max_concurrent": "4"}
        assert (await send(browser, path, form)).status == 429
    [key] = [each for each in (await gateway.admin.get(KEYS)).json["data"] if each["id"] == own["id"]]
    assert (key["label"], key["max_concurrent"]) == ("by another", 3)
