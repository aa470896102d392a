"""Speculative decoding away from the native step: GPU kernels in graphs, the simulated device, a core in a process."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution import runner as runner_module
from engine.execution.graphs import StepGraphs
from engine.execution.layout import Layout
from engine.execution.sampling_tables import TokenTable
from engine.scheduling.request import NewRequest, SamplingParams
from engine.scheduling.token_rules import AllowedTokens
from engine.speculative_config import SpeculativeConfig
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.ops import Ops
from kernels.platform import platform_of
from testing.engine import Client, RunningServer
from testing.speculation import run
from testing.tiny import save_adapter, save_model

NGRAM = SpeculativeConfig("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=3)
Make = Callable[..., tuple[Engine, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "base", max_model_len=256)
    save_adapter(folder / "adapter", rank=5)
    return folder


@pytest.fixture
def make_engine(tiny: Path, request: pytest.FixtureRequest) -> Make:
    """Return a factory of engines and the digest of their adapter."""

    def make(**options: Any) -> tuple[Engine, str]:
        host = HostCache(None, BaseShape.from_config_dir(tiny / "base"), 1 << 20, torch.float32)
        request.addfinalizer(host.close)
        options = {
            "dtype": "float32", "device": "cpu", "max_lora_rank": 8, "adapter_memory": 4 << 20, "max_num_seqs": 8,
            "kv_cache_memory": 1 << 20, "max_num_batched_tokens": 64, "max_model_len": 128, **options,
        }  # fmt: skip
        engine = Engine(EngineConfig(model=str(tiny / "base"), **options), host)
        request.addfinalizer(engine.close)
        return engine, host.add_path(tiny / "adapter")

    return make


class DevicePlatform:
    """The CPU's platform as the runner sees a GPU's: tokens are counted in a table."""

    is_host = False

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


# Padding rows hold whatever memory held; no other row reads them, but the interpreter computes them with numpy.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("ops", "max_tokens"), [(TorchOps, 20), pytest.param(TritonOps, 3, marks=pytest.mark.heavy)])
def test_steps_of_graphs_answer_as_without(
    ops: type[Ops], max_tokens: int, make_engine: Make, guesses: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts run in the graphs of steps with prompts, and penalties see each token before the next."""
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TorchOps())
    monkeypatch.setattr("engine.build.resolve_graph_sizes", lambda *_: (2,))
    monkeypatch.setattr("engine.build.default_token_sizes", lambda _: (8,))
    replayed, original = [], StepGraphs.run

    def spy(graphs: StepGraphs, layout: Layout) -> Any:
        logits = original(graphs, layout)
        if logits is not None and any(request.drafts for request in layout.sampled):
            replayed.append(layout)
        return logits

    monkeypatch.setattr(StepGraphs, "run", spy)
    plain, digest = make_engine()
    penalties: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 9.0}
    requests = [
        NewRequest(
            str(i),
            [5, 9, 30 + i],
            SamplingParams(max_tokens=max_tokens, temperature=float(i), seed=i, ignore_eos=True, **penalties),
            adapter_digest=[digest, None][i],
        )
        for i in range(2)
    ]
    expected = run(plain, requests)
    guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: ops())
    monkeypatch.setattr(runner_module, "platform_of", lambda device: DevicePlatform(platform_of(device)))
    drafting, _ = make_engine(speculative_config=NGRAM)
    assert isinstance(drafting.runner._sampling.tokens, TokenTable)  # type: ignore[attr-defined]
    assert run(drafting, requests) == expected
    assert replayed
    assert sum(count.accepted for count in drafting.state().drafts) > 0
    unpenalised = [NewRequest("0", [5, 9, 30], SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))]
    guesses["0"] = []
    assert run(plain, unpenalised)["0"][0] != expected["0"][0], "penalties change the answer"


def test_the_simulated_device_answers_as_without(make_engine: Make, guesses: dict[str, list[int]]) -> None:
    plain, digest = make_engine(device="simulated:0,0", dtype="auto")
    requests = [
        NewRequest(
            str(i),
            [3 + (7 * i + j) % 370 for j in range(1 + 9 * i)],
            SamplingParams(
                max_tokens=40, temperature=i % 2, seed=i, ignore_eos=True, logprobs=[None, 1][i // 3],
                min_tokens=[0, 30][i % 2], allowed=AllowedTokens(range(9, 99)) if i == 4 else None,
            ),
            adapter_digest=[digest, None][i % 2],
        )
        for i in range(6)
    ]  # fmt: skip
    expected = run(plain, requests)
    guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
    drafting, _ = make_engine(device="simulated:0,0", dtype="auto", speculative_config=NGRAM)
    assert run(drafting, requests) == expected
    assert all(0 < count.accepted < count.drafted for count in drafting.state().drafts)
    assert drafting.state().num_steps < plain.state().num_steps


async def test_a_core_in_a_process_drafts_and_answers_as_without(
    starts_servers: None, tiny: Path, session: aiohttp.ClientSession
) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "a b a b a b a b", "max_tokens": 100, "ignore_eos": True},
        {"prompt": "a b a b", "max_tokens": 60, "n": 2, "seed": 5, "temperature": 1.0, "logprobs": 1},
    ]
    answers = []
    for config in ({"engine_core_mode": "thread"}, {"engine_core_mode": "process", "speculative_config": NGRAM}):
        server = RunningServer(tiny / "base", config=config)
        try:
            client = Client(session, server.url)
            answers.append([(await client.complete(**body))["choices"] for body in bodies])
            if "speculative_config" in config:
                await drafts_are_counted(session, client, server.url, bodies[0])
        finally:
            server.close()
    assert answers[0] == answers[1]


async def drafts_are_counted(session: aiohttp.ClientSession, client: Client, url: str, body: dict[str, Any]) -> None:
    """Repeat a request until its drafts pay, and wait until the process has reported them."""
    deadline = time.monotonic() + 60
    while True:
        await client.complete(**body)
        async with session.get(url + "/metrics") as response:
            text = await response.text()
        accepted = [line for line in text.splitlines() if line.startswith("loraplex_engine_draft_tokens_accepted")]
        if accepted and float(accepted[0].split()[-1]) > 0:
            return
        assert time.monotonic() < deadline, text
