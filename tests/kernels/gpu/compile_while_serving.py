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
from contextlib import nullcontext
from dataclasses import dataclass, field
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
from engine.scheduling.request import Grammar, NewRequest, SamplingParams
from engine.scheduling.token_rules import AllowedTokens
from engine.speculative_config import SpeculativeConfig
from kernels.gpu import attention_work, paged_attention, segmented_lora
from kernels.gpu.ops import TritonOps
from testing import quantised_files as files
from testing.card import Card
from testing.families import save_family
from testing.speculation import always_drafting
from testing.tiny import save_adapter, save_model
from testing.tiny_engines import regex_grammar
from tests.kernels.gpu.compile_for_hopper import Driver


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a case: `at_once` short ones with long answers together, then `others`, with lengths from `prompts`
    and answers shorter than `most_tokens`.
    """

    at_once: int = 0
    others: int = 24
    prompts: tuple[int, ...] = (1, 3, 17, 130, 700)
    most_tokens: int = 5


@dataclass(frozen=True, slots=True)
class Case:
    """An engine and its load. options: the engine's options. family: the model's family (`testing.families`), None for
    the model of `testing.tiny`. checkpoint: `quantization_config` and the form of the weights, of a quantised
    checkpoint. graphs: numbers of decodes of the graphs. draft: whether there is a draft model. grammars: whether
    requests have some. outside: whether adapters have LoRA on embed_tokens and lm_head.
    """

    options: dict[str, Any] = field(default_factory=dict)
    family: str | None = None
    checkpoint: tuple[dict[str, Any], Any] | None = None
    graphs: tuple[int, ...] = (1, 2, 4)
    load: Load = Load()
    draft: bool = False
    grammars: bool = False
    outside: bool = False


BFLOAT16 = {"dtype": "bfloat16"}
CASES = {
    "fp32": Case(),
    # The sizes of an engine's defaults on a GPU, and a few of their graphs.
    "defaults": Case(
        {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_memory": 256 << 20},
        graphs=(1, 64, 256),
        load=Load(180, 30, (1, 17, 130, 700, 3000)),
    ),
    "8 bits": Case(BFLOAT16 | {"kv_cache_dtype": "int8", "lora_dtype": "fp8_e4m3"}),
    "fp8 base": Case(BFLOAT16, checkpoint=({"quant_method": "fp8"}, partial(files.fp8, kind="channel"))),
    "int8 base": Case(
        BFLOAT16, checkpoint=({"quant_method": "compressed-tensors"}, partial(files.int8, symmetric=True))
    ),
    "int4": Case(BFLOAT16 | {"quantization": "int4"}),
    "awq": Case(BFLOAT16, checkpoint=({"quant_method": "awq", "bits": 4, "version": "GEMM"}, files.awq)),
    "gemma2": Case(family="gemma2"),  # two windows, soft caps
    "qwen3": Case(family="qwen3"),  # norms of q and k
    "drafts": Case(
        {
            "speculative_config": SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=2),
            "async_scheduling": False,
        },
        load=Load(most_tokens=16),
    ),
    "draft model": Case(draft=True, load=Load(most_tokens=16)),
    "grammars": Case(grammars=True),
    "outside": Case(outside=True),
}
# The beginnings of some prompts, so that they share cached blocks.
SHARED_TEXT = [2 + i * i % 41 for i in range(3000)]
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


def make_engine(folder: Path, case: Case) -> tuple[Engine, list[str]]:
    engine.build.pick_ops = lambda *_: ZeroOps(fp8_products=True)  # type: ignore[assignment]
    # A capture runs nothing here, so the warm-up must compile all.
    platform = Card(64 << 30)
    modules = (engine.execution.graphs, engine.execution.masks, engine.execution.runner, engine.execution.sampler)
    for module in (engine.build, *modules):
        module.platform_of = lambda device: platform  # type: ignore[attr-defined]
    engine.execution.transfer.platform_of = lambda device: platform  # type: ignore[attr-defined]
    engine.build.resolve_graph_sizes = lambda *_: case.graphs  # type: ignore[assignment]
    engine.execution.sampler.mark_not_finite = lambda tokens, logits: tokens
    engine.execution.runner.mark_not_finite = lambda tokens, logits: tokens  # type: ignore[attr-defined]
    options = save_base(folder, case)
    host = HostCache(None, BaseShape.from_config_dir(folder / "base"), 1 << 24, DTYPES[options["dtype"]])
    vocab_size = json.loads((folder / "base" / "config.json").read_text())["vocab_size"] if case.outside else None
    for i in range(3):
        save_adapter(folder / f"adapter-{i}", rank=(3, 8, 20)[i], seed=i, vocab_size=vocab_size if i else None)
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 512, "kv_cache_memory": 8 << 20, "async_scheduling": True}
    made = Engine(EngineConfig(device="cpu", max_lora_rank=24, adapter_memory=8 << 20, **sizes | options), host)
    return made, [host.add_path(folder / f"adapter-{i}") for i in range(3)]


def save_base(folder: Path, case: Case) -> dict[str, Any]:
    """Save the case's models. Return the engine's options, with the models' paths."""
    context, base = 4096, folder / "base"
    if case.family is None:
        save_model(base, max_model_len=context)
    else:
        save_family(base, case.family, context)
    options = {"dtype": "float32", "model": str(base)} | case.options
    if case.checkpoint:
        files.write(base, folder / "quantised", *case.checkpoint)
        options["model"] = str(folder / "quantised")
    if case.draft:
        save_model(folder / "draft", max_model_len=context, seed=1)
        options["speculative_config"] = SpeculativeConfig("draft_model", 3, model=str(folder / "draft"))
    return options


def serve(served: Engine, digests: list[str], load: Load, grammar: Grammar | None) -> None:
    """Serve fuzzed requests."""
    draw = random.Random(0)
    for i in range(load.at_once + load.others):
        params: dict[str, Any] = {"temperature": draw.choice([0, 1]), "top_p": draw.choice([1.0, 0.8])}
        params |= {"top_k": draw.choice([0, 5]), "repetition_penalty": draw.choice([1.0, 1.1])}
        if i % 5 == 0:
            params["prompt_logprobs"] = 1  # more rows of logits than a graph has
        if i % 4 == 0:
            params["allowed"] = AllowedTokens([3, 4])
        elif i % 4 == 1:
            params["grammar"] = grammar
        is_short = i < load.at_once
        is_shared = i % 3 == 0
        lengths = (1, 3, 17) if is_short else load.prompts
        # A shared beginning is at least a block long.
        length = draw.choice([n for n in lengths if n > 16] if is_shared else lengths)
        prompt = SHARED_TEXT[:length] if is_shared else [2 + draw.randrange(40) for _ in range(length)]
        most_tokens = draw.randrange(20, 60) if is_short else draw.randrange(1, load.most_tokens)
        new = NewRequest(
            str(i),
            prompt,
            SamplingParams(max_tokens=most_tokens, ignore_eos=True, **params),
            adapter_digest=draw.choice([digests[0], None] if is_shared else [*digests, None]),
        )
        served.add_request(new)
        for _ in range(0 if is_short else draw.randrange(3)):
            served.step()
    while served.has_work():
        served.step()


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
            run(CASES[case])


def run(case: Case) -> None:
    known.clear()
    with tempfile.TemporaryDirectory() as name, always_drafting() if case.draft else nullcontext():
        folder = Path(name)
        served, digests = make_engine(folder, case)
        ready = set(known)
        serve(served, digests, case.load, regex_grammar(folder) if case.grammars else None)
        state = served.state()
        found = {
            "ready": counts(ready),
            "serving": counts(known - ready),
            "steps": state.num_steps,
            "drafted": sum(count.drafted for count in state.drafts),
            "cached": state.prefix_hit_tokens,
        }
        print(json.dumps(found), flush=True)
        served.close()


if __name__ == "__main__":
    main()
