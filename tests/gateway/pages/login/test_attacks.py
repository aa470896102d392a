"""Attacks on the log-in pages by anybody who can reach them."""

import asyncio
from collections import Counter
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.access.sessions import Identity
from gateway.api.requests.memory import SMALL_AT_ONCE
from gateway.pages.login import oidc as oidc_login
from gateway.pages.login import page as login
from gateway.pages.login.page import TENANT_BURST, LoginRate, TooManyLogins
from testing.gateway.principals import principal
from testing.gateway.running import ADMIN_KEY, Browser, Gateway
from tests.gateway.access.test_oidc import at_provider, provider

PROXIED = {"trusted_proxies": ["127.0.0.0/8"]}


async def send(gateway: Gateway, text: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the text of a request, perhaps not all of it, on a connection of its own."""
    parts = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(text.encode())
    await writer.drain()
    return reader, writer


def form(*, path: str = "/console/login", address: str = "203.0.113.9", length: str = "Content-Length: 100") -> str:
    return (
        f"POST {path} HTTP/1.1\r\nHost: gateway\r\nX-Forwarded-For: {address}\r\n{length}\r\n"
        "Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    )


async def test_slow_forms_of_an_address_take_no_place_of_operators_or_other_people(serve: Any):
    async with serve(**PROXIED) as gateway:
        slow = [await send(gateway, form() + "csrf=") for _ in range(SMALL_AT_ONCE)]
        try:
            # A further form of the address is refused, which shows that all others wait for their rest.
            for _ in range(200):
                reader, writer = await send(gateway, form() + "csrf=")
                slow.append((reader, writer))
                try:
                    async with asyncio.timeout(0.2):
                        head = await reader.readline()
                    break
                except TimeoutError:
                    continue
            assert b"429" in head
            assert (await gateway.admin.post("/admin/api/tenants", {"name": "acme"})).status == 201
            async with Browser(gateway.url, "/admin") as browser:
                assert (await browser.log_in(ADMIN_KEY)).status == 303
        finally:
            for _, writer in slow:
                writer.close()


async def test_a_form_of_unknown_length_is_read_to_its_limit_only(gateway: Gateway):
    chunk = f"{0x1000:x}\r\n{'a' * 0x1000}\r\n"
    head = form(length="Transfer-Encoding: chunked")
    reader, writer = await send(gateway, head + chunk * 5)
    async with asyncio.timeout(30):
        assert b"413" in await reader.readline()
    writer.close()


async def test_a_compressed_form_is_not_expanded(gateway: Gateway):
    got = await gateway.nobody.call(
        "POST",
        "/console/login",
        data=b"\x1f\x8b" + b"\0" * 100,
        headers={"Content-Encoding": "gzip", "Content-Type": "application/x-www-form-urlencoded"},
    )
    assert got.status == 400
    assert "compressed" in got.error["message"]


async def test_guesses_at_one_page_hide_no_failed_log_in_elsewhere_and_no_use_of_a_known_key(gateway: Gateway):
    operator = gateway.client((await gateway.admin.post("/admin/api/keys")).json["key"])
    revoked = (await gateway.admin.post("/admin/api/keys")).json
    await gateway.admin.call("DELETE", f"/admin/api/keys/{revoked['id']}")
    for home in ("/console", "/admin"):
        async with Browser(gateway.url, home) as browser:
            for _ in range(8):
                await browser.log_in("lpx_guess")
            if home == "/admin":
                await browser.log_in(revoked["key"])
    # The address is throttled now, except for issued keys.
    audit = (await operator.get("/admin/api/audit?action=login.failed")).json["data"]
    found = Counter((entry["target"], entry["actor"]) for entry in audit)
    # The minute may end in between.
    assert 1 <= found["/admin", revoked["id"]] <= 2
    assert 1 <= found["/admin", "unknown"] <= 10
    assert 1 <= found["/console", "unknown"] <= 10


# The provider's own libraries warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_wrong_answers_of_the_provider_count_by_address_and_fill_nothing(
    serve: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(oidc_login, "MAX_USED", 3)
    settings = {"oidc_client_id": "loraplex", "oidc_client_secret": "s", "oidc_roles": "ops=operator"} | PROXIED
    with provider(ann=["ops"]) as url:
        async with serve(oidc_issuer=url, **settings) as gateway:
            statuses = []
            for _ in range(14):
                async with Browser(gateway.url, "/admin") as browser:
                    browser.session.headers["X-Forwarded-For"] = "203.0.113.9"
                    began = await browser.get("/admin/login/oidc")
                    [state] = parse_qs(urlsplit(began.headers["Location"]).query)["state"]
                    got = await browser.get(f"/admin/login/oidc/return?state={state}&code=wrong")
                    statuses.append(got.status)
            assert statuses[:10] == [401] * 10
            assert statuses[-1] == 429
            async with Browser(gateway.url, "/admin") as browser:
                assert (await browser.get(await at_provider(browser, "ann"))).status == 200
                assert (await browser.get("/admin/")).status == 200


# The provider's own libraries warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_another_site_cannot_lock_people_out_by_answers_to_log_ins_that_nobody_began(serve: Any):
    """A page of the site has images with these addresses, which its visitors' browsers load without a cookie."""
    settings = {"oidc_client_id": "loraplex", "oidc_client_secret": "s", "oidc_roles": "ops=operator"}
    with provider(ann=["ops"]) as url:
        async with serve(oidc_issuer=url, **settings) as gateway:
            for home in ("/admin", "/console"):
                for query in ("error=access_denied", "state=guess&code=guess"):
                    for _ in range(10):
                        assert (await gateway.nobody.get(f"{home}/login/oidc/return?{query}")).status == 401
            async with Browser(gateway.url, "/admin") as browser:
                assert (await browser.get(await at_provider(browser, "ann"))).status == 200
                assert (await browser.get("/admin/")).status == 200
            audit = (await gateway.admin.get("/admin/api/audit?action=login.failed")).json["data"]
            assert audit == []


def test_many_keys_of_a_tenant_share_a_rate_of_log_ins():
    """Each log-in writes to the audit: with 100 keys they were 1,000 a minute, and displaced its older entries."""
    rate, tenant, other = LoginRate(), principal().tenant, principal().tenant

    def log_in(number: int, of: Any) -> None:
        rate.take(Identity(subject=f"k{number}", label="", role="tenant_member", tenant=of))

    for number in range(TENANT_BURST):
        log_in(number, tenant)
    with pytest.raises(TooManyLogins):
        log_in(TENANT_BURST, tenant)
    log_in(TENANT_BURST + 1, other)


# The provider's own libraries warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_log_ins_at_the_provider_count_like_those_with_a_key(serve: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(login, "LOGIN_BURST", 2)
    # A log-in takes a second or more on a busy machine, and may not pay off an earlier one.
    monkeypatch.setattr(login, "LOGIN_SECONDS", 600.0)
    settings = {"oidc_client_id": "loraplex", "oidc_client_secret": "s", "oidc_roles": "ops=operator"}
    with provider(ann=["ops"], bob=["ops"]) as url:
        async with serve(oidc_issuer=url, **settings) as gateway:

            async def log_in(name: str) -> int:
                async with Browser(gateway.url, "/admin") as browser:
                    got = await browser.get(await at_provider(browser, name))
                    assert (browser.cookie() is not None) == (got.status == 200)
                    return got.status

            assert [await log_in("ann") for _ in range(3)] == [200, 200, 429]
            assert await log_in("bob") == 200
            opened = (await gateway.admin.get("/admin/api/audit?action=session.open")).json["data"]
            assert [entry["actor"] for entry in opened] == ["oidc:bob", "oidc:ann", "oidc:ann"]
