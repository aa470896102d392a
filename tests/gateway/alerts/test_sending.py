"""Signatures, allowed addresses, webhooks and e-mail, with real servers."""

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from aiosmtpd.controller import Controller

from gateway.alerts.addresses import PublicResolver, check_url, is_public
from gateway.alerts.mail import Mailer, MailFailed
from gateway.alerts.sending import Sender
from gateway.alerts.signing import signed_headers, webhook_secret
from gateway.errors import BadRequest
from gateway.records.webhooks.targets import Webhook, shown_url
from testing.ports import free_port

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
pytestmark = pytest.mark.usefixtures("starts_servers")


def webhook(url: str, tenant: str | None = None) -> Webhook:
    return Webhook(
        name="w",
        id="0" * 32,
        tenant=tenant,
        url=url,
        types=None,
        created_at=NOW,
        failures=0,
        retry_at=None,
        delivered_at=None,
        error=None,
    )


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        yield f"http://127.0.0.1:{port}/hook"
    finally:
        await runner.cleanup()


def test_the_signature_is_that_of_the_standards_example():
    headers = signed_headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_each_webhook_and_each_pepper_has_a_secret_of_its_own():
    assert len({webhook_secret(pepper, each) for pepper in ("a", "b") for each in ("1", "2")}) == 4


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::a00:1", "fec0::1", "3fff::1", "5f00::1", "2001:db8::1", "100::1"),
    ],
)
def test_an_address_that_is_not_public(address: str):
    assert not is_public(address)


def test_addresses_that_are_public():
    assert is_public("93.184.216.34")
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0x7f000001", "2130706433", "127.1"])
async def test_a_tenants_webhook_resolves_to_no_private_address(host: str):
    resolver = PublicResolver()
    with pytest.raises(OSError, match="no public address"):
        await resolver.resolve(host, 443)
    await resolver.close()


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://a.example/", "https://", "https://u:p@a.example/", "https://a.example:99999/", "https://a b/"),
        *("http://a.example/", "mailto:a", "mailto:a@b.example,c@d.example", "mailto:a@b.example\nBcc: c@d.example"),
        *(
            "mailto:a@b.example?bcc=c@d.example",
            "https://a.example/\r\nX: y",
            "javascript:alert(1)",
            "https://é.example/",
        ),
    ],
)
def test_a_url_that_is_refused(url: str):
    with pytest.raises(BadRequest) as refused:
        check_url(url, ("localhost",), has_mail=True, is_tenants=False)
    assert refused.value.param == "url"


def test_what_only_operators_may_reach():
    for url in ("http://localhost:9/x", "https://127.0.0.1/x", "https://[::1]/x"):
        check_url(url, ("localhost",), has_mail=False, is_tenants=False)
        with pytest.raises(BadRequest):
            check_url(url, ("localhost",), has_mail=False, is_tenants=True)
    with pytest.raises(BadRequest, match="LORAPLEX_SMTP_URL"):
        check_url("mailto:a@b.example", (), has_mail=False, is_tenants=False)


@pytest.mark.parametrize(
    "host",
    [
        *("127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "0", "127.0.0.1.", "169.254.169.254."),
        *("10.0.0.0x1", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[fe80::1%25eth0]"),
    ],
)
def test_other_forms_of_addresses_are_no_hosts_of_tenants(host: str):
    with pytest.raises(BadRequest, match="public address"):
        check_url(f"https://{host}/x", (), has_mail=False, is_tenants=True)


def test_names_with_numbers_are_hosts_of_tenants():
    for host in ("8.8.8.8", "127.0.0.1.nip.example", "0x7f.example", "3com.example", "example.x1"):
        check_url(f"https://{host}/x", (), has_mail=False, is_tenants=True)


def test_a_shown_url_has_no_secret():
    assert shown_url("https://hooks.example.com:8443/services/T0/B0/secret") == "https://hooks.example.com:8443/..."
    assert shown_url("https://hooks.example.com/?token=secret") == "https://hooks.example.com/..."
    assert shown_url("https://hooks.example.com/") == "https://hooks.example.com/"
    assert shown_url("mailto:a@b.example") == "mailto:a@b.example"


async def test_a_webhook_is_signed_over_what_arrives():
    received = []

    async def take(request: web.Request) -> web.Response:
        received.append((request.headers.copy(), await request.read()))
        return web.Response(status=204)

    sender = Sender("pepper", None)
    async with serving(take) as url:
        data = {"budget": 100, "spent": 80, "threshold": 0.8}
        assert await sender.send(webhook(url), "e1", "budget.threshold", "acme", data, NOW) is None
    await sender.close()
    [(headers, body)] = received
    assert json.loads(body) == {
        "id": "e1",
        "type": "budget.threshold",
        "timestamp": "2026-11-23T12:00:00Z",
        "data": {"tenant": "acme", **data},
    }
    key = base64.b64decode(webhook_secret("pepper", "0" * 32).removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert abs(int(headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60


async def test_during_a_rotation_of_the_pepper_both_secrets_verify_a_message():
    received = []

    async def take(request: web.Request) -> web.Response:
        received.append((request.headers.copy(), await request.read()))
        return web.Response(status=204)

    old, new = "0123456789-old-pepper", "0123456789-new-pepper"
    sender = Sender(f"{new},{old}", None)
    async with serving(take) as url:
        assert await sender.send(webhook(url), "e1", "engine.up", None, {}, NOW) is None
    await sender.close()
    [(headers, body)] = received
    alone = [
        signed_headers([webhook_secret(pepper, "0" * 32)], "e1", int(headers["webhook-timestamp"]), body)
        for pepper in (new, old)
    ]
    assert headers["webhook-signature"].split() == [each["webhook-signature"] for each in alone]


async def test_redirects_errors_and_silence_are_failures():
    asked, over = [], asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/redirect":
            raise web.HTTPFound("/elsewhere")
        if request.path == "/slow":
            await over.wait()
        return web.Response(status=500, text="secret of the target")

    sender, impatient = Sender("pepper", None), Sender("pepper", None, seconds=0.3)
    async with serving(handle) as url:
        results = []
        for path, by in (("/redirect", sender), ("/error", sender), ("/slow", impatient)):
            target = webhook(url.removesuffix("/hook") + path)
            results.append(await by.send(target, "e", "engine.up", None, {"engine": "e"}, NOW))
        over.set()
    assert results == ["the target answered 302", "the target answered 500", "no answer within 0.3 s"]
    # The redirect was not followed.
    assert asked[:2] == ["/redirect", "/error"]
    gone = await sender.send(webhook(url), "e", "engine.up", None, {"engine": "e"}, NOW)
    assert gone is not None
    assert "cannot be reached" in gone
    await sender.close()
    await impatient.close()


async def test_a_tenants_webhook_does_not_reach_this_machine():
    asked = []

    async def take(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    sender = Sender("pepper", None)
    async with serving(take) as url:
        target = url.replace("127.0.0.1", "localhost")
        failed = await sender.send(webhook(target, "acme"), "e", "tenant.suspended", "acme", {}, NOW)
        assert failed is not None
        assert "cannot be reached" in failed
        assert asked == []
        assert await sender.send(webhook(target), "e", "tenant.suspended", "acme", {}, NOW) is None
    await sender.close()


class Mailbox:
    """Handler of a mail server that keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.arrived = threading.Event()

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.messages.append(envelope)
        self.arrived.set()
        return "550 no" if b"refuse" in envelope.content else "250 OK"


@pytest.fixture
def mail() -> Iterator[tuple[Mailbox, str]]:
    mailbox = Mailbox()
    controller = Controller(mailbox, hostname="127.0.0.1", port=free_port())
    controller.start()
    yield mailbox, f"smtp://127.0.0.1:{controller.port}"
    controller.stop()


async def test_an_event_by_mail(mail: tuple[Mailbox, str]):
    mailbox, url = mail
    sender = Sender("pepper", Mailer(url, "loraplex@ops.example"))
    data = {"threshold": 0.8, "budget": 12_500_000, "spent": 10_000_000, "period": "month"}
    sent = await sender.send(webhook("mailto:ops@b.example"), "e1", "budget.threshold", "acme", data, NOW)
    await sender.close()
    assert sent is None
    [envelope] = mailbox.messages
    assert envelope.rcpt_tos == ["ops@b.example"]
    text = envelope.content.decode()
    assert "Subject: [Loraplex] acme has spent 80 % of its budget" in text
    assert "Message-ID: <e1@ops.example>" in text
    assert "budget: 12.50" in text
    assert "spent: 10.00" in text


async def test_a_password_is_not_sent_without_tls(mail: tuple[Mailbox, str]):
    _, url = mail
    mailer = Mailer(url.replace("//", "//user:secret-password@"), "a@b.example")
    with pytest.raises(MailFailed) as failed:
        await mailer.send("c@d.example", "e", "s", "t")
    assert "secret-password" not in str(failed.value)


async def test_a_refusing_mail_server_is_a_failure(mail: tuple[Mailbox, str]):
    _, url = mail
    with pytest.raises(MailFailed, match="550"):
        await Mailer(url, "a@b.example").send("c@d.example", "e", "s", "refuse")
