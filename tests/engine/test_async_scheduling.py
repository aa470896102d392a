"""Asynchronous scheduling changes no result: each step is read before, or after, the launch of the next."""

from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from engine.structured.compiler import GrammarCompiler
from testing.engine import outputs_until_idle, whole_prompt_logprobs
from testing.tiny_engines import Make, engine_maker, save_base_and_adapters
from wire.errors import BadRequest
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, fp32, tokens

# Every sampling method, and every way to end.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_k": 7, "temperature": 1.5},
    {"seed": 3, "top_p": 0.8, "min_p": 0.01},
    {"seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "temperature": 3.0},
    {"seed": 5, "logit_bias": {7: 4.0, 9: -20.0}, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
    {"seed": 6, "stop_token_ids": tuple(range(0, 380, 9)), "temperature": 2.0},
    {"seed": 7, "stop_token_ids": tuple(range(0, 380, 3)), "temperature": 2.0, "min_tokens": 9},
    {"seed": 8, "max_tokens": 1},
    {"seed": 9, "allowed": AllowedTokens(range(5, 30)), "bad_words": BannedWords([[5], [6, 7], [8, 9, 10]])},
    {},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 256)


@pytest.fixture
def make_engine(model: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(
        model,
        request,
        dtype="float32",
        device="cpu",
        max_lora_rank=8,
        adapter_memory=4 << 20,
        max_num_seqs=6,
        kv_cache_memory=64 * BLOCK_BYTES,
        max_num_batched_tokens=32,
        preempt_behind=10**9,
        preempt_after=1e9,
    )


def add(engine: Engine, digests: list[str], i: int, **more: Any) -> None:
    params = {"max_tokens": 40, "ignore_eos": True, **PARAMS[i % len(PARAMS)], **more}
    prompt = [3 + (7 * i + j) % 370 for j in range(1 + 11 * (i % 5))]
    adapter = None if i % 4 == 3 else digests[i % 4]
    engine.add_request(
        NewRequest(str(i), prompt, SamplingParams(**params), adapter_digest=adapter, tenant_id=f"tenant-{i % 3}")
    )


def join(said: dict[str, list[RequestOutput]]) -> dict[str, Any]:
    """Return each request's tokens, end and logprobs, however they were split into steps."""
    return {
        request_id: (
            [token for o in outputs for token in o.token_ids],
            outputs[-1].finish_reason,
            outputs[-1].num_output_tokens,
            [entry for o in outputs for entry in o.logprobs or []],
            whole_prompt_logprobs(outputs),
        )
        for request_id, outputs in said.items()
    }


def run(engine: Engine, digests: list[str], n: int = 2 * len(PARAMS), **more: Any) -> dict[str, Any]:
    said: dict[str, list[RequestOutput]] = {}
    for i in range(n):
        add(engine, digests, i, **more)
    for output in outputs_until_idle(engine):
        assert output.error is None
        said.setdefault(output.request_id, []).append(output)
    assert all_is_free(engine)
    return dict(sorted(join(said).items()))


def all_is_free(engine: Engine) -> bool:
    state = engine.state()
    free = state.num_free_blocks == state.num_blocks and state.num_running == state.num_waiting == 0
    return free and all(engine.unload_adapter(digest) for digest in state.resident_adapters)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Return the expected answers, equal for every engine here; the first test that needs them computes them."""
    return {}


def twin(expected: dict[str, Any], make_engine: Make) -> dict[str, Any]:
    if not expected:
        expected.update(run(*make_engine(async_scheduling=False)))
    return expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_memory": 9 * BLOCK_BYTES, "max_model_len": 100},
        {"adapter_memory": "one at a time"},
        {"enable_chunked_prefill": False},
        {"max_num_seqs": 2, "scheduler": "fcfs"},
        {"max_num_seqs": 2, "preempt_behind": 0, "preempt_after": 0.0},
    ],
    ids=["plain", "preempted", "swapped", "unchunked", "two seats", "gave way"],
)
def test_every_parameter_answers_as_without(
    options: dict[str, Any], expected: dict[str, Any], make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Admission expects no further blocks, so that they run out.
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    if "adapter_memory" in options:
        pool = make_engine()[0].adapters
        options = {"adapter_memory": pool.page_bytes * pool.max_pages}
    engine, digests = make_engine(async_scheduling=True, **options)
    assert run(engine, digests) == twin(expected, make_engine)
    state = engine.state()
    if "adapter_memory" in options:  # requests may also be preempted for the only page
        assert engine.adapters.num_pages == 1
        assert state.num_adapter_loads >= len(digests)
    else:
        if "kv_cache_memory" in options or "preempt_after" in options:
            assert state.num_preemptions
        elif "scheduler" in options:  # fair share may preempt for light tenants
            assert not state.num_preemptions
        assert state.num_adapter_evictions == len(digests), "those unloaded at the end"


def test_an_abort_takes_effect_between_two_steps_and_touches_nobody_else(
    expected: dict[str, Any], make_engine: Make
) -> None:
    engine, digests = make_engine(async_scheduling=True)
    said: dict[str, list[RequestOutput]] = {}
    aborted = {"1": 1, "4": 5, "8": 2, "12": 30}
    for i in range(2 * len(PARAMS)):
        add(engine, digests, i)
    for output in outputs_until_idle(engine):
        said.setdefault(output.request_id, []).append(output)
        if output.num_output_tokens == aborted.get(output.request_id):
            engine.abort(output.request_id)
    assert all_is_free(engine)
    whole, cut = twin(expected, make_engine), join(said)
    for request_id, answer in cut.items():
        if request_id in aborted:
            assert answer[:2] == (whole[request_id][0][: aborted[request_id]], None)
        else:
            assert answer == whole[request_id]
    assert cut.keys() == whole.keys()


def test_an_id_may_be_used_again_while_its_last_token_is_in_flight(make_engine: Make) -> None:
    engine, digests = make_engine(async_scheduling=True)
    add(engine, digests, 0)
    while not engine.step():
        pass
    with pytest.raises(BadRequest, match="already in flight"):
        add(engine, digests, 0)
    engine.abort("0")
    add(engine, digests, 0)
    tokens = [token for output in outputs_until_idle(engine) for token in output.token_ids]
    plain, digests = make_engine(async_scheduling=False)
    add(plain, digests, 0)
    again = [token for output in outputs_until_idle(plain) for token in output.token_ids]
    assert tokens == again


def test_grammars_follow_the_tokens_before_them(model: Path, make_engine: Make) -> None:
    tokenizer = Tokenizer.from_dir(model / "base")
    texts = []
    for async_scheduling in (False, True):
        engine, digests = make_engine(async_scheduling=async_scheduling)
        compiler = GrammarCompiler(tokenizer.to_json, engine.model_config.vocab_size, engine.eos_token_ids)
        grammar = compiler.compile(GrammarSpec("regex", "(ab|cd){3,9}z"))
        bound = {"grammar": grammar, "ignore_eos": False, "stop_token_ids": (), "min_tokens": 0, "logit_bias": {}}
        texts.append(run(engine, digests, 8, **bound))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_long_prompts_log_probabilities_leave_step_by_step(make_engine: Make, async_scheduling: bool) -> None:
    """Together they would stall the step loop, which encodes them, and the front, which decodes them."""

    def outputs(max_tokens_a_step: int) -> list[RequestOutput]:
        engine, _ = make_engine(max_num_batched_tokens=max_tokens_a_step, async_scheduling=async_scheduling)
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
        engine.add_request(NewRequest("a", list(range(3, 203)), params))
        said: list[RequestOutput] = []
        while engine.has_work():
            said += engine.step().whole  # what the front gets; a plain request's output has its token only
        assert [output.num_output_tokens for output in said if not output.token_ids] == [0] * (len(said) - 2)
        return said

    parts, whole = (
        [output.prompt_logprobs for output in outputs(tokens) if output.prompt_logprobs is not None]
        for tokens in (32, 256)
    )
    assert len(whole) == 1
    assert len(whole[0]) == 200
    assert [entry for part in parts for entry in part] == whole[0]
    assert max(map(len, parts)) <= 33
