"""The grammar cache and its compile queue: bounds by tenant, refusals, and turns."""

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from adapters import decaying_sums
from benchmarks.hostile.engine_work import dear_schema
from engine.answering.errors import as_api_error
from engine.core import grammars
from engine.core.grammars import Grammars
from engine.errors import QueueFull, TenantQueueFull
from engine.structured.compiler import Grammar, GrammarCompiler, Matcher
from testing.tiny import save_byte_level_tokenizer
from wire.errors import BadRequest
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer


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
def cache(compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch) -> Any:
    # A busy machine may take seconds to start a thread.
    for name in ("COMPILE_SECONDS", "QUEUE_SECONDS"):
        monkeypatch.setattr(grammars, name, 60.0)
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
    used, now = 0.0 if is_busy else grammars.EXPENSIVE_CPU_SECONDS + 0.1, [1000.0]

    async def look_often(waiting: Any, timeout: float) -> None:
        await asyncio.wait(waiting, timeout=min(timeout, 0.005))

    clocks = {"monotonic": lambda: now[0], "pthread_getcpuclockid": int, "clock_gettime": lambda _: used}
    monkeypatch.setattr(grammars, "time", SimpleNamespace(**vars(time) | clocks))
    monkeypatch.setattr(grammars, "asyncio", SimpleNamespace(**vars(asyncio) | {"wait": look_often}))
    monkeypatch.setattr(grammars, "MAX_PENDING_PER_TENANT", 1)
    cache = Grammars(compiler)  # type: ignore[arg-type]
    getting = [asyncio.create_task(cache.get(regex("a")))]
    await compiler.wait_for("a")
    getting += [asyncio.create_task(cache.get(regex(text))) for text in "bcd"]
    await asyncio.wait(getting[2:])
    assert not any(task.done() for task in getting[:2])
    now[0] += max(grammars.COMPILE_SECONDS, grammars.QUEUE_SECONDS) + 0.1
    got = await asyncio.gather(*getting, return_exceptions=True)
    kinds = [type(outcome) for outcome in got]
    # A tenant has one thread: a was being compiled, b waited for its turn, c and d found the queue full.
    assert kinds == [kind, QueueFull, TenantQueueFull, TenantQueueFull]
    # The code `engine_unavailable` would make the gateway remove the engine for every tenant.
    answers = [as_api_error(error, make_mocked_request("POST", "/")) for error in got[1:]]
    own = (429, "engine_share_used")
    assert [(answer.status, answer.detail.code) for answer in answers] == [(503, "engine_overloaded"), own, own]
    compiler.go.set()
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
async def test_a_neighbours_grammars_are_ready_before_the_48_dearest_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMPILE_SECONDS", "QUEUE_SECONDS"):
        monkeypatch.setattr(grammars, name, 60.0)
    save_byte_level_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    compiler = GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, tokenizer.eos_token_ids)
    plain, is_served = compiler.compile, threading.Event()

    def compile_until_served(spec: GrammarSpec) -> Grammar:
        compiled = plain(spec)
        # However fast the machine, the neighbour is served beside a dear grammar.
        assert spec.kind != "json" or is_served.wait(60)
        return compiled

    monkeypatch.setattr(compiler, "compile", compile_until_served)
    cache = Grammars(compiler)
    dear = [dear_schema(0.1 + i / 1000)["json"] for i in range(48)]
    specs = [GrammarSpec("json", json.dumps(schema), param="p") for schema in dear]
    greedy = [asyncio.create_task(cache.get(spec, "greedy")) for spec in specs]
    for i in range(10):
        assert (await cache.get(regex(f"[ab]{{1,2}}{i}"), "neighbour")).param == "p"
    assert not all(task.done() for task in greedy)
    is_served.set()
    outcomes = await asyncio.gather(*greedy, return_exceptions=True)
    compiled = [outcome for outcome in outcomes if isinstance(outcome, Grammar)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert compiled
    assert refused
    assert len(compiled) + len(refused) == len(specs), outcomes
    cache.close()


@pytest.fixture
def _nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no CPU time of a tenant decay while a busy machine takes long."""
    monkeypatch.setattr(decaying_sums, "time", SimpleNamespace(monotonic=lambda: 1000.0))


@pytest.mark.usefixtures("_nothing_is_forgotten")
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


@pytest.mark.usefixtures("_nothing_is_forgotten")
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
