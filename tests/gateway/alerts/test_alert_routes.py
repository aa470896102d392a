"""Webhooks and events through a running gateway, its routes and its commands."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

from gateway.alerts.signing import signed_headers
from loraplex.cli import main
from testing.gateway.running import ADMIN_KEY, Gateway, running_alone, settings, until
from testing.gateway.upstream import Upstream
from testing.gateway.webhooks import Target, webhook_target

HOOKS = "/admin/api/webhooks"
SETTINGS: dict[str, Any] = {"webhook_http_hosts": ("127.0.0.1",)}


@pytest.fixture
async def target(starts_servers: None) -> AsyncIterator[Target]:
    async with webhook_target() as target:
        yield target


@pytest.fixture
async def gateway(serve: Any) -> AsyncIterator[Gateway]:
    async with serve(**SETTINGS) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway_with_acme(
    shared_folder: Path, model_dir: Path, shared_upstream: Upstream, redis_url: str
) -> AsyncIterator[Gateway]:
    """Start a gateway with a tenant acme for the tests whose requests change nothing."""
    of = settings(shared_folder, model_dir, [shared_upstream.url], redis_url, **SETTINGS)
    async with running_alone(of) as gateway:
        await gateway.tenant("acme")
        yield gateway


async def test_a_suspended_tenant_reaches_a_webhook_with_a_right_signature(gateway: Gateway, target: Target):
    made = await gateway.admin.call("PUT", f"{HOOKS}/pager", json={"url": target.url})
    assert made.status == 201
    secret = made.json["secret"]
    await gateway.tenant("acme")
    for suspended in (True, True, False):
        assert (
            await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": suspended})
        ).status == 200

    async def arrived() -> bool:
        return bool(target.received)

    await until(arrived)
    [(headers, body)] = target.received
    assert json.loads(body)["data"] == {"tenant": "acme"}
    expected = signed_headers([secret], headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == expected["webhook-signature"]

    async def is_recorded() -> bool:
        events = (await gateway.admin.get("/admin/api/events?tenant=acme&type=tenant")).json["data"]
        return [(event["type"], event["deliveries"]) for event in events] == [
            ("tenant.suspended", {"pager": "delivered"})
        ]

    await until(is_recorded)


async def test_the_audit_has_where_events_went_before_and_where_they_go(gateway: Gateway):
    """A person who redirects the events of others leaves a trace, without the paths, which often hold secrets."""
    for given in (
        {"url": "https://a.example/secret"},
        {"url": "https://b.example:8443/secret", "types": ["engine.up"]},
    ):
        assert (await gateway.admin.call("PUT", f"{HOOKS}/w", json=given)).status in (200, 201)
    [changed, added] = (await gateway.admin.get("/admin/api/audit?action=webhook.put")).json["data"]
    first = {"url": "https://a.example/...", "types": None}
    assert (added["detail"], added["before"]) == (first, None)
    assert (changed["detail"], changed["before"]) == (
        {"url": "https://b.example:8443/...", "types": ["engine.up"]},
        first,
    )


async def test_the_secret_is_shown_once_and_the_path_never(gateway: Gateway, target: Target):
    answers = [await gateway.admin.call("PUT", f"{HOOKS}/w", json={"url": target.url}) for _ in range(2)]
    answers += [await gateway.admin.get(HOOKS), await gateway.admin.get(f"{HOOKS}/w")]
    assert [answer.status for answer in answers] == [201, 200, 200, 200]
    assert [b"whsec_" in answer.body for answer in answers] == [True, False, False, False]
    audit = await gateway.admin.get("/admin/api/audit?action=webhook")
    assert [entry["action"] for entry in audit.json["data"]] == ["webhook.put", "webhook.put"]
    assert not any(b"secret-path" in answer.body for answer in (*answers, audit))
    # A new webhook of the name has another secret.
    assert (await gateway.admin.call("DELETE", f"{HOOKS}/w")).status == 200
    again = await gateway.admin.call("PUT", f"{HOOKS}/w", json={"url": target.url})
    assert again.json["secret"] != answers[0].json["secret"]


async def test_a_test_event_says_how_it_went(gateway: Gateway, target: Target):
    await gateway.admin.call("PUT", f"{HOOKS}/w", json={"url": target.url})
    assert (await gateway.admin.post(f"{HOOKS}/w/test")).json["ok"] is True
    target.status = 302
    failed = (await gateway.admin.post(f"{HOOKS}/w/test")).json
    assert (failed["ok"], failed["error"]) == (False, "the target answered 302")
    assert target.types == ["test", "test"]
    assert (await gateway.admin.get("/admin/api/events")).json["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": "http://elsewhere.example/"}, "url"),
        ({"url": "mailto:a@b.example"}, "url"),
        ({"url": "https://a.example/", "types": ["unknown"]}, "types[0]"),
        ({"url": "https://a.example/", "types": []}, "types"),
        ({"url": "https://a.example/", "tenant": "unknown"}, "tenant"),
        ({"url": "https://169.254.169.254/", "tenant": "acme"}, "url"),
        ({"url": "http://127.0.0.1/", "tenant": "acme"}, "url"),
        ({"url": "https://a.example/", "other": 1}, "other"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_body_names_the_field(gateway_with_acme: Gateway, body: dict[str, Any], param: str):
    answer = await gateway_with_acme.admin.call("PUT", f"{HOOKS}/w", json=body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == param


async def test_other_mistakes(gateway: Gateway):
    assert (await gateway.admin.get(f"{HOOKS}/%00")).status == 404
    assert (await gateway.admin.call("PUT", f"{HOOKS}/A B", json={"url": "https://a.example/"})).error[
        "param"
    ] == "name"
    for query in ("type=unknown", "after=unknown", "since=never", "limit=0", "tenant=%00"):
        answer = await gateway.admin.get(f"/admin/api/events?{query}")
        assert (answer.status, answer.error["param"]) == (400, query.split("=")[0])


async def test_a_tenant_reaches_none_of_it(gateway: Gateway):
    acme = await gateway.tenant("acme")
    for method, path in (
        ("GET", HOOKS),
        ("PUT", f"{HOOKS}/w"),
        ("POST", f"{HOOKS}/w/test"),
        ("GET", "/admin/api/events"),
    ):
        assert (await acme.call(method, path, json={"url": "https://a.example/"})).status in (401, 403)


async def test_thresholds_of_a_tenant(gateway: Gateway):
    await gateway.tenant("acme")
    tenant = "/admin/api/tenants/acme"
    assert (await gateway.admin.get(tenant)).json["budget_warn_at"] == [0.8, 1.0]
    changed = await gateway.admin.call("PATCH", tenant, json={"budget_warn_at": [1, 0.5]})
    assert changed.json["budget_warn_at"] == [0.5, 1.0]
    for wrong in ([0], [1.1], "x", [0.5] * 11):
        answer = await gateway.admin.call("PATCH", tenant, json={"budget_warn_at": wrong})
        assert answer.status == 400
        assert answer.error["param"].startswith("budget_warn_at")


async def test_the_commands(gateway: Gateway, target: Target):
    env = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env |= {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def run(*arguments: str, code: int = 0) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)
        assert result.exit_code == code, result.output
        return result.output

    assert "whsec_" in await run("webhook", "set", "pager", target.url, "--types", "tenant.suspended,engine.down")
    assert "accepted the event" in await run("webhook", "test", "pager")
    await run("tenant", "create", "acme", "--budget-warn-at", "0.5,1")
    await run("tenant", "suspend", "acme")

    async def is_delivered() -> bool:
        return "pager:delivered" in await run("events", "--tenant", "acme")

    await until(is_delivered)
    listed = await run("webhook", "list")
    assert "engine.down,tenant.suspended" in listed
    assert "secret-path" not in listed
    assert json.loads(await run("events", "--type", "engine", "--json"))["data"] == []
    target.status = 500
    assert "the target answered 500" in await run("webhook", "test", "pager", code=1)
    await run("webhook", "delete", "pager")
    assert "pager" not in await run("webhook", "list")
