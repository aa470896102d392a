"""Steps before an engine serves: they meet every variant of a kernel that requests meet later.

The launches of the real Triton ops are recorded and not run, so their results are zeros; nothing needs a GPU.
"""

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.warmup import MEASURED_CAPTURES, Measured, WarmUp
from engine.progress import CAPTURING, WARMING
from engine.scheduling.request import NewRequest, SamplingParams
from engine.scheduling.token_rules import AllowedTokens
from kernels.gpu.ops import TritonOps
from testing.card import Card
from testing.tiny import save_base_and_adapters

MIB = 1 << 20
RANKS = (3, 8, 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), RANKS)


def variant(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what Triton compiles a variant of a kernel for.

    A tensor counts as aligned if its storage's start would make it so, as on a GPU.
    """
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    any_value = function.kwargs.get("do_not_specialize") or ()
    any_address = function.kwargs.get("do_not_specialize_on_alignment") or ()
    annotations = inspect.get_annotations(function.fn)
    key: list[Any] = [function.fn.__name__]
    for name, value in given.items():
        is_constant = "constexpr" in str(annotations.get(name)) or name not in function.arg_names
        if isinstance(value, Tensor):
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0
            key.append((name, value.dtype, None if name in any_address else is_aligned))
        elif is_constant or value is None:
            key.append((name, value))
        elif isinstance(value, int):
            key.append((name, None if name in any_value else (value == 1, value % 16 == 0)))
        else:
            key.append((name, type(value)))
    return tuple(key)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Return a set that receives the variant of every launch."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[tuple[Any, ...]] = set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.add(variant(self, args, kwargs))

    monkeypatch.setattr(InterpretedFunction, "run", record)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    return found


@pytest.fixture
def make_engine(
    model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Engine, list[str], list[tuple[str, int, int]]]]:
    def make(**options: Any) -> tuple[Engine, list[str], list[tuple[str, int, int]]]:
        Card(256 * MIB).install(monkeypatch, TritonOps)
        host = HostCache(None, BaseShape.from_config_dir(model / "base"), 1 << 20, torch.float32)
        request.addfinalizer(host.close)
        options = {
            "dtype": "float32", "device": "cpu", "max_lora_rank": 24, "adapter_memory": 8 << 20, "max_num_seqs": 20,
            "max_num_batched_tokens": 512, **options,
        }  # fmt: skip
        said: list[tuple[str, int, int]] = []
        engine = Engine(EngineConfig(model=str(model / "base"), **options), host, lambda *phase: said.append(phase))
        request.addfinalizer(engine.close)
        return engine, [host.add_path(model / f"adapter-{i}") for i in range(len(RANKS))], said

    return make


def fuzz(engine: Engine, digests: list[str], seed: int, steps: int) -> None:
    """Serve random requests: lengths, adapters, sampling, and arrivals beside others."""
    rng = random.Random(seed)
    for step in range(steps):
        if rng.random() < 0.3:
            for i in range(rng.choice((1, 1, 2, 7))):
                params = rng.choice(
                    (
                        SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40), ignore_eos=True),
                        SamplingParams(temperature=0.7, top_p=0.9, top_k=rng.choice((0, 5)), max_tokens=9, seed=1),
                        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=5),
                        SamplingParams(logit_bias={3: 2.0}, min_tokens=2, max_tokens=6, stop_token_ids=(9,)),
                        SamplingParams(allowed=AllowedTokens([4, 5]), max_tokens=3),
                        SamplingParams(logprobs=3, prompt_logprobs=rng.choice((None, 2)), max_tokens=4),
                    )
                )
                prompt = [rng.randrange(50) for _ in range(rng.choice((1, 2, 3, 15, 16, 17, 64, 200)))]
                adapter = rng.choice([None, *digests])
                engine.add_request(NewRequest(f"{step}-{i}", prompt, params, adapter_digest=adapter))
        for output in engine.step():
            assert output.error is None


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_no_request_meets_a_kernel_that_was_not_warmed_up(
    options: dict[str, Any], make_engine: Callable[..., Any], launched: set[tuple[Any, ...]]
) -> None:
    engine, digests, said = make_engine(**options)
    warmed = set(launched)
    assert len(warmed) > 10
    [*_, (phase, done, total)] = said
    assert (phase, done) == (WARMING, total)
    launched.clear()
    fuzz(engine, digests, seed=1, steps=250)
    assert len(launched) > 10
    assert not launched - warmed


@pytest.mark.usefixtures("launched")
def test_graphs_count_by_the_first_captures(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture takes 3 MiB and the first 20 MiB more; without a capture nothing grows."""
    held = {"captures": 0}
    real = Card.capture

    def capture(self: Any, step: Any, pool: Any) -> Any:
        held["captures"] += 1
        return real(self, step, pool)

    monkeypatch.setattr("kernels.cpu.platform.CpuPlatform.capture", capture)

    def peak() -> int:
        return 10 * MIB + (20 * MIB if held["captures"] else 0) + 3 * MIB * held["captures"]

    monkeypatch.setattr(Card, "watch_peak", lambda _: peak)
    measured: list[Measured] = []
    measure = WarmUp.measure

    def keep(self: WarmUp, *given: Any) -> Measured:
        measured.append(measure(self, *given))
        assert held["captures"] == MEASURED_CAPTURES
        return measured[-1]

    monkeypatch.setattr(WarmUp, "measure", keep)
    _, _, said = make_engine()
    captures = max(total for phase, _, total in said if phase == CAPTURING)
    assert held["captures"] == MEASURED_CAPTURES + captures
    assert measured == [Measured(10 * MIB, 0, 20 * MIB + 3 * MIB * captures)]
