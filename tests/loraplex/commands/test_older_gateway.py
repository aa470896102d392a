"""Commands of this release against a gateway that lacks a route."""

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from testing.gateway.commands import Run, runner
from testing.gateway.running import Gateway
from testing.serving import serving


@pytest.fixture
async def older(gateway: Gateway) -> AsyncIterator[str]:
    """Yield the URL of a proxy of the gateway without the route of acme's limits, and without the tenant `deleted`."""

    async def forward(request: web.Request) -> web.Response:
        path = request.path.replace("acme/limits", "acme/no-such-route").replace("globex/limits", "deleted/limits")
        key = {"Authorization": request.headers["Authorization"]}
        async with aiohttp.ClientSession() as session, session.get(gateway.url + path, headers=key) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    app = web.Application()
    app.router.add_get("/{path:.*}", forward)
    async with serving(app) as url:
        yield url


@pytest.fixture
def run(gateway: Gateway) -> Run:
    return runner(gateway)


async def test_a_tenant_without_what_is_left_of_its_limits(run: Run, gateway: Gateway, older: str):
    await gateway.tenant("acme", requests_per_minute=60)
    warning = "warning: this gateway is too old to report what is left of the limits\n"
    whole = await run("tenant", "show", "acme")
    shown = await run("tenant", "show", "acme", "--gateway", older)
    assert shown.stdout == whole.stdout.partition("\n\n")[0] + "\n"
    assert (shown.stderr, whole.stderr) == (warning, "")
    as_json = await run("tenant", "show", "acme", "--json", "--gateway", older)
    expected = json.loads((await run("tenant", "show", "acme", "--json")).stdout) | {"left": None}
    assert (json.loads(as_json.stdout), as_json.stderr) == (expected, warning)


async def test_a_tenant_that_is_deleted_before_its_limits_are_read(run: Run, gateway: Gateway, older: str):
    await gateway.tenant("globex")
    gone = await run("tenant", "show", "globex", "--gateway", older, code=1)
    assert (gone.stdout, gone.stderr) == ("", "Error: There is no tenant 'deleted'.\n")
