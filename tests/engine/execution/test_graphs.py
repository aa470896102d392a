"""Steps from static buffers against freshly laid out steps; without a GPU, a replay repeats calls or recorded work."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution import graphs as graphs_module
from engine.execution.graphs import Shape, StepGraphs, default_sizes, default_token_sizes
from engine.execution.layout import Layout, make_batch
from engine.execution.transfer import upload
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.ops import Ops
from kernels.platform import platform_of
from testing.engine import outputs_until_idle
from testing.recorded_graph import NothingWaits, RecordingPlatform, UncompiledMode
from testing.tiny import save_adapter, save_model
from wire.errors import ConfigError

SIZES = (1, 2, 4)
# Padding rows hold whatever memory held; no other row reads them, but the interpreter computes them with numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "base", max_model_len=256)
    for i in range(3):
        save_adapter(folder / f"adapter-{i}", rank=(3, 8, 20)[i], seed=i)
    vocab_size = json.loads((folder / "base" / "config.json").read_text())["vocab_size"]
    for i in range(2):
        save_adapter(folder / f"embedding-head-{i}", rank=4 + 4 * i, seed=7 + i, vocab_size=vocab_size)
    return folder


Make = Callable[..., tuple[Engine, list[str]]]


@pytest.fixture
def make_engine(model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a factory of CPU engines whose steps replay, with `sizes` of decodes, and three adapter digests."""

    def make(ops: type[Ops], sizes: tuple[int, ...] = SIZES, **options: Any) -> tuple[Engine, list[str]]:
        monkeypatch.setattr("engine.build.pick_ops", lambda *_: ops())
        monkeypatch.setattr("engine.build.resolve_graph_sizes", lambda *_: sizes)
        host = HostCache(None, BaseShape.from_config_dir(model / "base"), 1 << 20, torch.float32)
        request.addfinalizer(host.close)
        options = {
            "dtype": "float32", "device": "cpu", "max_lora_rank": 24, "adapter_memory": 8 << 20, "max_num_seqs": 4,
            "kv_cache_memory": 1 << 20, "max_num_batched_tokens": 64, "max_model_len": 128, **options,
        }  # fmt: skip
        engine = Engine(EngineConfig(model=str(model / "base"), **options), host)
        request.addfinalizer(engine.close)
        return engine, [host.add_path(model / f"adapter-{i}") for i in range(3)]

    return make


def run(engine: Engine, digests: list[str], tokens: int = 6, requests: int = 6) -> list[list[int]]:
    """Run requests of three adapters and the base model, some greedy, one with LoRA from first to last token."""
    said: dict[str, list[int]] = {}
    for i in range(requests):
        adapter = None if i % 4 == 3 else digests[i % 4]
        params = SamplingParams(max_tokens=tokens + i % 3, temperature=i % 2, seed=i, ignore_eos=True)
        engine.add_request(NewRequest(str(i), [5 + i, 9, 30 + i][: 1 + i % 3], params, adapter_digest=adapter))
    for output in outputs_until_idle(engine):
        assert output.error is None
        said.setdefault(output.request_id, []).extend(output.token_ids)
    return [said[str(i)] for i in range(requests)]


def load(engine: Engine, digests: list[str]) -> None:
    """Load the adapters to the device, so that the content of a step does not depend on their arrival."""
    for digest in digests:
        engine.add_request(NewRequest(digest, [2], SamplingParams(max_tokens=1), adapter_digest=digest))
    list(outputs_until_idle(engine))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list that receives the logits of every step served by a graph."""
    found: list[Tensor] = []
    original = StepGraphs.run

    def spy(self: StepGraphs, *args: Any) -> Tensor | None:
        logits = original(self, *args)
        if logits is not None:
            found.append(logits.clone())
        return logits

    monkeypatch.setattr(StepGraphs, "run", spy)
    return found


@pytest.mark.parametrize(
    ("ops", "tokens", "requests"), [(TorchOps, 12, 9), pytest.param(TritonOps, 2, 4, marks=pytest.mark.heavy)]
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_replays_answer_as_eager_steps(
    ops: type[Ops], tokens: int, requests: int, async_scheduling: bool, make_engine: Make, replayed: list[Tensor]
) -> None:
    expected = run(*make_engine(TorchOps, sizes=()), tokens, requests)
    assert not replayed
    assert run(*make_engine(ops, async_scheduling=async_scheduling), tokens, requests) == expected
    assert replayed


@pytest.mark.heavy
def test_adapters_swapped_between_replays_change_the_answers_as_eagerly(
    make_engine: Make, replayed: list[Tensor]
) -> None:
    pool = make_engine(TorchOps, sizes=())[0].adapters
    room_for_one = pool.page_bytes * pool.max_pages
    eager, digests = make_engine(TorchOps, sizes=())
    engine, _ = make_engine(TritonOps, adapter_memory=room_for_one, async_scheduling=True)
    for digest in [*digests, digests[0]]:
        for each in (eager, engine):
            params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            each.add_request(NewRequest("x", [7, 8], params, adapter_digest=digest))
        tokens: list[list[int]] = [[], []]
        for own, each in zip(tokens, (eager, engine), strict=True):
            while each.has_work():
                own += [token for output in each.step() for token in output.token_ids]
        assert tokens[0] == tokens[1]
    assert engine.state().num_adapter_evictions >= 3
    assert replayed


@pytest.mark.gpu
@pytest.mark.parametrize("lora_dtype", ["auto", "fp8_e4m3"])
def test_captured_graphs_answer_as_eager_steps_while_adapters_take_each_others_pages(
    lora_dtype: str, model: Path, replayed: list[Tensor], request: pytest.FixtureRequest
) -> None:
    said = []
    for options in ({"enforce_eager": True, "async_scheduling": False}, {"cuda_graph_sizes": SIZES}):
        host = HostCache(None, BaseShape.from_config_dir(model / "base"), 1 << 20, torch.float32)
        request.addfinalizer(host.close)
        config: dict[str, Any] = {
            "dtype": "float32", "device": "cuda", "max_lora_rank": 24, "max_num_seqs": 4, "kv_cache_memory": 1 << 20,
            "max_num_batched_tokens": 64, "max_model_len": 128, "lora_dtype": lora_dtype, **options,
        }  # fmt: skip
        room_for_one = 200 << 10 if lora_dtype == "auto" else 52 << 10
        engine = Engine(EngineConfig(model=str(model / "base"), adapter_memory=room_for_one, **config), host)
        request.addfinalizer(engine.close)
        assert engine.adapters.num_pages < 2 * engine.adapters.max_pages
        digests = [host.add_path(model / f"adapter-{i}") for i in range(3)]
        said.append([run(engine, digests) for _ in range(3)])
        assert engine.state().num_adapter_evictions >= 2
    assert said[0] == said[1]
    assert replayed


@pytest.mark.heavy
def test_what_is_left_in_the_buffers_is_never_read(
    make_engine: Make, replayed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, digests = make_engine(TritonOps, sizes=(4,))
    load(engine, digests[:2])
    replayed.clear()
    clean = run(engine, digests, 3, requests=2), list(replayed)
    engine, digests = make_engine(TritonOps, sizes=(4,))
    load(engine, digests[:2])
    replayed.clear()
    poison = engine.state().num_blocks - 1
    for kv in engine.runner.decoder.kv:
        kv.k[poison], kv.v[poison] = torch.nan, torch.nan
    graphs = engine.runner.graphs
    assert graphs is not None
    original = graphs.run

    def dirty(layout: Layout) -> Tensor | None:
        # Every block that no request of the step has is another's, and so is what an earlier replay left.
        for row, seat in enumerate(layout.seats):
            graphs._tables[seat, -(-int(layout.firsts[row] + layout.counts[row]) // 16) :] = poison
        others = sorted(set(range(len(graphs._tables))) - set(layout.seats.tolist()))
        graphs._tables[others] = poison
        graphs._hidden.fill_(torch.nan)
        graphs._inputs.fill_(torch.nan)
        for fields in graphs._fields.values():
            fields.fill_(3)
        return original(layout)

    monkeypatch.setattr(graphs, "run", dirty)
    assert (run(engine, digests, 3, requests=2), len(replayed)) == (clean[0], len(clean[1]))
    assert all(torch.equal(a, b) for a, b in zip(replayed, clean[1], strict=True)), "not the same bit for bit"


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Shape, bool]]:
    """Return a counter of the replays of each graph: its sizes, and whether it has LoRA."""
    found: Counter[tuple[Shape, bool]] = Counter()
    original = StepGraphs.__init__

    def build(self: StepGraphs, *args: Any) -> None:
        original(self, *args)
        for key, replay in self._replays.items():
            self._replays[key] = partial(count, key, replay)

    def count(key: tuple[Shape, bool], replay: Callable[[], Tensor]) -> Tensor:
        found[key] += 1
        with _disable_current_modes():
            return replay()

    monkeypatch.setattr(StepGraphs, "__init__", build)
    return found


def compare_with_eager(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, bool, bool]]:
    """Compare every replay's logits, keys and values with those of torch's ops on a freshly laid out batch. Return a
    set that receives the kinds of the steps: whether they have decodes, prompts, and adapters.
    """
    runner, plain, kinds = engine.runner, TorchOps(), set()
    assert runner.graphs is not None
    replay = runner.graphs.run

    def compare(layout: Layout) -> Tensor | None:
        batch = make_batch(layout, 16, runner._last_tokens, engine.adapters)
        logits = replay(layout)
        assert logits is not None
        decoder, ops = runner.decoder, runner.decoder.ops
        written = [cache.clone() for kv in decoder.kv for cache in (kv.k, kv.v)]
        decoder.ops = plain
        torch.testing.assert_close(logits, decoder.forward_by_ops(batch), atol=1e-4, rtol=1e-4)
        decoder.ops = ops
        expected = [cache for kv in decoder.kv for cache in (kv.k, kv.v)]
        torch.testing.assert_close(written, expected, atol=1e-4, rtol=1e-4)
        decodes = int((layout.counts == 1).sum())
        kinds.add((decodes > 0, decodes < len(layout.counts), bool(layout.adapter_slots)))
        return logits

    monkeypatch.setattr(runner.graphs, "run", compare)
    return kinds


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_recorded_mixed_steps_equal_eager_steps(
    seed: int, make_engine: Make, replays: Counter[tuple[Shape, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decodes, adapters, prefix hits and an activated LoRA in fuzzed mixes: logits, keys and values
    of a step are those of torch's ops on a freshly laid out batch, although a replay runs no Python of the step.
    Every graph is replayed: two numbers of decodes, two buckets of tokens, with LoRA and without.
    """
    monkeypatch.setattr(graphs_module, "platform_of", lambda device: RecordingPlatform(platform_of(device)))
    monkeypatch.setattr("engine.build.default_token_sizes", lambda _: (12, 40))
    engine, digests = make_engine(TritonOps, max_num_batched_tokens=40, max_num_seqs=3, sizes=(1, 3))
    kinds = compare_with_eager(engine, monkeypatch)
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    def add(i: int, digest: str | None, lengths: tuple[int, ...]) -> None:
        prompt = [2 + draw(50) for _ in range(lengths[draw(len(lengths))])]
        if i % 3 == 2:
            prompt = [7] * 20 + prompt  # a prefix that others have had
        params = SamplingParams(max_tokens=1 + draw(3), temperature=draw(2), seed=i, ignore_eos=True)
        start = draw(len(prompt)) if digest is not None and draw(3) == 0 else 0
        engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=digest, adapter_start=start))

    for i in range(6):
        add(i, [*digests, None][draw(4)], (1, 5, 30, 50))
        for _ in range(draw(3)):
            engine.step()
    list(outputs_until_idle(engine))
    # Each graph alone, and the base model's prompts beside its decodes, which the draws may have left out.
    for digest in (None, digests[0]):
        for lengths in ([6], [30], [3, 3], [30, 2]):
            for i, length in enumerate(lengths):
                params = SamplingParams(max_tokens=len(lengths) + 1 - i, temperature=0, ignore_eos=True)
                engine.add_request(NewRequest(f"{i}", [9] * length, params, adapter_digest=digest))
                engine.step()
            list(outputs_until_idle(engine))
    assert engine.runner.graphs is not None
    assert {key for key, count in replays.items() if count} == set(engine.runner.graphs._replays)
    mixes = {(True, False), (True, True), (False, True)}
    assert {(*mix, has_lora) for mix in mixes for has_lora in (False, True)} <= kinds


@pytest.mark.parametrize("ops", [TorchOps, pytest.param(TritonOps, marks=pytest.mark.heavy)])
def test_steps_with_lora_on_the_embedding_and_the_head_replay_and_wait_for_nothing(
    ops: type[Ops],
    make_engine: Make,
    model: Path,
    replays: Counter[tuple[Shape, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, digests = make_engine(ops, async_scheduling=True)
    host = engine.adapters._host
    embedding_head = [host.add_path(model / f"embedding-head-{i}") for i in range(2)]
    load(engine, [*embedding_head, digests[0]])
    replays.clear()
    steps, run_graph, rows = 0, StepGraphs.run, Counter[str]()

    def watched(self: StepGraphs, layout: Layout) -> Tensor | None:
        nonlocal steps
        steps += 1
        adapters = set(layout.adapters.tolist())
        rows["embeddings"] += bool(adapters & engine.adapters.embeddings.keys())
        rows["others"] += bool(adapters - engine.adapters.embeddings.keys())
        with NothingWaits():
            return run_graph(self, layout)

    monkeypatch.setattr(StepGraphs, "run", watched)
    compare_with_eager(engine, monkeypatch)
    for i, digest in enumerate([embedding_head[0], embedding_head[1], digests[0], None]):
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        engine.add_request(NewRequest(str(i), [3 + i, 9, 30][: 1 + i % 3], params, adapter_digest=digest))
        engine.step()
    list(outputs_until_idle(engine))
    assert steps == sum(replays.values()) > 3, "a step left its graph"
    assert min(rows.values()) > 2


def test_a_step_uploads_a_few_numbers_and_each_new_block_once(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine(TorchOps, sizes=(3,))
    sizes: list[int] = []

    def counted(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        sizes.append(sum(array.nbytes for array in arrays))
        return upload(device, arrays)

    monkeypatch.setattr(graphs_module, "upload", counted)
    for i in range(3):
        engine.add_request(NewRequest(str(i), [i] * 60, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
    while not all(request.is_decoding for request in engine.scheduler.requests.values()):
        engine.step()
    sizes.clear()
    for _ in range(16):
        engine.step()
    # All are int64: two for each token, six for each request and one end; three for each request's new block.
    assert sum(sizes) == 8 * (16 * (2 * 3 + 6 * (3 + 1)) + 3 * 3)


def test_graphs_keep_no_logits(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation inside of a graph makes a tensor with a column for each token of the vocabulary."""
    shapes: list[tuple[int, ...]] = []

    class Keep(UncompiledMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            shapes.extend(tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    def capture(self: Any, step: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], Tensor], Any]:
        with Keep():
            result = step()
        return lambda: result, pool

    monkeypatch.setattr("kernels.cpu.platform.CpuPlatform.capture", capture)
    engine, _ = make_engine(TorchOps)
    vocab_size = engine.model_config.vocab_size
    assert any(engine.model_config.hidden_size in shape for shape in shapes)
    assert not any(vocab_size in shape for shape in shapes)


def test_steps_larger_than_every_graph_run_eagerly(
    make_engine: Make, replayed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.default_token_sizes", lambda _: (3,))
    engine, digests = make_engine(TorchOps, sizes=(1, 2))
    expected = run(*make_engine(TorchOps, sizes=()))
    assert run(engine, digests) == expected
    assert replayed
    assert engine.state().num_steps > len(replayed)


def test_sizes_go_up_to_the_largest_batch_and_need_a_cuda_device(model: Path) -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_sizes(128) == (1, 2, 4, *range(8, 64, 8), 64, 80, 96, 112, 128)
    assert default_token_sizes(48) == (48,)
    assert default_token_sizes(640) == (64, 96, 128, 192, 256, 384, 512, 640)
    with pytest.raises(ConfigError, match="cuda_graph_sizes: expected numbers from 1 to max_num_seqs"):
        EngineConfig(model="m", cuda_graph_sizes=(0, 65), max_num_seqs=64, max_num_batched_tokens=64)
    host = HostCache(None, BaseShape.from_config_dir(model / "base"), 1 << 20, torch.float32)
    with pytest.raises(ConfigError, match="cuda_graph_sizes: expected none"):
        Engine(EngineConfig(model=str(model / "base"), device="cpu", cuda_graph_sizes=(1,)), host)
    host.close()
