"""The route by which gateways report service at other engines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.engine import SLOW, Client, RunningServer
from wire.service import MAX_TENANTS

TOKEN = "internal"
INTERNAL = {"headers": {"x-loraplex-internal-token": TOKEN}}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    running = RunningServer(model, internal_token=TOKEN)
    yield running
    running.close()


@pytest.mark.usefixtures("slow_steps")
async def test_only_tenants_with_requests_are_charged(client: Client):
    assert await client.ok("/service", {"tenants": {"acme": 10.5}}, **INTERNAL) == {"num_charged": 0}
    headers = INTERNAL["headers"] | {"x-loraplex-tenant": "acme", "x-loraplex-weight": "2"}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True} | SLOW
    async with client.session.post(client.url + "/v1/completions", data=json.dumps(body), headers=headers) as response:
        assert response.status == 200
        charged = await client.ok("/service", {"tenants": {"acme": 1e6, "globex": 1}}, **INTERNAL)
        assert charged == {"num_charged": 1}
        [account] = (await client.state(**INTERNAL))["tenants"]
        assert account["tenant"] == "acme"
        assert account["counter"] > 5e5
        # A report that is sent again counts once.
        for number, num_charged in ((1, 1), (1, 0), (2, 1), (1, 0)):
            report = {"tenants": {"acme": 1}, "reporter": "gateway-1", "number": number}
            assert await client.ok("/service", report, **INTERNAL) == {"num_charged": num_charged}
        other = {"tenants": {"acme": 1}, "reporter": "gateway-2", "number": 1}
        assert await client.ok("/service", other, **INTERNAL) == {"num_charged": 1}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tenants": {"acme": -1}},
        {"tenants": {"acme": 1e300}},
        {"tenants": {"acme": "many"}},
        {"tenants": {str(i): 1 for i in range(MAX_TENANTS + 1)}},
    ],
)
async def test_a_wrong_report_is_refused(client: Client, body: Any):
    status, answer = await client.post("/service", body, **INTERNAL)
    assert status == 400
    assert answer["error"]["param"].startswith("tenants")
    assert "tenants" in answer["error"]["message"]


async def test_only_a_gateway_reports(client: Client):
    assert (await client.post("/service", {"tenants": {}}))[0] in (401, 403)
