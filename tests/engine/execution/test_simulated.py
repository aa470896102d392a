"""The simulated device: its answers do not depend on the batch, its steps take the given time and no CPU."""

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from engine.structured.compiler import GrammarCompiler
from testing.engine import Client, RunningServer, outputs_until_idle
from testing.recorded_graph import UncompiledMode
from testing.tiny_engines import Make, engine_maker, save_base_and_adapters
from testing.virtual_engine import VirtualClock
from wire.errors import ConfigError
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, fp32, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 1024)


@pytest.fixture
def make_engine(folder: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(
        folder,
        request,
        device="simulated:0,0",
        kv_cache_memory=1 << 30,
        max_num_batched_tokens=64,
        max_num_seqs=64,
    )


def add(engine: Engine, request_id: str, adapter: str | None = None, prompt: int = 20, **params: Any) -> None:
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 1} | params
    tokens = [3 + 7 * j % 370 for j in range(prompt)]
    engine.add_request(NewRequest(request_id, tokens, SamplingParams(**params), adapter_digest=adapter))


def answers(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs_until_idle(engine):
        assert output.error is None
        found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def answer(engine: Engine, adapter: str | None = None, **params: Any) -> list[int]:
    add(engine, "one", adapter, **params)
    return answers(engine)["one"]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preempted_requests_answer_as_alone(
    async_scheduling: bool, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, digests = make_engine()
    expected = {str(i): answer(alone, digests[i % 3], seed=i, prompt=5 + i) for i in range(12)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 12
    # Admission expects no further blocks, so that they run out.
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    crowded, _ = make_engine(
        kv_cache_memory=9 * BLOCK_BYTES, max_model_len=128, max_num_seqs=8, async_scheduling=async_scheduling
    )
    for i in range(12):
        add(crowded, str(i), digests[i % 3], seed=i, prompt=5 + i)
    assert answers(crowded) == expected
    assert crowded.state().num_preemptions


def test_a_token_depends_on_adapter_seed_and_prompt(make_engine: Make) -> None:
    engine, digests = make_engine()
    plain = answer(engine)
    assert answer(engine) == plain
    others = [answer(engine, digests[0]), answer(engine, digests[1]), answer(engine, seed=2), answer(engine, prompt=21)]
    assert len({tuple(tokens) for tokens in [plain, *others]}) == 5
    assert answer(engine, temperature=0.0, seed=1) == answer(engine, temperature=0.0, seed=2)


def test_token_rules_hold(folder: Path, make_engine: Make) -> None:
    engine, _ = make_engine()
    rules = {"allowed": AllowedTokens(range(5, 9)), "bad_words": BannedWords([[5], [6, 7]])}
    tokens = answer(engine, **rules, max_tokens=200)
    assert set(tokens) == {6, 7, 8}
    assert (6, 7) not in itertools.pairwise(tokens)
    tokenizer = Tokenizer.from_dir(folder / "base")
    compiler = GrammarCompiler(tokenizer.to_json, engine.model_config.vocab_size, engine.eos_token_ids)
    grammar = compiler.compile(GrammarSpec("regex", "(ab|cd){3,9}z"))
    text = tokenizer.decode(answer(engine, grammar=grammar, ignore_eos=False))
    assert text.endswith("z")
    assert set(text[:-1]) <= set("abcd")


@pytest.fixture
def clock(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Return the time, which stands still while the host computes: only the device's waits move it on."""
    make_engine()  # imports in real time
    clock = VirtualClock()
    for name, function in (("perf_counter", clock.now), ("monotonic", clock.now), ("sleep", clock.sleep)):
        monkeypatch.setattr(time, name, function)
    return clock


def test_steps_take_the_given_time_and_wait_asleep(make_engine: Make, clock: VirtualClock) -> None:
    engine, _ = make_engine(device="simulated:20,0.5,30", enable_prefix_caching=False)
    # A prompt of 40 tokens, then ten decode steps; with asynchronous scheduling the host adds nothing between them.
    expected = 0.02 + 40 * 0.0005 + 0.03 + 10 * 0.0205
    for number in range(3):
        began = clock.now()
        add(engine, f"{number}", prompt=40, max_tokens=11)
        answers(engine)
        assert clock.now() - began == pytest.approx(expected)


def test_the_host_does_not_run_ahead_of_a_long_prompt(make_engine: Make, clock: VirtualClock) -> None:
    """Chunks that sample no token are waited for too, so that a new request joins soon."""
    engine, _ = make_engine(device="simulated:10,0")
    add(engine, "long", prompt=640)
    began = clock.now()
    for _ in range(6):
        engine.step()
    assert clock.now() - began == pytest.approx(0.05), "the sixth step is in flight"


def test_a_step_copies_a_few_numbers_and_waits_for_nothing(make_engine: Make, clock: VirtualClock) -> None:
    """It runs thousands of steps a second (benchmarks/simulated_time.py)."""
    engine, _ = make_engine()
    operations: Counter[str] = Counter()

    class Count(UncompiledMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations[str(func)] += 1
            return func(*args, **kwargs or {})

    add(engine, "one", max_tokens=600)
    with Count():
        assert len(answers(engine)["one"]) == 600
    copies = {"empty", "_to_copy", "detach", "slice", "view"}
    assert {name.split(".")[1] for name in operations} <= copies
    assert operations.total() < 8 * 600
    assert clock.now() == 0.0


async def test_a_server_streams_its_answers(model: Path, session: Any) -> None:
    server = RunningServer(model, config={"device": "simulated:1,0", "max_num_batched_tokens": 640})
    try:
        client = Client(session, server.url)
        body = {"model": "tiny", "prompt": "go on", "max_tokens": 30, "ignore_eos": True, "seed": 3, "logprobs": 2}
        whole = (await client.ok("/v1/completions", body))["choices"][0]
        events = await client.events("/v1/completions", body)
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        assert len(whole["logprobs"]["tokens"]) == 30
    finally:
        server.close()


@pytest.mark.parametrize("device", ["simulated", "simulated:1", "simulated:1,-1", "simulated:a,b", "simulated:nan,1"])
def test_times_are_checked(device: str) -> None:
    with pytest.raises(ConfigError, match="device: expected auto, cpu, cuda or simulated:STEP_MS,MS_PER_TOKEN"):
        EngineConfig(model="any", device=device)
