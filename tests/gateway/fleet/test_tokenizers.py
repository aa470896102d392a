"""Tokenizers of base models: folders read side by side, and engines that count prompts in their place."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.api.inference.admission import ADMISSIONS_EACH
from gateway.api.requests import memory
from gateway.errors import NoEngine, UpstreamFailed
from gateway.fleet import engine_tokenizer, tokenizers
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.engine_tokenizer import EngineTokenizer
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.kinds.kind import BodyTooLarge
from gateway.fleet.tokenizers import MAX_COUNTED, Tokenizers
from gateway.settings import SettingsError
from testing.gateway.bases import one_base
from testing.gateway.foreign_double import PROMPT_TOKENS, ForeignDouble
from testing.gateway.principals import principal
from testing.gateway.running import MODEL_CONFIG, TOKEN, Client, running, settings, until
from testing.gateway.sglang_double import SglangDouble
from testing.gateway.upstream import Upstream
from testing.gateway.vllm_double import VllmDouble
from wire.headers import INTERNAL_TOKEN_HEADER, TENANT_HEADER, WEIGHT_HEADER
from wire.text.tokenizer import TextTooLong, Tokenizer


@asynccontextmanager
async def counting(
    double: ForeignDouble | Upstream, prefix: str, folder: Path, model_dir: Path, redis_url: str, migrated: Path
) -> AsyncIterator[Client]:
    """Start a gateway whose base `beta` has no tokenizer here, and yield a tenant's client."""
    async with double.serving():
        shutil.copy(migrated, folder / "gateway.db")
        of = settings(folder, model_dir, [f"{prefix}{double.url}"], redis_url, migrate_on_start=False)
        async with running(of) as gateway:
            config = MODEL_CONFIG | {"max_position_embeddings": 256}
            assert (await gateway.admin.post("/admin/api/bases", {"name": "beta", "config": config})).status == 201
            await gateway.engines_up(1)
            yield await gateway.tenant("acme")


async def test_our_engines_count_prompts_in_the_turn_of_their_tenant(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    engine = Upstream()
    engine.model = "beta"
    async with counting(engine, "", tmp_path, model_dir, redis_url, migrated) as acme:
        assert (await acme.chat(model="beta")).status == 200
        assert (await acme.complete(model="beta", prompt="a")).status == 200
    [asked, _] = [head for head, _ in engine.requests]
    assert len(engine.tokenized) == 2
    for head in engine.tokenized:
        assert head[INTERNAL_TOKEN_HEADER] == TOKEN
        assert [head[name] for name in (TENANT_HEADER, WEIGHT_HEADER)] == [asked[TENANT_HEADER], asked[WEIGHT_HEADER]]


async def test_foreign_servers_that_count_prompts_learn_no_tenant(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    vllm = VllmDouble(api_key="", base_model="beta")
    async with counting(vllm, "vllm+", tmp_path, model_dir, redis_url, migrated) as acme:
        assert (await acme.chat(model="beta")).status == 200
    assert vllm.tokenized
    assert not any(name.startswith("x-loraplex") for head in vllm.heads for name in head)


@pytest.mark.parametrize("prefix", ["vllm", "sglang"])
async def test_a_refused_prompt_shows_only_messages_meant_for_clients(
    prefix: str, tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    double = (VllmDouble if prefix == "vllm" else SglangDouble)(api_key="", base_model="beta")
    double.refuse_tokenize = "no roles in /models/beta"
    async with counting(double, f"{prefix}+", tmp_path, model_dir, redis_url, migrated) as acme:
        got = await acme.chat(model="beta")
        assert (got.status, "/models" in got.error["message"]) == (400, prefix == "vllm")


async def test_engines_count_a_bounded_number_of_texts_and_the_tenant_pays_for_refused_ones(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "REFUSED_SECONDS", 0.2)
    vllm = VllmDouble(api_key="", base_model="beta")
    async with counting(vllm, "vllm+", tmp_path, model_dir, redis_url, migrated) as acme:
        most = await acme.complete(model="beta", prompt=["a"] * MAX_COUNTED, max_tokens=1)
        assert (most.status, most.json["usage"]["prompt_tokens"]) == (200, PROMPT_TOKENS)
        got = await acme.complete(model="beta", prompt=["a"] * (MAX_COUNTED + 1), max_tokens=1)
        assert (got.status, got.error["param"], len(vllm.tokenized)) == (400, "prompt", MAX_COUNTED)
        vllm.tokenize_seconds = 0.5
        assert (await acme.complete(model="beta", max_tokens=250)).error["code"] == "context_length_exceeded"
        got = await acme.complete(model="beta", max_tokens=1)
        assert (got.status, got.error["code"], len(vllm.tokenized)) == (
            429,
            "too_many_refused_requests",
            MAX_COUNTED + 1,
        )


async def test_an_engines_count_of_far_too_many_tokens_is_not_read(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    """The ids of a prompt of 8 MiB took some hundred MB, for each of a tenant's requests."""
    vllm = VllmDouble(api_key="", base_model="beta")
    vllm.tokenize_count = 10**6
    async with counting(vllm, "vllm+", tmp_path, model_dir, redis_url, migrated) as acme:
        for got in (await acme.complete(model="beta", max_tokens=1), await acme.chat(model="beta", max_tokens=1)):
            assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
            assert "has more than 256 tokens" in got.error["message"]


Answer = tuple[int, bytes] | Exception
LONG = BodyTooLarge("more than the context")
TOO_MANY = (200, msgspec.json.encode({"tokens": [1] * 5000}))
FINE = (200, b'{"tokens": [1, 2, 3]}')
TEXTS = {"short": "Hi", "long": "a" * 10_000}


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("long", [LONG, LONG, FINE], TextTooLong),
        ("long", [LONG, FINE], [1, 2, 3]),
        ("long", [LONG], TextTooLong),
        ("long", [LONG, (500, b"")], TextTooLong),
        # A text with fewer bytes cannot be too long.
        ("short", [LONG, LONG, FINE], [1, 2, 3]),
        ("short", [LONG, LONG], NoEngine),
        ("short", [TOO_MANY, FINE], [1, 2, 3]),
        ("long", [TOO_MANY], [1] * 5000),
        ("short", [(500, b""), (200, b"[" * 10_000), (200, b"\xff"), UpstreamFailed("cut off"), FINE], [1, 2, 3]),
    ],
)
async def test_one_engines_impossible_answer_refuses_no_prompt(
    text: str, answers: list[Answer], expected: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_tokenizer, "TEMPLATE_TOKENS", 100)
    left, base = list(answers), one_base("beta", context_length=4096)

    async def tokenize(*_: Any) -> tuple[int, bytes]:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def absence(_base: str, otherwise: NoEngine) -> NoEngine:
        return otherwise

    engines = [EngineRecord(parse_address(f"vllm+http://{i}"), base=base.id) for i in range(len(answers))]
    registry, kinds = SimpleNamespace(up=engines, absence=absence), {"vllm": SimpleNamespace(tokenize=tokenize)}
    tokens = EngineTokenizer(cast(Any, registry), cast(Any, kinds)).tokens
    body, tenant = {"prompt": TEXTS[text], "add_special_tokens": True}, principal().tenant
    if isinstance(expected, list):
        assert await tokens(base, body, tenant) == expected
    else:
        with pytest.raises(expected):
            await tokens(base, body, tenant)


@pytest.mark.parametrize("refusal", [(400, b'{"message": "no"}'), (422, b""), LONG])
async def test_our_engine_counts_before_foreign_servers_that_refuse_the_prompt(refusal: Answer):
    base, asked = one_base("beta", context_length=4096), list[str]()

    async def tokenize(engine: EngineRecord, *_: Any) -> tuple[int, bytes]:
        asked.append(engine.url)
        if engine.url == "http://ours":
            return FINE
        if isinstance(refusal, Exception):
            raise refusal
        return refusal

    urls = ("vllm+http://a", "vllm+http://b", "http://ours")
    engines = [EngineRecord(parse_address(url), base=base.id) for url in urls]
    # Our engine has the highest load.
    engines[-1].requests.sequences = 7
    registry = SimpleNamespace(up=engines)
    kinds = dict.fromkeys(("vllm", "loraplex"), SimpleNamespace(tokenize=tokenize))
    body = {"prompt": TEXTS["long"], "add_special_tokens": True}
    count = EngineTokenizer(cast(Any, registry), cast(Any, kinds)).tokens
    assert (await count(base, body, principal().tenant), asked) == ([1, 2, 3], ["http://ours"])


async def test_a_long_refusal_of_a_prompt_is_no_long_prompt(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    vllm = VllmDouble(api_key="", base_model="beta")
    vllm.refuse_tokenize = "a" * 2**21
    async with counting(vllm, "vllm+", tmp_path, model_dir, redis_url, migrated) as acme:
        got = await acme.complete(model="beta", prompt="a" * 1000, max_tokens=1)
        assert (got.status, got.error["code"]) == (400, None)


async def test_a_tenants_prompts_are_counted_by_engines_at_the_same_time(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    """Few of a tenant's requests are checked at the same time, and a wait for an engine is no part of it."""
    vllm = VllmDouble(api_key="", base_model="beta")
    async with counting(vllm, "vllm+", tmp_path, model_dir, redis_url, migrated) as acme:
        vllm.tokenize_seconds = 60.0
        asked = [asyncio.create_task(acme.complete(model="beta", max_tokens=1)) for _ in range(4 * ADMISSIONS_EACH)]

        async def all_are_counted() -> bool:
            return len(vllm.tokenized) == len(asked)

        try:
            await until(all_are_counted, 30)
        finally:
            for request in asked:
                request.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


async def test_a_slow_folder_delays_no_other_base(monkeypatch: pytest.MonkeyPatch, model_dir: Path):
    slow, loaded = asyncio.Event(), Tokenizer.from_dir(model_dir)
    loop = asyncio.get_running_loop()

    def load(folder: str) -> Tokenizer:
        if folder == "/slow":
            asyncio.run_coroutine_threadsafe(slow.wait(), loop).result(30)
        return loaded

    async def ask(*_: Any) -> list[int]:
        raise AssertionError("no engine counts")

    monkeypatch.setattr(tokenizers, "_load", load)
    known = Tokenizers(ask)
    first, second = (msgspec.structs.replace(one_base(name), tokenizer=f"/{name}") for name in ("slow", "quick"))
    waiting = [asyncio.create_task(known.of(first)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(known.of(second), 10) is loaded
    slow.set()
    assert await asyncio.gather(*waiting) == [loaded, loaded]


async def test_a_folder_of_an_unknown_user_leaves_the_counting_to_engines(caplog: pytest.LogCaptureFixture):
    """Another machine may have the user, so the base is on record."""

    async def ask(*_: Any) -> list[int]:
        return [1, 2]

    base = msgspec.structs.replace(one_base("beta"), tokenizer="~nobody-here/beta")
    assert await Tokenizers(ask).encode(base, "hi", principal().tenant) == [1, 2]
    [record] = caplog.records
    assert "the base model beta" in record.message
    assert "tokenizer: ~nobody-here/beta: " in record.message


def test_a_folder_of_an_unknown_user_is_an_error_that_names_the_setting(tmp_path: Path, model_dir: Path):
    for name in ("model_dir", "journal_dir", "adapter_cache"):
        given: dict[str, Any] = {"folder": tmp_path, "model_dir": model_dir, "engines": ["http://127.0.0.1:1"]}
        given |= {"redis_url": "redis://r", name: "~nobody-here/x"}
        with pytest.raises(SettingsError, match=f"LORAPLEX_{name.upper()}: expected .*'~nobody-here/x'"):
            settings(**given)
    with pytest.raises(SettingsError, match=r"LORAPLEX_ENGINES: key_file .* unknown user"):
        settings(tmp_path, model_dir, ["vllm+http://127.0.0.1:1?key_file=~nobody-here/key"], "redis://r")


async def test_clients_that_leave_do_not_read_a_tokenizer_again(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    load, loads, goes_on = tokenizers._load, [], threading.Event()

    def held_up(folder: str) -> Tokenizer:
        loads.append(folder)
        assert goes_on.wait(60)
        return load(folder)

    async def nobody(*_: Any) -> list[int]:
        raise AssertionError

    async def has_begun() -> bool:
        return bool(loads)

    monkeypatch.setattr(tokenizers, "_load", held_up)
    known, base = Tokenizers(nobody), msgspec.structs.replace(one_base("beta"), tokenizer=str(model_dir))
    try:
        for _ in range(3):
            leaving = asyncio.create_task(known.of(base))
            await until(has_begun)
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait({leaving})
    finally:
        goes_on.set()
    assert await known.of(base) is not None
    assert len(loads) == 1
