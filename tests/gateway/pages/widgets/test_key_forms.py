"""Forms that make keys: one that is sent again, by a reload or a second click, makes no second key."""

import asyncio
import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import Unavailable
from gateway.pages.widgets.examples import KeyExamples
from gateway.records.adapters.catalog import Catalog
from testing.gateway.running import Answer, Gateway, change_database
from tests.gateway.api.adapters.test_adapters import files, push
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


@pytest.mark.parametrize("home", ["/admin", "/console"])
async def test_a_new_key_comes_with_ready_calls(gateway: Gateway, home: str):
    """The calls name a model that the key may use; the page is not cached, and its URL does not have the secret."""
    acme = await gateway.tenant("acme")
    scopes = {"scopes": ["inference", "keys"]}
    admin = (await gateway.admin.post("/admin/api/tenants/acme/keys", scopes)).json["key"]
    for name in ("first", "second"):
        assert (await push(acme, name, files(1))).status == 201
    start = f"{home}/tenants/acme/keys/new" if home == "/admin" else "/console/keys/new"
    async with gateway.browser(gateway.admin.key if home == "/admin" else admin, home) as browser:
        typed = {"scopes": "inference", "expires": "", "allowed_models": "second"}
        made = await send(browser, start, fields(await browser.get(start)) | typed)
        rotate = f"{home}/keys/{secret_in(made).split('_')[1]}/rotate"
        rotated = await send(browser, rotate, fields(await browser.get(rotate)) | {"grace": "0"})
        for answer in (made, rotated):
            secret, copied = secret_in(answer), copied_in(answer)
            [shell] = [text for text in copied if text.startswith("curl ")]
            [python] = [text for text in copied if text.startswith("from openai import OpenAI")]
            assert f"{gateway.url}/v1" in copied
            assert f"curl {gateway.url}/v1/chat/completions" in shell
            assert f'base_url="{gateway.url}/v1", api_key="{secret}"' in python
            assert (f"Bearer {secret}" in shell, '"model": "second"' in shell) == (True, True)
            assert 'model="second"' in python
            compile(python, "example", "exec")
            assert answer.headers["Cache-Control"] == "no-store"
            assert secret not in str(answer.headers)


async def test_a_key_that_sends_no_request_comes_without_calls(gateway: Gateway):
    await gateway.tenant("acme")
    async with gateway.browser() as browser:
        for path, typed in (
            ("/admin/keys/new", {"role": "viewer", "expires": ""}),
            ("/admin/tenants/acme/keys/new", SCOPES),
        ):
            answer = await send(browser, path, fields(await browser.get(path)) | typed)
            assert copied_in(answer) == [secret_in(answer)]


async def test_a_new_key_is_shown_although_the_adapters_cannot_be_read(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    async def fail(*_: object) -> None:
        raise Unavailable("The database is unavailable.", code="database_unavailable")

    await gateway.tenant("acme")
    path = "/admin/tenants/acme/keys/new"
    async with gateway.browser() as browser:
        form = fields(await browser.get(path)) | {"scopes": "inference", "expires": ""}
        monkeypatch.setattr(Catalog, "list", fail)
        copied = copied_in(await send(browser, path, form))
    assert any('model="base"' in text for text in copied)


def test_the_calls_of_operators_on_their_own_port_go_to_the_public_port():
    """A proxy's address stays as it is: only the gateway's own port is known to have a public counterpart."""
    examples = KeyExamples(SimpleNamespace(), SimpleNamespace(), port=8080, admin_port=9000)  # type: ignore[arg-type]
    for host, address in (("gw:9000", "http://gw:8080"), ("ops.example.com", "http://ops.example.com")):
        arrived = SimpleNamespace(get_extra_info=lambda _: ("127.0.0.1", 9000))
        request: Any = SimpleNamespace(host=host, transport=arrived)
        assert examples.address(request) == address


def secret_in(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return SECRET.findall(answer.body.decode())[0]


def copied_in(answer: Answer) -> list[str]:
    """Return the texts of the page's buttons to copy."""
    return [unescape(text) for text in re.findall(r'data-copy="([^"]*)"', answer.body.decode())]
