"""Device and sizes of a run: a GPU at Llama-3.1-8B's shapes, or the interpreter at toy shapes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels import measure

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    # The longest context, and its answer.
    "max_position_embeddings": 32768 + 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMALL: dict[str, Any] = LLAMA_3_1_8B | {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
TINY: dict[str, Any] = SMALL | {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU with full sizes. context: tokens before a decode step; adapters: distinct ones in the LoRA steps.

    mixed_contexts, mixed_copies: contexts of one batch, and how often each. long_prompt: tokens of prompts that arrive
    beside streams. prefill_tokens: tokens of a prompt that is timed alone. step_tokens: limit of a step of the engines.
    new_tokens: decoded by each request of a whole-engine run. http_tokens, http_seconds, http_prompts: tokens of each
    stream over HTTP, seconds of a measurement, and number of arriving prompts. start_seconds: limit of an engine's
    start. copies: sets of inputs over which a kernel's calls rotate, so that no set is in the L2 cache when its call
    runs. candidates: number of candidates of each kind of tile sizes.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_3_1_8B)
    small_model: dict[str, Any] = field(default_factory=lambda: SMALL)
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    context: int = 512
    lora_batch: int = 64
    adapters: tuple[int, ...] = (1, 8, 32, 64)
    mixed_contexts: tuple[int, ...] = (128, 512, 2048, 8192, 32768)
    mixed_copies: int = 3
    long_prompt: int = 2048
    prefill_tokens: int = 4096
    step_tokens: int = 8192
    engine_batches: tuple[int, ...] = (1, 64)
    engine_adapters: int = 16
    new_tokens: int = 64
    http_tokens: int = 2000
    http_seconds: float = 4.0
    http_prompts: int = 8
    start_seconds: float = 100.0
    disturbances: int = 20
    copies: int = 4
    candidates: int = 99

    def milliseconds(self, *calls: Callable[[], object]) -> float:
        """Return the device time of one call, from a replayed graph of all calls."""
        return measure.microseconds(list(calls)) / 1000

    def bandwidth(self) -> float:
        return measure.bandwidth()

    def matrix_rate(self) -> float:
        return measure.matrix_rate()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def describe(self) -> str:
        import triton

        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


class DryMachine(Machine):
    """The same program on the CPU, its kernels in Triton's interpreter. Its figures mean nothing."""

    def milliseconds(self, *calls: Callable[[], object]) -> float:
        started = time.perf_counter()
        calls[0]()
        return 1000 * (time.perf_counter() - started)

    def bandwidth(self) -> float:
        return 1e9

    def matrix_rate(self) -> float:
        return 1e9

    def synchronize(self) -> None:
        pass

    def describe(self) -> str:
        return f"dry run without a card (no figure means anything), torch {torch.__version__}"


def dry_machine() -> DryMachine:
    return DryMachine(
        torch.device("cpu"),
        torch.float32,
        TINY,
        TINY,
        batches=(2,),
        context=20,
        lora_batch=2,
        adapters=(2,),
        mixed_contexts=(5, 20, 200),
        mixed_copies=1,
        long_prompt=40,
        prefill_tokens=50,
        step_tokens=128,
        engine_batches=(1, 3),
        engine_adapters=2,
        new_tokens=2,
        http_tokens=30_000,  # more than a fast CPU makes while a slow one is waited for
        http_seconds=0.2,
        http_prompts=2,
        disturbances=2,
        copies=1,
        candidates=2,
    )
