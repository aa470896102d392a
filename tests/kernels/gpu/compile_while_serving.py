"""Engine on a GPU's path without a GPU: every launch compiles for an H200 and runs nothing; run by test_compiles.py.

Tensors are in host memory and hold zeros or whatever they hold, and every sampled token is 0. The Python around the
kernels is the real one: graphs, routing, sampling. Prints a JSON line with the kernels compiled before the engine was
ready, and those compiled while it served fuzzed requests.
"""

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

import engine.build
import engine.execution.graphs
import engine.execution.masks
import engine.execution.runner
import engine.execution.sampler
import engine.execution.transfer
from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.token_rules import AllowedTokens
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.gpu import attention_work, paged_attention, segmented_lora
from kernels.gpu.ops import TritonOps
from testing.card import Card
from testing.tiny import save_adapter, save_model
from tests.kernels.gpu.compile_for_hopper import Driver

launch = JITFunction.run
compiled: Counter[str] = Counter()
known: set[tuple[str, str]] = set()


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    if (self.__name__, kernel.hash) not in known:
        known.add((self.__name__, kernel.hash))
        compiled[self.__name__] += 1
    return kernel


class ZeroOps(TritonOps):
    """Triton's ops, whose sampled tokens are in the vocabulary although no kernel runs."""

    def sample(self, logits: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(super().sample(logits, *parameters))


def make_engine(folder: Path) -> tuple[Engine, list[str]]:
    engine.build.pick_ops = lambda *_: ZeroOps()  # type: ignore[assignment]
    # A capture runs nothing here, so the warm-up must compile all.
    platform = Card(64 << 30)
    modules = (engine.execution.graphs, engine.execution.masks, engine.execution.runner, engine.execution.sampler)
    for module in (engine.build, *modules):
        module.platform_of = lambda device: platform  # type: ignore[attr-defined]
    engine.execution.transfer.platform_of = lambda device: platform  # type: ignore[attr-defined]
    engine.build.resolve_graph_sizes = lambda *_: (1, 2, 4)  # type: ignore[assignment]
    engine.execution.sampler.mark_not_finite = lambda tokens, logits: tokens
    engine.execution.runner.mark_not_finite = lambda tokens, logits: tokens  # type: ignore[attr-defined]
    save_model(folder / "base", max_model_len=2048)
    host = HostCache(None, BaseShape.from_config_dir(folder / "base"), 1 << 24, torch.float32)
    for i in range(3):
        save_adapter(folder / f"adapter-{i}", rank=(3, 8, 20)[i], seed=i)
    made = Engine(
        EngineConfig(
            model=str(folder / "base"),
            dtype="float32",
            device="cpu",
            max_lora_rank=24,
            adapter_memory=8 << 20,
            kv_cache_memory=8 << 20,
            max_num_seqs=6,
            max_num_batched_tokens=512,
            async_scheduling=True,
        ),
        host,
    )
    return made, [host.add_path(folder / f"adapter-{i}") for i in range(3)]


def serve(served: Engine, digests: list[str], seed: int) -> int:
    """Serve fuzzed requests and return the number of steps."""
    draw = random.Random(seed)
    for i in range(24):
        params: dict[str, Any] = {"temperature": draw.choice([0, 1]), "top_p": draw.choice([1.0, 0.8])}
        params |= {"top_k": draw.choice([0, 5]), "repetition_penalty": draw.choice([1.0, 1.1])}
        if i % 5 == 0:
            params["prompt_logprobs"] = 1  # more rows of logits than a graph has
        if i % 4 == 0:
            params["allowed"] = AllowedTokens([3, 4])
        prompt = [2 + draw.randrange(40) for _ in range(draw.choice([1, 3, 17, 130, 700]))]
        new = NewRequest(
            f"{seed} {i}",
            prompt,
            SamplingParams(max_tokens=draw.randrange(1, 5), ignore_eos=True, **params),
            adapter_digest=draw.choice([*digests, None]),
        )
        served.add_request(new)
        for _ in range(draw.randrange(3)):
            served.step()
    while served.has_work():
        served.step()
    return served.state().num_steps


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    torch.empty = torch.zeros  # type: ignore[assignment]  # no kernel writes the tables by which torch's ops gather
    segmented_lora._num_sms = attention_work._num_sms = lambda device: 132  # type: ignore[assignment]
    segmented_lora.can_launch_early = paged_attention.can_launch_early = lambda device: True  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        served, digests = make_engine(Path(folder))
        ready = dict(compiled)
        compiled.clear()
        steps = serve(served, digests, 0)
        print(json.dumps({"ready": ready, "serving": compiled, "steps": steps}))
        served.close()


if __name__ == "__main__":
    main()
