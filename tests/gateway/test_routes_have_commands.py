"""Each GET route of the admin API is used by a command, or is on a short list with the reason why not."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gateway.api.routes import ROUTES
from testing.adapter_files import tensors, write
from testing.gateway.commands import runner
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")
API = "/admin/api"
TENANT = f"{API}/tenants/{{tenant}}"
ADAPTER = f"{TENANT}/adapters/{{name}}"
OF_ACME = ("--tenant", "acme")

# A command that sends the request, by the route. URL stands for the engine's URL, ID for the id of a request.
COMMANDS: dict[str, tuple[str, ...]] = {
    f"{API}/activity": ("activity", "--by", "model"),
    f"{API}/adapters": ("adapter", "list"),
    f"{API}/attention": ("attention",),
    f"{API}/audit": ("audit",),
    f"{API}/bases": ("base", "list"),
    f"{API}/engines": ("engine", "list"),
    f"{API}/engines/history": ("engine", "history", "URL"),
    f"{API}/events": ("events",),
    f"{API}/fairness": ("fairness",),
    f"{API}/keys": ("key", "list", "--admin"),
    f"{API}/plans": ("plan", "list"),
    f"{API}/plans/{{plan}}": ("plan", "show", "gold"),
    f"{API}/prices": ("price", "list"),
    f"{API}/queue": ("status",),
    f"{API}/refusals": ("refusals", "--status", "all"),
    f"{API}/requests": ("requests",),
    f"{API}/requests/{{id}}": ("requests", "show", "ID"),
    f"{API}/residency": ("residency",),
    f"{API}/search": ("search", "acm"),
    f"{API}/sessions": ("session", "list"),
    f"{API}/settings": ("settings",),
    f"{API}/tenants": ("tenant", "list"),
    TENANT: ("tenant", "show", "acme"),
    f"{TENANT}/adapters": ("adapter", "list", *OF_ACME),
    f"{TENANT}/keys": ("key", "list", "acme"),
    f"{TENANT}/limits": ("tenant", "show", "acme"),
    f"{TENANT}/mixtures": ("adapter", "mixtures", *OF_ACME),
    f"{TENANT}/mixtures/{{name}}": ("adapter", "mix", "blend", "pirate*0.4+other*0.6", *OF_ACME),
    f"{TENANT}/models": ("tenant", "models", "acme"),
    f"{ADAPTER}/aliases": ("adapter", "aliases", "pirate", *OF_ACME),
    f"{ADAPTER}/aliases/{{alias}}": ("adapter", "alias", "pirate:prod", "1", *OF_ACME),
    f"{ADAPTER}/use": ("adapter", "use", "pirate", *OF_ACME),
    f"{ADAPTER}/versions": ("adapter", "versions", "pirate", *OF_ACME),
    f"{ADAPTER}/versions/{{version}}/golden": ("adapter", "verify", "pirate@1", *OF_ACME),
    f"{ADAPTER}/versions/{{version}}/probe": ("adapter", "verify", "pirate@1", *OF_ACME),
    f"{API}/usage": ("usage",),
    f"{API}/usage/export": ("usage", "--export", "csv", "--out", "FILE"),
    f"{API}/usage/rows": ("usage", "export", "FILE", "--csv"),
    f"{API}/version": ("status",),
    f"{API}/webhooks": ("webhook", "list"),
    f"{API}/webhooks/{{name}}": ("webhook", "show", "pager"),
}
REASONS = {
    f"{TENANT}/adapter-uploads/{{id}}": "a push reads it only if the answer to one of its parts was lost",
    f"{ADAPTER}/versions/{{version}}": "`adapter versions` lists the same fields of every version",
}


async def test_every_route_has_a_command_or_a_reason():
    routes = {route.canonical for route in ROUTES if route.method == "GET" and route.path.startswith(f"{API}/")}
    assert len(routes) > 35
    assert sorted([*COMMANDS, *REASONS]) == sorted(routes)
    assert len(REASONS) <= 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filled(
    shared_gateway: Gateway, shared_upstream: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Gateway, dict[str, str]]]:
    """Return a gateway whose every record exists once, and the values of the words in capitals."""
    folder = tmp_path_factory.mktemp("adapters")
    run = runner(shared_gateway)
    shared_upstream.probe_status, shared_upstream.base_digest = 200, "b" * 64
    acme = await shared_gateway.tenant("acme")
    for seed, name in enumerate(("pirate", "other"), start=1):
        await run("adapter", "push", name, str(write(folder / name, tensors(seed=seed))), *OF_ACME)
    await run("adapter", "alias", "pirate:prod", "1", *OF_ACME)
    await run("adapter", "mix", "blend", "pirate*0.5+other*0.5", *OF_ACME)
    await run("plan", "set", "gold", "--requests-per-minute", "60")
    await run("webhook", "set", "pager", "https://alerts.example.com/loraplex")
    answer = await acme.chat()
    words = {"URL": shared_upstream.url, "ID": answer.headers["x-request-id"], "FILE": str(folder / "usage.csv")}

    async def written() -> bool:
        return (await shared_gateway.admin.get(f"{API}/requests/{words['ID']}")).status == 200

    deadline = asyncio.get_running_loop().time() + 30
    while not await written():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    yield shared_gateway, words


@pytest.mark.parametrize("route", COMMANDS)
async def test_the_command_sends_the_request(
    route: str, filled: tuple[Gateway, dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    gateway, words = filled
    sent: list[tuple[str, str]] = []
    send = aiohttp.ClientSession._request

    async def noted(session: aiohttp.ClientSession, method: str, url: Any, **options: Any) -> aiohttp.ClientResponse:
        sent.append((method, str(url).removeprefix(gateway.url)))
        return await send(session, method, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", noted)
    await runner(gateway)(*(words.get(word, word) for word in COMMANDS[route]))
    path = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(route))
    assert [each for each in sent if each[0] == "GET" and re.fullmatch(path, each[1])], sent
