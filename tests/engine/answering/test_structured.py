"""Structured output over real HTTP: each request form, its text and its refusals."""

import asyncio
import contextlib
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from benchmarks.hostile.engine_work import dear_schema
from engine.core import grammars
from engine.core.errors import QueueFull, TenantQueueFull
from engine.core.grammars import Grammars
from engine.http.errors import as_api_error
from engine.structured.compiler import Grammar, GrammarCompiler, Matcher
from testing.engine import Client
from testing.tiny import save_byte_level_tokenizer
from tests.engine.structured.schemas import fits
from wire.errors import BadRequest
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Who is it?"}]


@pytest.mark.parametrize("temperature", [0, 1])
async def test_both_routes_give_json_that_fits_for_every_choice(client: Client, temperature: float) -> None:
    fields = {"response_format": FORMAT, "max_tokens": 200, "temperature": temperature, "n": 3, "seed": 1}
    texts = [c["text"] for c in (await client.complete(prompt="It is", **fields))["choices"]]
    chat = await client.chat(messages=MESSAGES, **fields)
    texts += [choice["message"]["content"] for choice in chat["choices"]]
    assert len(texts) == 6
    assert all(fits(json.loads(text), SCHEMA) for text in texts), texts
    assert {choice["finish_reason"] for choice in chat["choices"]} == {"stop"}
    assert len(set(texts)) == (2 if temperature == 0 else 6)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no", "Größe 🎉"]}, "yes|no|Größe 🎉"),
        ({"guided_grammar": 'root ::= "x" ("1" | "2")'}, "x[12]"),
        ({"structured_outputs": {"regex": "a{4}"}}, "aaaa"),
        ({"structured_outputs": {"choice": ["only"]}}, "only"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json": {"enum": ["u", 7]}}}, '"u"|7'),
        ({"guided_json": '{"const": {"a": null}}'}, r'\{\s*"a"\s*:\s*null\s*\}'),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_vllms_forms(client: Client, fields: dict[str, Any], pattern: str, temperature: float) -> None:
    answer = await client.complete(prompt="so", max_tokens=100, temperature=temperature, **fields)
    [choice] = answer["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


async def test_a_stream_says_the_same(client: Client) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200, "temperature": 0}
    events = await client.events("/v1/chat/completions", body)
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    assert text == (await client.ok("/v1/chat/completions", body))["choices"][0]["message"]["content"]
    assert fits(json.loads(text), SCHEMA)


async def test_any_object(client: Client) -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 400, "temperature": 1}
    answer = await client.chat(messages=MESSAGES, n=8, seed=3, **fields)
    ended = [c["message"]["content"] for c in answer["choices"] if c["finish_reason"] == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended), ended
    assert all(c["message"]["content"].startswith("{") for c in answer["choices"])
    assert ended


async def test_with_an_adapter_beside_the_base_and_free_requests(client: Client, adapter: Any) -> None:
    await client.ok("/v1/load_lora_adapter", {"lora_name": "shaped", "lora_path": str(adapter)})
    free = {"prompt": "The quick", "max_tokens": 12, "ignore_eos": True}
    alone = (await client.complete(**free))["choices"][0]["text"]
    bound = {"prompt": "It is", "max_tokens": 200, "response_format": FORMAT}
    asked = [client.complete(**free), client.complete(**bound), client.complete(model="shaped", **bound)]
    asked += [client.complete(model="shaped", prompt="x", guided_choice=["left", "right"])]
    texts = [answer["choices"][0]["text"] for answer in await asyncio.gather(*asked)]
    assert texts[0] == alone
    assert fits(json.loads(texts[1]), SCHEMA)
    assert fits(json.loads(texts[2]), SCHEMA)
    assert texts[3] in ("left", "right")


async def test_logprobs_stop_strings_and_limits_go_with_it(client: Client) -> None:
    answer = await client.complete(prompt="x", guided_regex="a{9}", stop="aaaaa", logprobs=2, max_tokens=50)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    answer = await client.complete(prompt="x", guided_regex="[0-9]{50}", max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = await client.complete(prompt="x", guided_choice=["a"], min_tokens=9, max_tokens=9, ignore_eos=True)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("a", 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "foo"}}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"structured_outputs": {"regex": "(a)\\1"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_compile_is_400_naming_the_field(
    client: Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": stream} | fields
    status, answer = await client.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]


async def test_a_grammar_too_ambiguous_to_follow_is_400_and_harms_nobody(client: Client) -> None:
    ambiguous = {"guided_grammar": 'start: s\ns: s s | s s s | "a" | "b" | ""'}
    hostile = client.post(
        "/v1/completions",
        {"model": "tiny", "prompt": "x", "max_tokens": 3000, "min_tokens": 3000} | ambiguous,
    )
    friend = client.complete(prompt="x", guided_choice=["yes", "no"])
    (status, answer), good = await asyncio.gather(hostile, friend)
    assert (status, answer["error"]["param"]) == (400, "guided_grammar")
    assert good["choices"][0]["text"] in ("yes", "no")
    state = await client.wait_for(lambda state: not state["running"] and not state["waiting"])
    assert state["kv_blocks_free"] == state["kv_blocks_total"]


class Panic(BaseException):
    """A BaseException, like pyo3's PanicException."""


class CountingCompiler:
    """Double of the compiler that holds texts beginning with `held` until the test releases them."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.held = ""
        self.go = threading.Event()

    def compile(self, spec: GrammarSpec) -> Grammar:
        self.compiled.append(spec.text)
        assert not spec.text.startswith(self.held) or self.go.wait(60)
        if spec.text == "panic":
            raise Panic
        if spec.text == "bad":
            raise BadRequest.of(spec.param, "it is bad")
        return Grammar(None, frozenset(), spec.param)  # type: ignore[arg-type]

    async def wait_for(self, text: str) -> None:
        """Wait until the compilation of `text` has begun."""
        for _ in range(6000):
            if text in self.compiled:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{text}: not compiled within 60 s")


@pytest.fixture
def compiler() -> CountingCompiler:
    return CountingCompiler()


@pytest.fixture
def cache(compiler: CountingCompiler) -> Any:
    cache = Grammars(compiler)  # type: ignore[arg-type]
    yield cache
    compiler.go.set()
    cache.close()


def regex(text: str, param: str = "p") -> GrammarSpec:
    return GrammarSpec("regex", text, param=param)


async def test_one_spec_is_compiled_once_while_it_is_cached(cache: Grammars, compiler: CountingCompiler) -> None:
    waiting = [asyncio.create_task(cache.get(regex("a", param))) for param in ("p", "q")]
    await compiler.wait_for("a")
    compiler.go.set()
    assert [grammar.param for grammar in await asyncio.gather(*waiting)] == ["p", "q"]
    assert (await cache.get(regex("a", "r"))).param == "r"
    assert compiler.compiled == ["a"]
    for i in range(grammars.MAX_CACHED_PER_TENANT):
        await cache.get(regex(f"x{i}"))
    await cache.get(regex("a"))
    assert compiler.compiled.count("a") == 2


async def test_who_leaves_takes_no_ones_grammar_away(cache: Grammars, compiler: CountingCompiler) -> None:
    leaving, staying = (asyncio.create_task(cache.get(regex("a"))) for _ in range(2))
    await compiler.wait_for("a")
    leaving.cancel()
    compiler.go.set()
    assert (await staying).param == "p"
    assert compiler.compiled == ["a"]


async def test_a_refusal_names_each_ones_own_field_and_is_not_kept(cache: Grammars, compiler: CountingCompiler) -> None:
    compiler.go.set()
    for param in ("p", "q"):
        with pytest.raises(BadRequest) as refused:
            await cache.get(regex("bad", param))
        assert refused.value.param == param
    assert compiler.compiled == ["bad", "bad"]


@pytest.mark.parametrize(("is_busy", "kind"), [(False, BadRequest), (True, QueueFull)], ids=["expensive", "delayed"])
async def test_slow_grammars_are_refused_and_too_many_turned_away(
    is_busy: bool, kind: type[Exception], cache: Grammars, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """expensive: the compilation uses CPU time. delayed: it gets none, as on a busy machine, and may be repeated."""

    def burn(spec: GrammarSpec) -> Grammar:
        while not compiler.go.is_set():
            pass
        return held(spec)

    held = compiler.compile
    if not is_busy:
        monkeypatch.setattr(compiler, "compile", burn)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 1.0)
    monkeypatch.setattr(grammars, "EXPENSIVE_CPU_SECONDS", 0.05)
    monkeypatch.setattr(grammars, "QUEUE_SECONDS", 0.5)
    monkeypatch.setattr(grammars, "MAX_PENDING_PER_TENANT", 1)
    cache = Grammars(compiler)  # type: ignore[arg-type]
    got = await asyncio.gather(*(cache.get(regex(text)) for text in "abcd"), return_exceptions=True)
    kinds = [type(outcome) for outcome in got]
    # A tenant has one thread: a was being compiled, b waited for its turn, c and d found the queue full.
    assert kinds == [kind, QueueFull, TenantQueueFull, TenantQueueFull]
    # The code `engine_unavailable` would make the gateway remove the engine for every tenant.
    answers = [as_api_error(error, make_mocked_request("POST", "/")) for error in got[1:]]
    own = (429, "engine_share_used")
    assert [(answer.status, answer.detail.code) for answer in answers] == [(503, "engine_overloaded"), own, own]
    compiler.go.set()
    for name in ("COMPILE_SECONDS", "QUEUE_SECONDS"):
        monkeypatch.setattr(grammars, name, 30.0)
    assert (await cache.get(regex("e"), "neighbour")).param == "p"
    cache.close()


async def test_a_neighbours_grammar_does_not_wait_behind_many(cache: Grammars, compiler: CountingCompiler) -> None:
    compiler.held = "slow"
    greedy = [asyncio.create_task(cache.get(regex(f"slow{i}"), "greedy")) for i in range(48)]
    await compiler.wait_for("slow0")
    assert (await cache.get(regex("quick"), "neighbour")).param == "p"
    assert len(compiler.compiled) == 2
    for task in greedy:
        task.cancel()
    assert len(await asyncio.gather(*greedy, return_exceptions=True)) == 48
    # Cancelled compilations never start.
    compiler.go.set()
    await cache.get(regex("another"), "greedy")
    assert sorted(compiler.compiled) == ["another", "quick", "slow0"]


@pytest.mark.usefixtures("takes_a_core")
async def test_a_neighbours_grammar_is_ready_within_2_s_beside_48_of_the_dearest(tmp_path: Path) -> None:
    save_byte_level_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    cache = Grammars(GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, tokenizer.eos_token_ids))
    dear = [dear_schema(0.1 + i / 1000)["json"] for i in range(48)]
    specs = [GrammarSpec("json", json.dumps(schema), param="p") for schema in dear]
    await cache.get(regex("warm"), "warm")
    greedy = [asyncio.create_task(cache.get(spec, "greedy")) for spec in specs]
    waits = []
    for i in range(10):
        began = time.monotonic()
        await cache.get(regex(f"[ab]{{1,2}}{i}"), "neighbour")
        waits.append(time.monotonic() - began)
        await asyncio.sleep(0.1)
    assert max(waits) < 2, waits
    outcomes = await asyncio.gather(*greedy, return_exceptions=True)
    compiled = [outcome for outcome in outcomes if isinstance(outcome, Grammar)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert refused
    assert len(compiled) + len(refused) == len(specs), outcomes
    # A busy machine may leave no time for any of them at low priority, so the tenant repeats one.
    deadline = time.monotonic() + 60
    while not compiled:
        assert time.monotonic() < deadline
        with contextlib.suppress(QueueFull):
            compiled.append(await cache.get(specs[0], "greedy"))
    cache.close()


async def test_a_tenants_cpu_time_bounds_its_new_grammars_and_no_cached_one(
    compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burn(spec: GrammarSpec) -> Grammar:
        ends = time.thread_time() + 0.03
        while time.thread_time() < ends:
            pass
        return compiled(spec)

    compiled = compiler.compile
    monkeypatch.setattr(compiler, "compile", burn)
    monkeypatch.setattr(grammars, "TENANT_CPU_SECONDS", 0.1)
    # On a busy machine, threads at the lowest priority take long.
    monkeypatch.setattr(grammars, "QUEUE_SECONDS", 60.0)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 60.0)
    compiler.go.set()
    cache = Grammars(compiler)  # type: ignore[arg-type]
    got = await asyncio.gather(*(cache.get(regex(f"a{i}"), "greedy") for i in range(12)), return_exceptions=True)
    refused = [error for error in got if isinstance(error, QueueFull)]
    assert 3 <= 12 - len(refused) <= 6
    assert all("CPU time" in str(error) and error.retry_after for error in refused)
    assert (await cache.get(regex("a0"), "greedy")).param == "p"
    assert (await cache.get(regex("a0"), "neighbour")).param == "p"
    # An engine without a gateway has no tenants.
    assert len([await cache.get(regex(f"b{i}")) for i in range(8)]) == 8
    cache.close()


@pytest.mark.parametrize("is_pushed_out", [False, True])
async def test_dear_masks_count_as_the_tenants_cpu_time(
    cache: Grammars, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch, is_pushed_out: bool
) -> None:
    class Burning:
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            ends = time.thread_time() + 0.02
            while time.thread_time() < ends:
                pass

    monkeypatch.setattr(grammars, "TENANT_CPU_SECONDS", 0.1)
    cache = Grammars(compiler)  # type: ignore[arg-type]
    compiler.go.set()
    grammar = await cache.get(regex("a", "q"), "greedy")
    # Grammars that push it out of the cache do not save its tenant the cost.
    for i in range(grammars.MAX_CACHED_PER_TENANT if is_pushed_out else 0):
        await cache.get(regex(f"b{i}"), "greedy")
    matcher = Matcher(Burning(), frozenset(), "q", grammar.blaming("r")._charge)
    for _ in range(6):
        matcher.fill(np.zeros(1, np.uint32))
    with pytest.raises(QueueFull, match="CPU time"):
        await cache.get(regex("new"), "greedy")
    assert (await cache.get(regex("b0" if is_pushed_out else "a"), "greedy")).param == "p"
    assert (await cache.get(regex("new"), "neighbour")).param == "p"
    cache.close()


async def test_a_tenants_grammars_push_out_its_own_only(cache: Grammars, compiler: CountingCompiler) -> None:
    compiler.go.set()
    await cache.get(regex("mine"), "neighbour")
    for i in range(2 * grammars.MAX_CACHED):
        await cache.get(regex(f"x{i}"), "greedy")
    compiler.compiled.clear()
    await cache.get(regex("mine"), "neighbour")
    assert compiler.compiled == []
    # Compiled again for another tenant, so that its time does not reveal the first tenant's use.
    await cache.get(regex("mine"), "greedy")
    assert compiler.compiled == ["mine"]
    for i in range(2 * grammars.MAX_CACHED):
        await cache.get(regex("x"), f"tenant{i}")
    assert sum(map(len, cache._compiled.values())) <= grammars.MAX_CACHED


async def test_a_panic_of_the_compiler_is_the_requests_own(cache: Grammars, compiler: CountingCompiler) -> None:
    compiler.go.set()
    with pytest.raises(BadRequest, match="the compiler failed"):
        await cache.get(regex("panic"))
    assert (await cache.get(regex("fine"))).param == "p"
