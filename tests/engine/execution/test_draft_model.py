"""A draft model changes no answer: whatever it proposes, and however its cache is shared, freed and caught up."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.build import kv_bytes_per_token
from engine.engine import Engine
from engine.execution.draft_model import DraftModel
from engine.model.config import read_config
from engine.model.families import parse_model_config
from engine.scheduling.request import Grammar, NewRequest, SamplingParams
from engine.scheduling.step_times import StepTimes
from engine.sizing import estimate
from engine.sizing_speed import ExpectedLoad
from engine.speculative_config import SpeculativeConfig
from kernels.cpu.plain import TorchOps
from testing.engine import outputs_until_idle
from testing.speculation import always_drafting, run, sampling
from testing.tiny import save_model
from testing.tiny_engines import Make, engine_maker, regex_grammar, save_base_and_adapters
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model, adapters, and a smaller model of the same vocabulary."""
    folder = save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 256, ranks=(3, 5))
    save_model(folder / "other", max_model_len=100, hidden=32, head_dim=16, seed=7)
    return folder


@pytest.fixture(scope="module")
def grammar(tiny: Path) -> Grammar:
    return regex_grammar(tiny)


@pytest.fixture(scope="module")
def make_engine(tiny: Path, request: pytest.FixtureRequest) -> Make:
    """Return a factory of engines and the digests of their adapters. draft: name of the draft model."""
    plain = engine_maker(
        tiny, request, dtype="float32", device="cpu", max_lora_rank=8, adapter_memory=4 << 20, max_num_seqs=6,
        kv_cache_memory=2 << 20, max_num_batched_tokens=64, block_size=16,
    )  # fmt: skip

    def make(draft: str | None = None, drafts: int = 4, **options: Any) -> tuple[Engine, list[str]]:
        if draft is not None:
            options["speculative_config"] = SpeculativeConfig("draft_model", drafts, model=str(tiny / draft))
        return plain(**options)

    return make


@pytest.fixture
def always() -> Iterator[None]:
    with always_drafting():
        yield


def draft_model(engine: Engine) -> DraftModel:
    drafter = engine.scheduler.drafter
    assert drafter is not None
    assert isinstance(drafter._proposer, DraftModel)
    return drafter._proposer


def counts(engine: Engine) -> tuple[int, int]:
    found = engine.state().drafts
    return sum(count.drafted for count in found), sum(count.accepted for count in found)


@pytest.mark.parametrize(("draft", "dtype"), [("base", "float32"), ("other", "bfloat16")])
def test_every_sampling_feature_answers_as_without(
    draft: str, dtype: str, make_engine: Make, grammar: Grammar, always: None
) -> None:
    plain, digests = make_engine(dtype=dtype)
    drafting, _ = make_engine(draft, dtype=dtype)

    @settings(
        max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        requests = [
            NewRequest(
                str(i),
                data.draw(st.lists(st.integers(3, 99), min_size=1, max_size=70)),
                sampling(data.draw, grammar),
                adapter_digest=data.draw(st.sampled_from([None, *digests])),
                tenant_id=data.draw(st.sampled_from("ab")),
            )
            for i in range(data.draw(st.integers(1, 8)))
        ]
        assert run(drafting, requests) == run(plain, requests)

    check()
    drafted, accepted = counts(drafting)
    assert drafted
    # The number of drafts depends on the steps' times, so their shares say nothing here. Both ways are to be taken.
    assert accepted if draft == "base" else accepted < drafted
    draft_model(drafting)._drop_ended()
    cache = draft_model(drafting).cache
    assert cache.num_free == cache.num_blocks


def requests_of(n: int, prompt: int = 20, tokens: int = 30, **params: Any) -> list[NewRequest]:
    return [
        NewRequest(
            str(i),
            [3 + (7 * i + 11 * j) % 370 for j in range(prompt)],
            SamplingParams(**{"max_tokens": tokens, "temperature": i % 2, "seed": i, "ignore_eos": True, **params}),
            tenant_id=f"tenant-{i % 3}",
        )
        for i in range(n)
    ]


def test_a_model_accepts_nearly_all_of_its_own_drafts_and_few_of_another(make_engine: Make, always: None) -> None:
    requests = requests_of(4, prompt=8, tokens=60, presence_penalty=0.3, logit_bias={5: 2.0})
    plain, _ = make_engine()
    expected, shares, steps = run(plain, requests), {}, {}
    for draft in ("base", "other"):
        engine, _ = make_engine(draft)
        assert run(engine, requests) == expected
        drafted, accepted = counts(engine)
        shares[draft], steps[draft] = accepted / drafted, engine.state().num_steps
    assert shares["base"] > 0.95
    assert shares["other"] < 0.2
    assert steps["base"] < 0.4 * plain.state().num_steps


def test_grammars_hold_for_drafts(make_engine: Make, grammar: Grammar, always: None) -> None:
    requests = [NewRequest("0", [5, 6], SamplingParams(max_tokens=24, temperature=0, grammar=grammar))]
    expected = run(make_engine()[0], requests)
    engine, _ = make_engine("base")
    assert run(engine, requests) == expected
    drafted, accepted = counts(engine)
    assert accepted == drafted - 1 > 3, "the last draft ends the answer, and no token follows it"


def test_a_long_prompt_catches_up_over_steps_while_others_draft(
    make_engine: Make, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.execution.draft_model.CATCH_UP", 40)
    engine, _ = make_engine("base", max_model_len=256)
    short, long = requests_of(2, prompt=4, tokens=60, temperature=0.0)
    long.prompt_token_ids[:] = [3 + 13 * j % 370 for j in range(150)]
    expected = run(make_engine(max_model_len=256)[0], [short, long])
    engine.add_request(short)
    for _ in range(3):
        engine.step()
    engine.add_request(long)
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    for output in outputs_until_idle(engine):
        tokens[output.request_id] += output.token_ids
    assert tokens["1"] == expected["1"][0]
    drafted_tokens, accepted = counts(engine)
    assert accepted > 0.9 * drafted_tokens


def test_steps_that_catch_up_are_marked(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.draft_model.CATCH_UP", 16)
    engine, _ = make_engine("base")
    drafter = engine.scheduler.drafter
    assert drafter is not None
    drafter._times.observe(1.0, 1, 0, 1, False)
    seen: list[tuple[int, bool]] = []

    def observe(seconds: float, num_decodes: int, num_drafts: int, num_tokens: int, is_catching_up: bool) -> None:
        seen.append((num_drafts, is_catching_up))

    monkeypatch.setattr(drafter._times, "observe", observe)
    run(engine, requests_of(1, prompt=60, tokens=90))
    assert engine.state().num_steps - len(seen) == 1, "one has the prompt"
    assert seen[:4] == [(0, True), (0, True), (0, True), (4, True)], "four catch up 61 tokens, and the last one drafts"
    assert not any(is_catching_up for _, is_catching_up in seen[4:])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory": 10 * 16 * 1024, "max_model_len": 100},
        {"enable_prefix_caching": False, "max_num_seqs": 2, "preempt_behind": 0, "preempt_after": 0.0},
        {"max_num_batched_tokens": 8},
    ],
    ids=["blocks run out", "streams give way", "narrow steps"],
)
def test_pressure_on_blocks_seats_and_rows_changes_no_answer(
    options: dict[str, Any], make_engine: Make, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    requests = requests_of(9, prompt=33, tokens=40, logprobs=1)
    expected = run(make_engine()[0], requests)
    engine, _ = make_engine("base", **options)
    found = run(engine, requests)
    assert [answer[:2] for answer in found.values()] == [answer[:2] for answer in expected.values()]
    assert counts(engine)[1]
    assert engine.state().num_preemptions or "max_num_batched_tokens" in options


@pytest.mark.parametrize("has_adapter", [False, True])
def test_tenants_share_no_blocks_of_the_draft_model(has_adapter: bool, make_engine: Make, always: None) -> None:
    engine, digests = make_engine("base")
    cache = draft_model(engine).cache
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    digest = digests[0] if has_adapter else None
    for tenant, hits in (("a", 0), ("b", 0), ("a", 48)):
        before = cache.hit_tokens
        run(engine, [NewRequest("x", list(range(3, 60)), params, adapter_digest=digest, tenant_id=tenant)])
        assert cache.hit_tokens - before == hits


def test_the_work_of_drafts_is_charged(make_engine: Make, always: None) -> None:
    served = []
    for draft in (None, "base"):
        engine, _ = make_engine(draft)
        engine.add_request(requests_of(1, prompt=8, tokens=60)[0])
        policy, most = engine.scheduler.policy, 0.0
        while engine.has_work():
            engine.step()
            most = max(most, policy.counter("tenant-0"))  # type: ignore[attr-defined]
        served.append(most)
    assert served[1] > served[0] + 40, "a pass of the own model costs as much as a prompt token"


def test_memory_of_the_draft_model_is_counted(tiny: Path, make_engine: Make) -> None:
    plain, _ = make_engine()
    engine, _ = make_engine("other")
    base, other = (
        kv_bytes_per_token(parse_model_config(read_config(tiny / name)), torch.float32) for name in ("base", "other")
    )
    assert engine.state().num_blocks == (2 << 20) // (16 * (base + other))
    assert plain.state().num_blocks == (2 << 20) // (16 * base)
    assert draft_model(engine).cache.num_blocks == engine.state().num_blocks
    measured, _ = make_engine("other", gpu_memory_utilization=0.9)
    assert measured.state().num_blocks == engine.state().num_blocks
    load = ExpectedLoad(adapters=1, rank=4, prompt_tokens=8, output_tokens=8)
    estimated, alone = (estimate(each.config, "h100", load).memory for each in (engine, plain))
    assert estimated.kv_tokens == 16 * engine.state().num_blocks
    assert estimated.kv_cache == engine.state().num_blocks * 16 * (base + other)
    decoder = draft_model(engine)._runner.decoder  # type: ignore[attr-defined]
    assert estimated.needs.weights - alone.needs.weights == pytest.approx(decoder.weights.num_bytes, rel=0.05)


def test_it_runs_in_graphs(make_engine: Make, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(2, prompt=5, tokens=12)
    expected = run(make_engine(max_model_len=64)[0], requests)
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TorchOps())
    monkeypatch.setattr("engine.build.resolve_graph_sizes", lambda *_: (1, 2))
    engine, _ = make_engine("base", max_model_len=64)
    runner = draft_model(engine)._runner
    replays = []
    graphs = runner.graphs  # type: ignore[attr-defined]
    original = graphs.run
    monkeypatch.setattr(graphs, "run", lambda layout: replays.append(layout) or original(layout))
    assert {key: answer[0] for key, answer in run(engine, requests).items()} == {
        key: answer[0] for key, answer in expected.items()
    }
    assert replays
    assert counts(engine)[1]


def test_a_model_that_cannot_draft_is_refused_before_the_base_model_is_read(
    tiny: Path, make_engine: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(tiny / "base", tmp_path / "base")
    (tmp_path / "base/model.safetensors").write_bytes(b"")
    on_broken_base = engine_maker(tmp_path, request, dtype="float32", device="cpu")

    def refusal(draft: str) -> str:
        with pytest.raises(ConfigError) as raised:
            on_broken_base(speculative_config=SpeculativeConfig("draft_model", 4, model=draft))
        return str(raised.value)

    shutil.copytree(tiny / "other", tmp_path / "wide")
    config = json.loads((tmp_path / "wide/config.json").read_text())
    (tmp_path / "wide/config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    shutil.copytree(tiny / "other", tmp_path / "swapped")
    content = json.loads((tmp_path / "swapped/tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "swapped/tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "empty").mkdir()
    shutil.copy(tiny / "other/config.json", tmp_path / "empty")
    shutil.copytree(tiny / "other", tmp_path / "poisoned")
    tensors = load_file(tmp_path / "poisoned/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "poisoned/model.safetensors")
    for folder, message in (
        ("some/hub-id", "no such folder or file: some/hub-id: expected a local model folder or .gguf file; a hub id"),
        (tmp_path / "nowhere", "no such folder or file: .*/nowhere: expected a local model folder or .gguf file"),
        (tmp_path / "poisoned", r"/model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight: holds NaN"),
        (tmp_path / "wide", r"expected a model of the base model's vocabulary of \d+ tokens, .* has 999"),
        (tmp_path / "swapped", "2 tokens of .* have other texts, the first is"),
        (tmp_path / "empty", "expected .safetensors weights"),
    ):
        assert re.match(f"speculative_config: model: .*{message}", refusal(str(folder)))
    assert refusal(str(tiny / "other")).endswith("base/model.safetensors is damaged or cut off: it is empty")
    with pytest.raises(ConfigError, match="speculative_config: method: expected ngram: a simulated device"):
        make_engine("other", device="simulated:0,0")


def test_a_stream_does_not_write_into_blocks_that_it_had_for_drafts_only(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the draft model catches up, a plan has blocks for drafts and none of them. If the next step is planned
    before these blocks are free, its streams must not count them.
    """
    stream, leaving = requests_of(2, prompt=109, tokens=140)
    leaving = replace(leaving, params=replace(leaving.params, max_tokens=30))  # too short for drafts
    other = NewRequest("other", [*range(40, 80)], SamplingParams(max_tokens=40, ignore_eos=True, seed=3), tenant_id="o")
    plain, _ = make_engine(enable_prefix_caching=False)
    expected = [run(plain, [new])[new.request_id][0] for new in (stream, other)]
    monkeypatch.setattr(StepTimes, "may_draft", lambda _, num_decodes: num_decodes == 2)
    monkeypatch.setattr(StepTimes, "may_catch_up", lambda *_: True)
    monkeypatch.setattr(StepTimes, "pays", lambda *_: True)
    engine, _ = make_engine("base", async_scheduling=True, enable_prefix_caching=False)
    found: dict[str, list[int]] = {"0": [], "1": [], "other": []}

    def step() -> None:
        for output in engine.step():
            found[output.request_id] += output.token_ids

    engine.add_request(leaving)
    while not found["1"]:
        step()
    engine.add_request(stream)
    grown: list[int] = []
    grow = engine.scheduler.cache.grow
    monkeypatch.setattr(engine.scheduler.cache, "grow", lambda r, n: grown.append(n) or grow(r, n))
    while 114 not in grown:
        step()
    assert not counts(engine)[0], "blocks for the 110 tokens and four drafts, but no draft"
    monkeypatch.setattr(StepTimes, "may_draft", lambda *_: False)
    engine.abort("1")
    step()
    engine.add_request(other)
    while engine.has_work():
        step()
    assert found["other"] == expected[1], "another tenant's answer"
    assert found["0"] == expected[0]
