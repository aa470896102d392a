"""Golden answers of versions: routes, bounds, payers, and background checks after an engine's upgrade."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from gateway.api.golden import upgrades
from gateway.api.golden.checking import DIED, num_equal
from gateway.records import golden
from loraplex.cli import main
from testing.adapter_files import write
from testing.gateway.running import ADMIN_KEY, Client, Gateway, until
from testing.gateway.upstream import Upstream

PATH = "/v1/adapters/pirate/versions/1/golden"
ADMIN_PATH = "/admin/api/tenants/acme/adapters/pirate/versions/1/golden"
SECRET = "the launch code\nis 4711"
PROMPTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": SECRET}]},
    {"prompt": "Hi", "max_tokens": 64},
]


def form(folder: Path) -> aiohttp.FormData:
    place = write(folder / "small")
    data = aiohttp.FormData({"name": "pirate"})
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        data.add_field(file, (place / file).read_bytes(), filename=file)
    return data


async def with_adapter(gateway: Gateway, folder: Path) -> Client:
    acme = await gateway.tenant("acme")
    assert (await acme.call("POST", "/v1/adapters", data=form(folder))).status == 201
    return acme


async def requests(client: Client) -> int:
    return sum(row["requests"] for row in await client.usage())


def has_requests(client: Client, count: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await requests(client) == count

    return condition


async def test_golden_answers_of_a_tenant(
    serve: Any, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    upstream.version, upstream.base_digest = "1.0", "b" * 64
    async with serve() as gateway:
        acme, globex = await with_adapter(gateway, tmp_path), await gateway.tenant("globex")
        assert (await acme.get(PATH)).status == 404
        made = await acme.call("PUT", PATH, json={"prompts": PROMPTS})
        assert made.status == 200
        engine = {"kind": "loraplex", "version": "1.0", "base": "sha256:" + "b" * 64}
        assert [(each["answer"], each["engine"]) for each in made.json["prompts"]] == [("aa", engine)] * 2
        assert [each["max_tokens"] for each in made.json["prompts"]] == [32, 64]
        [check] = made.json["checks"]
        assert (check["engine"], check["agreement"], check["differences"]) == (engine, 1.0, [])
        assert (await acme.get(PATH)).json == made.json
        sent = [body for _, body in upstream.requests]
        assert [(body["temperature"], body["max_tokens"]) for body in sent] == [(0, 32), (0, 64)]
        await until(has_requests(acme, 2))

        upstream.alphabet = "ab"
        checked = await acme.post(PATH + "/check")
        [check] = checked.json["checks"]
        assert check["agreement"] == 0.0
        different = {"prompt": 0, "position": 1, "agreement": 0.5, "text": "ab", "golden": "aa", "error": None}
        assert check["differences"] == [different, {**different, "prompt": 1}]
        assert (await acme.get(PATH)).json["checks"] == checked.json["checks"]
        await until(has_requests(acme, 4))
        assert (await acme.complete(model="pirate")).status == 200, "a mismatch does not block serving"
        await until(has_requests(acme, 5))

        # An operator's requests are free.
        upstream.alphabet = "a"
        assert (await gateway.admin.get(ADMIN_PATH)).json["prompts"] == made.json["prompts"]
        checked = await gateway.admin.post(ADMIN_PATH + "/check", params={"engine": upstream.url})
        assert [(each["url"], each["agreement"]) for each in checked.json["checks"]] == [(upstream.url, 1.0)]
        refused = await gateway.admin.post(ADMIN_PATH + "/check", params={"engine": "http://127.0.0.1:1"})
        assert (refused.status, refused.error["param"]) == (400, "engine")
        assert (await gateway.admin.call("PUT", ADMIN_PATH, json={"prompts": PROMPTS})).status == 200
        assert await requests(acme) == 5

        # The same answer for absent and foreign versions, and no request.
        count = len(upstream.requests)
        for method, path in (("GET", PATH), ("PUT", PATH), ("DELETE", PATH), ("POST", PATH + "/check")):
            body = {"json": {"prompts": PROMPTS}} if method == "PUT" else {}
            foreign = await globex.call(method, path, **body)
            absent = await globex.call(method, path.replace("pirate", "none"), **body)
            assert (foreign.status, foreign.error) == (404, absent.error)
        key = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["adapters"]})
        uploader = gateway.client(key.json["key"])
        assert (await uploader.get(PATH)).status == 200
        assert (await uploader.call("PUT", PATH, json={"prompts": PROMPTS})).status == 403
        assert (await uploader.post(PATH + "/check")).status == 403
        assert len(upstream.requests) == count

        monkeypatch.setattr(golden, "MOST_SETS", 0)
        full = await acme.call("PUT", PATH, json={"prompts": PROMPTS})
        assert (full.status, full.error["code"]) == (403, "adapter_limit_exceeded")
        assert len(upstream.requests) == count
        monkeypatch.undo()
        await run(gateway, tmp_path)
        assert (await acme.call("DELETE", PATH)).json["deleted"] is True
        assert (await acme.get(PATH)).status == (await acme.call("DELETE", PATH)).status == 404


async def run(gateway: Gateway, folder: Path) -> None:
    """Try the commands."""
    env = {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}
    prompts = folder / "prompts.json"

    async def command(*arguments: str, code: int = 0) -> Any:
        line = [*arguments, "--tenant", "acme"]
        result = await asyncio.to_thread(CliRunner().invoke, main, line, env=env)
        assert result.exit_code == code, result.output
        return result.stdout

    prompts.write_text("[")
    await command("adapter", "golden", "set", "pirate@1", str(prompts), code=2)
    prompts.write_text(json.dumps(PROMPTS))
    assert "2 golden answers" in await command("adapter", "golden", "set", "pirate@1", str(prompts))
    shown = json.loads(await command("adapter", "golden", "show", "pirate@1", "--json"))
    assert [each["answer"] for each in shown["prompts"]] == ["aa", "aa"]
    assert "1.0" in await command("adapter", "golden", "show", "pirate@1")
    [verified] = json.loads(await command("adapter", "verify", "pirate@1", "--json"))
    assert [check["agreement"] for check in verified["golden"]] == [1.0]
    await command("adapter", "golden", "rm", "pirate@1")
    await command("adapter", "golden", "show", "pirate@1", code=1)
    [verified] = json.loads(await command("adapter", "verify", "pirate@1", "--json"))
    assert verified["golden"] == []
    await command("adapter", "golden", "set", "pirate@1", str(prompts))


BOUNDS: list[tuple[Any, str, str]] = [
    ({"prompts": []}, "prompts", "at least 1"),
    ({"prompts": [{"prompt": "Hi"}] * 17}, "prompts", "at most 16"),
    ({"prompts": [{"prompt": "Hi", "max_tokens": 65}]}, "prompts[0].max_tokens", "between 1 and 64"),
    ({"prompts": [{"prompt": "Hi", "messages": PROMPTS[0]["messages"]}]}, "prompts[0]", "either"),
    ({"prompts": [{}]}, "prompts[0]", "either"),
    ({"prompts": [{"prompt": "x" * 2**16}]}, "prompts", "65536 bytes"),
    ({"prompts": [{"prompt": "Hi"}, {"prompt": "x" * 300}]}, "prompts[1].prompt", "context length"),
    ({"prompts": [{"messages": [{"role": 7}]}]}, "prompts[0].messages[0].role", ""),
    ({"prompts": [{"prompt": "Hi", "temperature": 1}]}, "prompts[0]", "temperature"),
]


async def test_bounds(serve: Any, upstream: Upstream, tmp_path: Path):
    async with serve() as gateway:
        acme = await with_adapter(gateway, tmp_path)
        for body, param, text in BOUNDS:
            refused = await acme.call("PUT", PATH, json=body)
            assert (refused.status, refused.error["param"]) == (400, param), refused.error
            assert text in refused.error["message"]
        assert (await acme.get(PATH)).status == 404
        assert upstream.requests == []


async def test_an_upgrade_is_checked_in_the_background(
    serve: Any,
    upstream: Upstream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG, logger="gateway")
    monkeypatch.setattr(upgrades, "SEARCH_SECONDS", 0.02)
    upstream.version, upstream.base_digest = "1.0", "b" * 64
    async with serve() as gateway:
        acme = await with_adapter(gateway, tmp_path)
        assert (await acme.call("PUT", PATH, json={"prompts": PROMPTS})).status == 200
        await until(has_requests(acme, 2))
        upstream.version, upstream.alphabet = "1.1", "ab"

        def checked_under(version: str) -> Callable[[], Awaitable[bool]]:
            async def condition() -> bool:
                checks = (await acme.get(PATH)).json["checks"]
                return checks[0]["engine"]["version"] == version

            return condition

        await until(checked_under("1.1"))
        check, before = (await acme.get(PATH)).json["checks"]
        assert (before["agreement"], check["agreement"]) == (1.0, 0.0)
        assert [(each["prompt"], each["position"]) for each in check["differences"]] == [(0, 1), (1, 1)]
        headers, body = upstream.requests[-1]
        assert (headers["x-loraplex-priority"], body["priority"]) == ("10", 100), "behind all tenants' requests"
        assert len(upstream.requests) == 4
        assert await requests(acme) == 2, "no quota and no price counts them"
        metrics = (await gateway.admin.get("/metrics")).body.decode()
        assert 'loraplex_gateway_golden_checks_total{result="different",tenant="acme"} 2.0' in metrics
        assert (await acme.complete(model="pirate")).status == 200

        # A prompt with which engines die is not asked again and again.
        upstream.refuses, upstream.version = None, "1.2"
        await until(checked_under("1.2"))
        [difference] = (await acme.get(PATH)).json["checks"][0]["differences"]
        assert (difference["error"], difference["text"]) == (DIED, None)
        assert len(upstream.requests) == 7
    assert "launch code" not in caplog.text


def test_the_first_different_token():
    assert [num_equal([1, 2], other) for other in ([1, 2], [1, 3], [1], [], [1, 2, 3])] == [2, 1, 1, 0, 2]
