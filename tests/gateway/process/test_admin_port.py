"""Operators' routes on their own port."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from gateway.settings import SettingsError
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.ports import free_port

ADMINS = [
    "/admin",
    "/admin/",
    "/admin/engines",
    "/admin/events",
    "/%61dmin/",
    "/admin/api/tenants",
    "/admin/api/nothing",
    "/metrics",
]


async def test_the_public_port_serves_clients_only(tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream):
    port = free_port()
    of = settings(tmp_path, model_dir, [upstream.url, "announced"], redis_url, admin_port=port)
    async with running(of) as public:
        admins = Gateway(f"http://127.0.0.1:{port}", public.session)
        acme = await admins.tenant("acme")
        assert (await public.client(acme.key).complete()).status == 200
        unknown = (await public.admin.get("/nothing")).body
        for path in ADMINS:
            got = await public.admin.get(path)
            assert (got.status, got.body.replace(unquote(path).encode(), b"/nothing")) == (404, unknown), path
        # A wrong method does not reveal a route either.
        got = await public.admin.call("PUT", "/admin/api/tenants")
        assert got.body.replace(b"PUT /admin/api/tenants", b"GET /nothing") == unknown
        headers = {"x-loraplex-internal-token": TOKEN}
        for gateway, status in ((public, 404), (admins, 204)):
            body = {"url": upstream.url}
            assert (await gateway.nobody.post("/internal/engines", body, headers=headers)).status == status
        for path in ("/admin/api/tenants", "/metrics"):
            assert (await admins.admin.get(path)).status == 200
        upstream.healthy = False
        for gateway, fault in ((public, "down"), (admins, f"{upstream.url} is down: GET /health answered 503")):

            async def names_the_fault(gateway: Gateway = gateway, fault: str = fault) -> bool:
                ready = await gateway.nobody.get("/readyz")
                assert ready.status == 200
                return ready.json["engine_problems"] == [fault]

            await until(names_the_fault)


async def test_no_key_is_looked_at_on_the_public_port(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream
):
    port = free_port()
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, admin_port=port)
    async with running(of) as public:
        for _ in range(30):
            assert (await public.client("a-guess").get("/admin/api/tenants")).status == 404
        admins = Gateway(f"http://127.0.0.1:{port}", public.session)
        assert (await admins.admin.get("/admin/api/tenants")).status == 200
        assert "loraplex_gateway_wrong_keys_total 0.0" in (await admins.admin.get("/metrics")).body.decode()


@pytest.mark.parametrize("port", [0, -1, 70000, 8080])
def test_ports_that_cannot_be(tmp_path: Path, model_dir: Path, port: int):
    with pytest.raises(SettingsError, match="LORAPLEX_ADMIN_PORT"):
        settings(tmp_path, model_dir, ["http://e"], "redis://r", port=8080, admin_port=port)
