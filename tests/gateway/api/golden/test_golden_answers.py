"""Golden answers of versions: routes, bounds, payers, and background checks after an engine's upgrade."""

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import NonCallableMock

import pytest
from click.testing import CliRunner

from gateway.api.golden import upgrades
from gateway.api.golden.checking import DIED, NOT_ASKED, GoldenChecks, num_equal
from gateway.errors import BadRequest, NoEngine
from gateway.fleet.engines.engine import Address, Condition, EngineRecord, Health
from gateway.records.adapters import golden
from gateway.records.adapters.golden import Difference
from gateway.redis.client import connect
from gateway.redis.keys import GOLDEN_KEY, golden_rest_key
from gateway.redis.sweeps import is_first
from loraplex.cli import main
from testing.adapter_files import upload_form
from testing.gateway.principals import principal
from testing.gateway.running import ADMIN_KEY, Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from wire.text.tokenizer import TextTooLong

PATH = "/v1/adapters/pirate/versions/1/golden"
ADMIN_PATH = "/admin/api/tenants/acme/adapters/pirate/versions/1/golden"
SECRET = "the launch code\nis 4711"
PROMPTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": SECRET}]},
    {"prompt": "Hi", "max_tokens": 64},
]


async def with_adapter(gateway: Gateway, folder: Path) -> Client:
    acme = await gateway.tenant("acme")
    assert (await acme.call("POST", "/v1/adapters", data=upload_form(folder / "small"))).status == 201
    return acme


async def requests(client: Client) -> int:
    return sum(row["requests"] for row in await client.usage())


def has_requests(client: Client, count: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await requests(client) == count

    return condition


async def check_others_are_refused(gateway: Gateway, globex: Client) -> None:
    """Absent and foreign versions have the same answer; a key for adapters may read, and send no requests."""
    for method, path in (("GET", PATH), ("PUT", PATH), ("DELETE", PATH), ("POST", PATH + "/check")):
        body = {"json": {"prompts": PROMPTS}} if method == "PUT" else {}
        foreign = await globex.call(method, path, **body)
        absent = await globex.call(method, path.replace("pirate", "absent"), **body)
        assert (foreign.status, absent.status) == (404, 404)
        assert foreign.body.replace(b"pirate", b"absent") == absent.body
    key = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["adapters"]})
    uploader = gateway.client(key.json["key"])
    assert (await uploader.get(PATH)).status == 200
    assert (await uploader.call("PUT", PATH, json={"prompts": PROMPTS})).status == 403
    assert (await uploader.post(PATH + "/check")).status == 403


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

        count = len(upstream.requests)
        await check_others_are_refused(gateway, globex)
        assert len(upstream.requests) == count

        monkeypatch.setattr(golden, "MAX_SETS", 0)
        full = await acme.call("PUT", PATH, json={"prompts": PROMPTS})
        assert (full.status, full.error["code"]) == (403, "adapter_limit_exceeded")
        assert len(upstream.requests) == count
        monkeypatch.undo()
        await run(gateway, upstream, tmp_path)
        assert (await acme.call("DELETE", PATH)).json["deleted"] is True
        assert (await acme.get(PATH)).status == (await acme.call("DELETE", PATH)).status == 404


async def run(gateway: Gateway, upstream: Upstream, folder: Path) -> None:
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
    shown = await command("adapter", "golden", "show", "pirate@1")
    assert "100%" in shown
    assert " ".join(SECRET.split()) in shown, "the prompt's text is shown beside its answer"
    [verified] = json.loads(await command("adapter", "verify", "pirate@1", "--json"))
    assert [check["agreement"] for check in verified["golden"]] == [1.0]
    await command("adapter", "golden", "rm", "pirate@1")
    await command("adapter", "golden", "show", "pirate@1", code=1)
    [verified] = json.loads(await command("adapter", "verify", "pirate@1", "--json"))
    assert verified["golden"] == []
    await command("adapter", "golden", "set", "pirate@1", str(prompts))
    # A tenant's text must not reach an operator's terminal as a command, or as a row of its own.
    upstream.alphabet = "\x1b\n"
    prompts.write_text(json.dumps([{"prompt": "\x1b[2J"}]))
    await command("adapter", "golden", "set", "pirate@1", str(prompts))
    shown = await command("adapter", "golden", "show", "pirate@1")
    assert "\\x1b[2J" in shown
    assert "\\x1b\\n" in shown
    assert all(line.isprintable() for line in shown.splitlines())


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
        check = (await acme.get(PATH)).json["checks"][0]
        assert [(each["error"], each["text"]) for each in check["differences"]] == [(DIED, None), (NOT_ASKED, None)]
        assert check["agreement"] == 0.0, "a prompt that was not asked does not agree"
        assert len(upstream.requests) == 7
    assert "launch code" not in caplog.text


async def test_gateways_take_turns_and_a_tenant_rests_after_its_check(
    upstream: Upstream, tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(upgrades, "SEARCH_SECONDS", 0.02)
    # Longer than the test.
    monkeypatch.setattr(upgrades, "TENANT_REST", 1e6)
    upstream.version = "1.0"
    of = [settings(tmp_path, model_dir, [upstream.url], redis_url, journal_dir=tmp_path / f"{i}") for i in range(2)]
    redis = connect(redis_url, timeout=10.0)

    async def resting() -> set[bytes]:
        return {key async for key in redis.scan_iter(match=golden_rest_key("*"))}

    of_other_tests = await resting()
    async with running(of[0]) as gateway, running(of[1]):
        clients = {name: await gateway.tenant(name) for name in ("acme", "globex")}
        for client in clients.values():
            assert (await client.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"))).status == 201
            assert (await client.call("PUT", PATH, json={"prompts": PROMPTS})).status == 200

        def checked(number: int, under: str) -> Callable[[], Awaitable[bool]]:
            async def condition() -> bool:
                found = [(await client.get(PATH)).json["checks"][0] for client in clients.values()]
                return sum(check["engine"]["version"] == under for check in found) == number

            return condition

        async def has_begun() -> bool:
            return len(upstream.requests) > 4

        upstream.holds, upstream.version = True, "1.1"
        await until(has_begun)
        # Both gateways search some ten times.
        await asyncio.sleep(0.3)
        assert len(upstream.requests) == 5, "one gateway asks one prompt at a time"
        assert await redis.pttl(GOLDEN_KEY) > 1000 * upgrades.CHECK_SECONDS, "a turn outlasts its check"
        upstream.holds = False
        await until(checked(2, "1.1"))
        assert len(upstream.requests) == 8, "no prompt is asked twice"

        rests = list(await resting() - of_other_tests)
        assert len(rests) == 2
        await redis.delete(rests[0])
        upstream.version = "1.2"
        await until(checked(1, "1.2"))
        await asyncio.sleep(0.3)
        assert await checked(1, "1.2")()
        await redis.delete(rests[1])
        await until(checked(2, "1.2"))

        # A gateway takes the turn and dies in the middle. No gateway checks until its turn's lifetime is over.
        await until(lambda: is_first(redis, GOLDEN_KEY, 60.0))
        await redis.delete(*rests)
        upstream.version = "1.3"
        await asyncio.sleep(0.3)
        assert await checked(0, "1.3")()
        assert await redis.pexpire(GOLDEN_KEY, 1)
        await until(checked(2, "1.3"))
    await redis.delete(*rests)
    await redis.aclose()


async def test_answers_that_cannot_be_compared_are_not_recorded(
    upstream: Upstream, tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    # No background check during the test.
    monkeypatch.setattr(upgrades, "SEARCH_SECONDS", 1e3)
    upstream.version = "1.0"
    async with Upstream().serving() as other:
        other.version = "1.0"
        async with running(settings(tmp_path, model_dir, [upstream.url, other.url], redis_url)) as gateway:
            acme = await with_adapter(gateway, tmp_path)
            limits = {"max_concurrent_tokens": 40, "on_token_limit": "shorten"}
            assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=limits)).status == 200
            refused = await acme.call("PUT", PATH, json={"prompts": PROMPTS[1:]})
            assert refused.status == 400, "an answer that the limit would shorten is not asked"
            small = [{**PROMPTS[1], "max_tokens": 4}]
            assert (await acme.call("PUT", PATH, json={"prompts": small})).status == 200
            assert len((await acme.post(PATH + "/check")).json["checks"]) == 1, "one engine of each software"
            assert len((await gateway.admin.post(ADMIN_PATH + "/check")).json["checks"]) == 2, "every engine"
            checks, count = (await acme.get(PATH)).json["checks"], len(upstream.requests)

            async def has_begun() -> bool:
                return len(upstream.requests) > count

            async def has_new_release() -> bool:
                engines = (await gateway.admin.get("/admin/api/engines")).json["data"]
                return any(engine["state"]["version"] == "1.1" for engine in engines)

            only = {"engine": upstream.url}
            upstream.holds = True
            late = asyncio.create_task(gateway.admin.post(ADMIN_PATH + "/check", params=only))
            await until(has_begun)
            upstream.version = "1.1"
            await until(has_new_release)
            upstream.holds = False
            assert (await late).status == 503, "the answers are not of one release"
            upstream.receipt = "sha256:" + "0" * 64
            mismatched = await gateway.admin.post(ADMIN_PATH + "/check", params=only)
            assert (mismatched.status, mismatched.error["code"]) == (500, "adapter_mismatch")
            assert (await acme.get(PATH)).json["checks"] == checks


@pytest.mark.parametrize("failure", [TextTooLong(64), BadRequest("no"), NoEngine("none counts")])
async def test_a_difference_whose_tokens_no_engine_counts_is_recorded_without_its_position(failure: Exception):
    """The version's check failed each time, and was repeated for ever."""

    async def encode(*_: Any) -> list[int]:
        raise failure

    parts = {name: NonCallableMock() for name in inspect.signature(GoldenChecks).parameters}
    checks = GoldenChecks(**parts | {"tokenizers": SimpleNamespace(encode=encode)})
    difference = await checks._compare(principal().tenant, "base", 1, "golden", "new")
    assert difference == Difference(prompt=1, text="new")


def test_a_background_check_needs_an_engine_that_uses_less_than_half_of_its_places():
    found = []
    for load in range(4):
        engine = EngineRecord(Address("http://one"), Condition(Health.UP), other_processes_load=load, slots=4)
        found.append(upgrades.has_room(engine))
    assert found == [True, True, False, False]


def test_the_first_different_token():
    assert [num_equal([1, 2], other) for other in ([1, 2], [1, 3], [1], [], [1, 2, 3])] == [2, 1, 1, 0, 2]
