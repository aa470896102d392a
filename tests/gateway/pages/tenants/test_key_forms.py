"""Forms that make keys: one that is sent again, by a reload or a second click, makes no second key."""

import asyncio
import re
from pathlib import Path

import pytest

from testing.gateway.running import Gateway, change_database
from tests.gateway.pages.records import fields, send

SECRET = re.compile(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}")
SCOPES = {"scopes": "keys", "expires": ""}


async def ids(gateway: Gateway, path: str) -> set[str]:
    return {key["id"] for key in (await gateway.admin.get(path)).json["data"]}


@pytest.mark.parametrize(
    ("home", "path", "typed"),
    [
        ("/admin", "/admin/tenants/acme/keys/new", SCOPES),
        ("/admin", "/admin/keys/new", {"role": "viewer", "expires": ""}),
        ("/admin", "/admin/keys/{id}/rotate", {"grace": "3600"}),
        ("/console", "/console/keys/new", SCOPES),
        ("/console", "/console/keys/{id}/rotate", {"grace": "3600"}),
    ],
)
async def test_a_form_makes_one_key(gateway: Gateway, home: str, path: str, typed: dict[str, str]):
    await gateway.tenant("acme")
    old = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys"]})).json
    path = path.format(id=old["id"])
    owner = "/admin/api/keys" if path == "/admin/keys/new" else "/admin/api/tenants/acme/keys"
    async with gateway.browser(old["key"] if home == "/console" else gateway.admin.key, home) as browser:
        form = fields(await browser.get(path)) | typed
        before = await ids(gateway, owner)
        answers = await asyncio.gather(*(send(browser, path, form) for _ in range(3)), return_exceptions=False)
        answers.append(await send(browser, path, form))
        assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
        [secret] = {found for answer in answers for found in SECRET.findall(answer.body.decode())}
        [made] = await ids(gateway, owner) - before
        assert secret.split("_")[1] == made
        assert f"has made the key {made} already" in answers[-1].body.decode()
        # The page with the error is a new form.
        again = await send(browser, path, fields(answers[-1]) | typed)
        assert again.status == 200
        assert len(await ids(gateway, owner) - before) == 2


async def test_a_second_click_on_a_rotation_at_once_names_the_new_key(gateway: Gateway):
    """The old key has ended by then, so its state must not be what the error is about."""
    await gateway.tenant("acme")
    path = f"/admin/keys/{(await gateway.admin.post('/admin/api/tenants/acme/keys')).json['id']}/rotate"
    async with gateway.browser() as browser:
        form = fields(await browser.get(path)) | {"grace": "0"}
        assert (await send(browser, path, form)).status == 200
        again = await send(browser, path, form)
        assert (again.status, "has made the key" in again.body.decode()) == (409, True)


async def test_a_label_that_reverses_text_is_shown_inert_and_kept_by_forms(gateway: Gateway, tmp_path: Path):
    """Older releases stored such labels."""
    await gateway.tenant("acme")
    stored, shown = "pho\u202ene", "pho\\u202ene"
    key = (await gateway.admin.post("/admin/api/tenants/acme/keys")).json["id"]
    await change_database(tmp_path, "UPDATE api_keys SET label = ? WHERE id = ?", stored, key)
    path = f"/admin/keys/{key}"
    async with gateway.browser() as browser:
        for page in ("/admin/keys", f"{path}/revoke", "/admin/tenants/acme?tab=keys"):
            text = (await browser.get(page)).body.decode()
            assert (shown in text, stored in text) == (True, False), page
        edit = fields(await browser.get(f"{path}/edit"))
        assert edit["label"] == stored
        assert (await send(browser, f"{path}/edit", edit | {"max_concurrent": "3"})).status == 303
        [own] = [
            each for each in (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"] if each["id"] == key
        ]
        assert (own["label"], own["max_concurrent"]) == (stored, 3)
        assert (await browser.submit(f"{path}/revoke", typed=shown)).status == 303
