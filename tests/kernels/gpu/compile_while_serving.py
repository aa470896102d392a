"""Engine on a GPU's path without a GPU, as for an H200: launches count variants, run nothing; see test_compiles.py.

Tensors are in host memory and hold zeros or whatever they hold, and every sampled token is 0. The Python around the
kernels is the real one: graphs, routing, sampling. Triton compiles a kernel once for each of its cache keys (types,
constants, alignments, options). Prints one JSON line per case with the variants (name: number of keys) launched before
the engine was ready, and the new ones launched while it served fuzzed requests. The arguments are keys of CASES; after
`--compile`, Triton also compiles each variant.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from engine.build import DTYPES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.token_rules import AllowedTokens
from engine.scheduling.request import NewRequest, SamplingParams
from engine.speculative_config import SpeculativeConfig
from kernels.gpu import attention_work, paged_attention, segmented_lora
from kernels.gpu.ops import TritonOps
from testing import quantised_files as files
from testing.card import Card
from testing.tiny import save_adapter, save_model
from tests.kernels.gpu.compile_for_hopper import Driver

# Options of the engine by case.
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"async_scheduling": True},
    "8 bits": {"dtype": "bfloat16", "kv_cache_dtype": "int8", "lora_dtype": "fp8_e4m3", "async_scheduling": True},
    "fp8 base": {"dtype": "bfloat16", "async_scheduling": True},
    "int8 base": {"dtype": "bfloat16", "async_scheduling": True},
    "drafts": {"speculative_config": SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2)},
}
# Quantised checkpoints by case: `quantization_config` and the form of their weights.
CHECKPOINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8 base": ({"quant_method": "fp8"}, partial(files.fp8, kind="channel")),
    "int8 base": ({"quant_method": "compressed-tensors"}, partial(files.int8, symmetric=True)),
}
launch = JITFunction.run
known: set[tuple[str, str]] = set()


def launch_nothing(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    known.add((self.__name__, kernel.hash))
    return kernel


def skip_compilation(self: Any, key: str, signature: Any, device: int, *_: Any) -> Any:
    """Store a stand-in for a compiled variant in Triton's cache of kernels."""
    kernel_cache = self.device_caches[device][0]
    kernel_cache[key] = SimpleNamespace(hash=key)
    return kernel_cache[key]


def counts(variants: set[tuple[str, str]]) -> Counter[str]:
    return Counter(name for name, _ in variants)


class ZeroOps(TritonOps):
    """Triton's ops, whose sampled tokens are in the vocabulary although no kernel runs."""

    def sample(self, logits: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(super().sample(logits, *parameters))


def make_engine(folder: Path, case: str) -> tuple[Engine, list[str]]:
    options, checkpoint = CASES[case], CHECKPOINTS.get(case)
    engine.build.pick_ops = lambda *_: ZeroOps(fp8_products=True)  # type: ignore[assignment]
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
    if checkpoint:
        files.write(folder / "base", folder / "quantised", *checkpoint)
    host = HostCache(None, BaseShape.from_config_dir(folder / "base"), 1 << 24, DTYPES[options.get("dtype", "float32")])
    for i in range(3):
        save_adapter(folder / f"adapter-{i}", rank=(3, 8, 20)[i], seed=i)
    made = Engine(
        EngineConfig(
            model=str(folder / ("quantised" if checkpoint else "base")),
            device="cpu",
            max_lora_rank=24,
            adapter_memory=8 << 20,
            kv_cache_memory=8 << 20,
            max_num_seqs=6,
            max_num_batched_tokens=512,
            **{"dtype": "float32", **options},
        ),
        host,
    )
    return made, [host.add_path(folder / f"adapter-{i}") for i in range(3)]


def serve(served: Engine, digests: list[str], seed: int, most_tokens: int) -> int:
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
            SamplingParams(max_tokens=draw.randrange(1, most_tokens), ignore_eos=True, **params),
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
    JITFunction.run = launch_nothing
    if "--compile" not in sys.argv:
        JITFunction._do_compile = skip_compilation
    torch.empty = torch.zeros  # type: ignore[assignment]  # no kernel writes the tables by which torch's ops gather
    segmented_lora._num_sms = attention_work._num_sms = lambda device: 132  # type: ignore[assignment]
    segmented_lora.can_launch_early = paged_attention.can_launch_early = lambda device: True  # type: ignore[assignment]
    for case in sys.argv[1:]:
        if case in CASES:
            run(case)


def run(case: str) -> None:
    known.clear()
    with tempfile.TemporaryDirectory() as folder:
        served, digests = make_engine(Path(folder), case)
        ready = set(known)
        steps = serve(served, digests, 0, 16 if "speculative_config" in CASES[case] else 5)
        drafted = sum(count.drafted for count in served.state().drafts)
        found = {"ready": counts(ready), "serving": counts(known - ready), "steps": steps, "drafted": drafted}
        print(json.dumps(found), flush=True)
        served.close()


if __name__ == "__main__":
    main()
