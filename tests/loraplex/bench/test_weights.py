"""Comparison of a scenario's weights with those of a gateway's tenants, against a double of its API."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from loraplex.bench.arrivals import Closed
from loraplex.bench.load import Load, Source, Target, Tenant
from loraplex.bench.run import Server
from loraplex.bench.sampling import Even, Fixed
from loraplex.bench.weights import compare_weights
from loraplex.cli import main
from testing.openai_double import Double
from testing.serving import serving

pytestmark = pytest.mark.usefixtures("starts_servers")

ADMIN = "the operator's"
NAMES = {"one": "acme", "two": "glob/ex"}


class GatewayDouble(Double):
    """A gateway with the keys `key-one` and `key-two` of two tenants."""

    def __init__(self, weights: dict[str, object]) -> None:
        super().__init__()
        self.weights = weights
        self.seen: list[tuple[str, str | None]] = []

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/v1/key", self.key)
        app.router.add_get("/admin/api/tenants/{tenant}", self.tenant)
        return app

    async def key(self, request: web.Request) -> web.Response:
        given = self._key(request)
        names = {f"key-{name}": tenant for name, tenant in NAMES.items()}
        if given not in names:
            raise web.HTTPUnauthorized
        return web.json_response({"object": "key", "tenant": names[given]})

    async def tenant(self, request: web.Request) -> web.Response:
        if self._key(request) != ADMIN:
            raise web.HTTPForbidden
        return web.json_response({"weight": self.weights[request.match_info["tenant"]]})

    def _key(self, request: web.Request) -> str:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        self.seen.append((request.path, key))
        return key


def load(one: float = 1.0, two: float = 1.0, *, wrong: bool = False) -> Load:
    tenants = Tenant("one", one), Tenant("two", two)
    targets = [Target(tenant.name, "key-x" if wrong else f"key-{tenant.name}", "a0") for tenant in tenants]
    sources = [Source(target.tenant, (target,), Closed(1), Even(), Fixed(2), Fixed(2)) for target in targets]
    return Load(tenants, tuple(sources), seconds=1.0)


async def compared(given: Load, weights: dict[str, object], admin_key: str | None = ADMIN, token: str | None = None):
    double = GatewayDouble(weights)
    async with serving(double.app()) as url, aiohttp.ClientSession() as session:
        found = await compare_weights(Server(url, session, token), given, admin_key)
    return *found, double


async def test_weights_in_the_same_proportion_give_no_warning():
    for given in (load(1.0, 2.0), load(0.1, 0.2)):
        known, warning, double = await compared(given, {"acme": 3, "glob/ex": 6})
        assert (known, warning) == ({"one": 3, "two": 6}, None)
    assert {key for path, key in double.seen if path.startswith("/admin")} == {ADMIN}
    assert {key for path, key in double.seen if path == "/v1/key"} == {"key-one", "key-two"}


@pytest.mark.parametrize(("one", "two"), [(1, 4), (1, 1)])
async def test_other_weights_at_the_gateway_are_a_warning(one, two):
    _, warning, _ = await compared(load(one, two), {"acme": 1, "glob/ex": 2})
    assert warning == (
        "shares (of_entitled) are computed with the load's weights, which are not in proportion to those of the "
        f"server's tenants: one {one} (server: 1), two {two} (server: 2)"
    )


@pytest.mark.parametrize(
    ("weight", "admin_key", "wrong", "why"),
    [
        (1, None, False, "no admin key for the server was found"),
        (1, "another", False, "/admin/api/tenants/acme refuses the key: status 403"),
        (1, ADMIN, True, "/v1/key refuses the key: status 401"),
        ("heavy", ADMIN, False, "not the answer of an OpenAI server"),
    ],
)
async def test_unknown_weights_are_a_warning_if_the_scenarios_differ(weight, admin_key, wrong, why):
    weights = {"acme": weight, "glob/ex": weight}
    known, warning, _ = await compared(load(1.0, 2.0, wrong=wrong), weights, admin_key)
    assert known is None
    assert warning.startswith("shares (of_entitled) are computed with the load's weights; those of the server's")
    assert warning.endswith(why)
    assert "key-" not in warning
    assert ADMIN not in warning
    assert (await compared(load(wrong=wrong), weights, admin_key))[:2] == (None, None)


async def test_an_engine_behind_a_gateway_has_the_loads_weights():
    known, warning, double = await compared(load(1.0, 2.0), {}, token="inner")
    assert (known, warning, double.seen) == ({"one": 1, "two": 2}, None, [])


SCENARIO = """\
name = "x"
warmup = 0
[[tenants]]
name = "one"
requests = 2
arrival = {kind = "closed", concurrency = 1}
input = {kind = "fixed", tokens = 2}
output = {kind = "fixed", tokens = 2}
[[tenants]]
name = "two"
weight = 3
requests = 2
arrival = {kind = "closed", concurrency = 1}
input = {kind = "fixed", tokens = 2}
output = {kind = "fixed", tokens = 2}
"""


@pytest.mark.parametrize("is_own", [True, False])
async def test_the_operators_key_is_sent_to_its_own_gateway_only(is_own, tmp_path: Path):
    """The key is in local.json beside the tenants' file."""
    double = GatewayDouble({"acme": 1, "glob/ex": 2})
    (tmp_path / "s.toml").write_text(SCENARIO)
    async with serving(double.app()) as url:
        tenants = [{"name": name, "api_key": f"key-{name}", "models": []} for name in NAMES]
        (tmp_path / "demo.json").write_text(json.dumps({"gateway": url, "tenants": tenants}))
        local = {"gateway": url if is_own else "http://127.0.0.1:9", "admin_key": ADMIN}
        (tmp_path / "local.json").write_text(json.dumps(local))
        flags = ("--scenario", "s.toml", "--tenants", "demo.json", "--json", "r.json", "--no-overhead")
        words = [str(tmp_path / word) if "." in word else word for word in flags]
        done = await asyncio.to_thread(CliRunner().invoke, main, ["bench", *words])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["server_weights"] == ({"one": 1, "two": 2} if is_own else None)
    [warning] = [text for text in report["warnings"] if text.startswith("shares")]
    assert ("(server: 2)" in warning) == is_own
    assert f"warning: {warning}" in done.output
    assert report["rate_scale"] == 1
    assert (ADMIN in {key for _, key in double.seen}) == is_own
    assert ADMIN not in json.dumps(report) + done.output
