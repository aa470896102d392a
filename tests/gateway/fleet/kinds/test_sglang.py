"""SGLang servers behind the gateway, by a double with SGLang's protocol. No test runs a real SGLang."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.kinds.kind import Misconfigured
from gateway.fleet.kinds.sglang import ServerInfo, check_server
from testing.gateway.foreign_double import PROMPT_TOKENS
from testing.gateway.running import BASE_MODEL, HI, Gateway, running_alone, settings, until
from testing.gateway.sglang_double import API_KEY, SglangDouble
from testing.gateway.upstream import TOKEN
from tests.gateway.fleet.kinds.test_vllm import adapters, billed
from tests.gateway.fleet.kinds.test_vllm_edge import Elsewhere

pytestmark = pytest.mark.usefixtures("quick_polls")


@asynccontextmanager
async def served(
    folder: Path, model_dir: Path, redis_url: str, migrated: Path, options: str = "", double: SglangDouble | None = None
) -> AsyncIterator[tuple[Gateway, SglangDouble]]:
    async with (double or SglangDouble()).serving() as sglang:
        shutil.copy(migrated, folder / "gateway.db")
        (folder / "sglang.key").write_text(API_KEY)
        engine = f"sglang+{sglang.url}{options or '?'}&key_file={folder / 'sglang.key'}"
        async with running_alone(settings(folder, model_dir, [engine], redis_url, migrate_on_start=False)) as gateway:
            yield gateway, sglang


async def test_the_base_model_and_an_adapter_are_named_as_sglang_knows_them(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    base = await acme.complete(max_tokens=3)
    assert (base.status, base.json["model"], base.json["choices"][0]["text"]) == (200, BASE_MODEL, "aaa")
    tuned = await acme.chat(model=name, max_tokens=2)
    assert (tuned.status, tuned.json["model"]) == (200, name)
    (headers, plain), (_, adapted) = sglang.requests
    [loaded] = sglang.loads
    assert loaded.startswith("sha256-")
    # A colon in `model` would name an adapter.
    assert plain["model"] == adapted["model"] == "default"
    assert ("lora_path" in plain, adapted["lora_path"]) == (False, loaded)
    assert headers["authorization"] == f"Bearer {API_KEY}"
    assert TOKEN not in str(sglang.requests)
    assert sglang.ignored == set()
    await until(lambda: billed(acme, (2, 2 * PROMPT_TOKENS, 5)))


async def test_a_stream_is_billed_by_sglangs_counts(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    acme = await gateway.tenant("acme")
    got = await acme.complete(max_tokens=3, stream=True)
    assert got.events[-1] == "[DONE]"
    assert "".join(choice["text"] for event in got.events[:-1] for choice in event["choices"]) == "aaa"
    assert sglang.requests[-1][1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (await acme.complete(max_tokens=1, stream=True, n=2)).status == 200
    assert sglang.requests[-1][1]["stream_options"]["continuous_usage_stats"] is False
    await until(lambda: billed(acme, (2, 2 * PROMPT_TOKENS, 4)))


async def test_an_adapter_that_a_restarted_server_lost_is_loaded_again(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    for stream in (False, True):
        assert (await acme.complete(model=name, max_tokens=1, stream=stream)).status == 200
        sglang.names.clear()
        sglang.known.clear()
        assert (await acme.complete(model=name, max_tokens=1, stream=stream)).status == 200


@pytest.mark.parametrize("both", ["?adapters=2"], indirect=True)
async def test_the_least_recently_used_adapter_is_unloaded(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    sglang.names["the-operators-own"] = "/models/own"
    acme = await gateway.tenant("acme")
    first, second, third = await adapters(acme, 3)
    for name in (first, second, first, third):
        assert (await acme.complete(model=name, max_tokens=1)).status == 200
    assert sglang.unloads == [sglang.loads[1]]
    assert "the-operators-own" in sglang.names
    assert (await acme.complete(model=second, max_tokens=1)).status == 200


async def test_messages_of_the_server_reach_no_client(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
    [name] = await adapters(other, 1)
    assert (await other.complete(model=name, max_tokens=1)).status == 200
    secret = f"All loaded adapters: {list(sglang.known)}"
    for status, kind, code in ((400, "BadRequest", None), (500, "InternalServerError", "engine_error")):
        sglang.fail_request = status, kind, secret
        got = await acme.complete(max_tokens=1)
        assert (got.status, got.error["code"]) == (502 if status == 500 else 400, code)
        assert "sha256" not in str(got.body)
    for kind, code in (("BAD_REQUEST", None), ("INTERNAL_SERVER_ERROR", "engine_error")):
        sglang.fail_request = 400, kind, secret
        got = await acme.complete(max_tokens=1, stream=True)
        assert (got.status, got.events[-1]["error"]["code"]) == (200, code)
        assert "sha256" not in str(got.body)
    # Its own refusal quotes the whole request.
    sglang.fail_request = None
    sglang.fail_loads = "LoRA adapter with rank 64 is incompatible, see /models"
    [name] = await adapters(acme, 1)
    got = await acme.complete(model=name, max_tokens=1)
    assert got.status in (200, 502)
    assert "/models" not in str(got.body)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.12.post1", "0.5.23", "0.6.0rc1", "1.0", "0.5.11+g0123abc"])
def test_releases_that_use_cache_salts_are_accepted(version: str):
    check_server(info(version=version), 64)


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.11rc0", "0.5.11.dev3+g0123abc", "0.4.9", "0.0.0", "dev", ""])
def test_releases_that_may_ignore_cache_salts_are_refused(version: str):
    with pytest.raises(Misconfigured, match="23300"):
        check_server(info(version=version), 64)
    check_server(info(version=version), 64, any_version=True)


def info(**settings: Any) -> ServerInfo:
    return ServerInfo(**{"version": "0.5.23", "enable_lora": True, **settings})


SHARING: dict[str, tuple[Any, str]] = {
    "enable_lora": (False, "--enable-lora"),
    "dp_size": (2, "--dp-size 1"),
    "tokenizer_worker_num": (4, "--tokenizer-worker-num 1"),
    "disaggregation_mode": ("prefill", "--disaggregation-mode"),
    "speculative_algorithm": ("NGRAM", "--speculative-algorithm NGRAM"),
    "enable_lmcache": (True, "--enable-lmcache"),
    "enable_flexkv": (True, "--enable-flexkv"),
    "hicache_storage_backend": ("mooncake", "--hicache-storage-backend"),
    "radix_cache_backend": ("flexkv", "--radix-cache-backend"),
    "enable_unified_cache_external_linker": (True, "--enable-unified-cache-external-linker"),
    "max_loaded_loras": (64, "--max-loaded-loras"),
    "admin_api_key": ("another", "--admin-api-key"),
    "frontend": ("rust", "front end"),
}


@pytest.mark.parametrize("name", SHARING)
def test_settings_that_can_mix_up_tenants_are_refused_for_every_version(name: str):
    value, remedy = SHARING[name]
    with pytest.raises(Misconfigured, match=remedy):
        check_server(info(**{name: value}), 64, any_version=True)


def test_settings_that_keep_tenants_apart_are_not_refused():
    check_server(info(speculative_algorithm="EAGLE3", max_loaded_loras=65, admin_api_key="a", api_key="a"), 64)


async def test_a_server_is_refused_with_the_reason_until_its_settings_are_corrected(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    acme = await gateway.tenant("acme")
    assert (await acme.complete(max_tokens=1)).status == 200
    sglang.info["enable_lmcache"] = True

    async def is_refused() -> bool:
        return any("misconfigured" in fault and "--enable-lmcache" in fault for fault in await gateway.engine_faults())

    await until(is_refused)
    assert (await acme.complete(max_tokens=1)).error["code"] == "no_engine"
    page = (await gateway.admin.get("/metrics")).body.decode()
    assert f'loraplex_gateway_engine_refused{{engine="{sglang.url}"}} 1.0' in page
    sglang.info["enable_lmcache"] = False

    async def is_served() -> bool:
        return (await acme.complete(max_tokens=1)).status == 200

    await until(is_served)


TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("setting", "values", "field"),
    [
        ("tool_call_parser", ("llama3", None), {"tools": [TOOL]}),
        ("enable_deterministic_inference", (True, False), {"seed": 7}),
    ],
)
async def test_what_a_server_serves_follows_its_settings(
    tmp_path: Path,
    model_dir: Path,
    redis_url: str,
    migrated: Path,
    setting: str,
    values: tuple[Any, Any],
    field: dict[str, Any],
):
    template = "{% for each in messages %}{{ each.content }}{% endfor %}{{ tools }}"
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(template)
    async with served(tmp_path, tmp_path / "model", redis_url, migrated) as (gateway, sglang):
        acme = await gateway.tenant("acme")
        for value, expected in zip(values, ((200, None), (400, "unsupported_parameter")), strict=True):
            sglang.info[setting] = value

            async def is_followed(expected: tuple[int, str | None] = expected) -> bool:
                got = await acme.chat(max_tokens=1, **field)
                return (got.status, got.error["code"] if got.status != 200 else None) == expected

            await until(is_followed)


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_whose_settings_cannot_be_read_gets_no_request(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, status: int
):
    double = SglangDouble()
    double.info_status = status
    async with served(tmp_path, model_dir, redis_url, migrated, double=double) as (gateway, sglang):
        acme = await gateway.tenant("acme")
        assert (await acme.complete(max_tokens=1)).error["code"] == "no_engine"
        assert [f"/server_info answered {status}" in fault for fault in await gateway.engine_faults()] == [True]
        assert sglang.requests == []


async def test_operators_see_a_servers_state_and_none_of_its_secrets(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    shown = await gateway.admin.get("/admin/api/engines")
    [engine] = shown.json["data"]
    assert (engine["kind"], engine["health"], engine["limit"]) == ("sglang", "up", 48)
    assert API_KEY not in shown.body.decode()
    assert (await gateway.nobody.get("/readyz")).status == 200
    sglang.info["version"] = "0.5.10"


async def test_prompts_are_cached_apart_by_tenant_adapter_and_the_clients_salt(both: tuple[Gateway, SglangDouble]):
    gateway, _ = both
    acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
    [name] = await adapters(acme, 1)

    async def cached(client: Any, **body: Any) -> int:
        got = await client.complete(max_tokens=1, **body)
        return got.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached(acme) == 0
    assert await cached(other) == 0
    assert await cached(acme, model=name) == 0
    assert await cached(acme, cache_salt="mine") == 0
    assert await cached(acme) > 0
    assert await cached(other) > 0


async def test_several_choices_make_no_prompt_cheaper_by_cached_tokens(both: tuple[Gateway, SglangDouble]):
    """With a sum of 16 times the prompt the request cost less than nothing, and was never settled."""
    gateway, sglang = both
    sglang.sums_cached = True
    # A token costs 0.001, and a cached one nothing.
    price = {"input": 10**9, "cached": 0, "output": 10**9}
    assert (await gateway.admin.call("PUT", f"/admin/api/prices/{BASE_MODEL}", json=price)).status == 200
    acme = await gateway.tenant("acme", max_concurrent=1)
    for choices in (1, 1, 16, 1):
        assert (await acme.complete(max_tokens=1, n=choices)).status == 200
    await until(lambda: billed(acme, (4, 4 * PROMPT_TOKENS, 4)))
    [row] = await acme.usage()
    # The second and the fourth request find all but the last token in the cache.
    assert row["cached_tokens"] == 2 * (PROMPT_TOKENS - 1)
    assert row["cost_micros"] == 1000 * (4 * PROMPT_TOKENS + 4 - 2 * (PROMPT_TOKENS - 1))


async def test_a_redirect_carries_no_prompt_and_no_key(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    async with Elsewhere().serving() as elsewhere:
        sglang.redirect = elsewhere.url
        acme = await gateway.tenant("acme")
        assert (await acme.chat(messages=HI)).error["code"] == "engine_error"
        assert elsewhere.seen == []


async def test_a_tenant_that_leaves_frees_the_server(both: tuple[Gateway, SglangDouble]):
    gateway, sglang = both
    acme = await gateway.tenant("acme")
    sglang.hold.clear()
    asked = asyncio.create_task(acme.complete(max_tokens=5))

    async def runs(number: int) -> bool:
        return sglang.running == number

    await until(lambda: runs(1))
    asked.cancel()
    await until(lambda: runs(0))
