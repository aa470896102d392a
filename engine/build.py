"""Construction of an engine's parts from its configuration: device, dtypes, memory, model, adapter pages, runner."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapters.manifest import BaseShape
from adapters.tiers.device_pool import AdapterPool
from adapters.tiers.host_cache import HostCache
from engine.config import SIMULATED, BatchSizes, EngineConfig, StepTime, device_default
from engine.execution.graphs import default_sizes, default_token_sizes
from engine.execution.runner import Runner, RunnerLimits, StepRunner
from engine.execution.simulated import DEVICE as SIMULATED_DEVICE
from engine.execution.simulated import SimulatedRunner
from engine.model.config import ModelConfig, read_config
from engine.model.families import load_decoder, parse_model_config
from engine.model.weights import Progress
from engine.scheduling.policies.policy import Policy
from engine.scheduling.policies.registry import make_policy
from kernels.ops import PackedLinear, dense_linear
from kernels.platform import default_device, pick_ops, platform_of
from kernels.reference import LARGEST
from kernels.threads import usable_cpus
from wire.errors import ConfigError
from wire.options import Times

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES_OF_8_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an engine. The adapters' pages, the KV caches and the decoder's weights are on the same device."""

    model: ModelConfig
    device: torch.device
    sizes: BatchSizes
    limits: RunnerLimits
    adapters: AdapterPool
    runner: StepRunner
    policy: Policy


def build(config: EngineConfig, host_cache: HostCache, progress: Progress) -> Parts:
    """Load the model and reserve the memory. Raises ConfigError for a configuration that cannot be served."""
    path = Path(config.model)
    raw_config = read_config(path)
    model = parse_model_config(raw_config)
    device = resolve_device(config)
    torch.set_num_threads(config.threads or min(torch.get_num_threads(), usable_cpus()))
    check_memory(config, device)
    _, kv_dtype, lora_dtype = resolve_dtypes(config, model)
    context = resolve_context(config, model)
    sizes = BatchSizes.of(config, is_gpu=not platform_of(device).is_host)
    graph_sizes = resolve_graph_sizes(config, device, sizes.max_num_seqs)
    load = _load_decoder if platform_of(device).has_ops else _simulate
    loaded = load(config, model, device, context, progress)
    kv_cache_bytes, adapter_bytes = split_memory(config, platform_of(device).free_memory())
    num_blocks = kv_cache_bytes // (kv_bytes_per_token(model, kv_dtype) * config.block_size)
    context = fit_context(config, context, num_blocks, kv_cache_bytes)
    limits = RunnerLimits(
        num_blocks,
        config.block_size,
        sizes.max_num_seqs,
        context,
        kv_dtype,
        graph_sizes,
        default_token_sizes(sizes.max_num_batched_tokens) if graph_sizes else (),
    )
    shape = BaseShape.from_config(raw_config)
    host_cache.limit_to(host_adapter_bytes(config, adapter_bytes, device))
    adapters = _adapter_pool(config, shape, host_cache, adapter_bytes, lora_dtype, device, loaded.pack)
    runner = loaded.make_runner(adapters, limits)
    policy = make_policy(
        config.scheduler,
        slack=config.fair_slack,
        preempt_behind=config.preempt_behind,
        preempt_after=config.preempt_after,
    )
    return Parts(model, device, sizes, limits, adapters, runner, policy)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run. pack: the backend's `pack_linear`. make_runner: called with adapters and sizes."""

    pack: Callable[[Any], PackedLinear]
    make_runner: Callable[[AdapterPool, RunnerLimits], StepRunner]


def _load_decoder(
    config: EngineConfig, model: ModelConfig, device: torch.device, context: int, progress: Progress
) -> Loaded:
    dtype, kv_dtype, lora_dtype = resolve_dtypes(config, model)
    ops = pick_ops(device, dtype, model.head_dim, config.block_size, kv_dtype, lora_dtype)
    decoder = load_decoder(Path(config.model), model, ops, dtype, device, context, progress)

    def make_runner(adapters: AdapterPool, limits: RunnerLimits) -> Runner:
        return Runner(decoder, adapters, limits, device, partial(progress, "Capturing CUDA graphs"))

    return Loaded(ops.pack_linear, make_runner)


def _simulate(config: EngineConfig, model: ModelConfig, *_: object) -> Loaded:
    step_time = StepTime.parse(config.device)
    return Loaded(dense_linear, lambda adapters, limits: SimulatedRunner(model.vocab_size, adapters, limits, step_time))


def _adapter_pool(
    config: EngineConfig,
    shape: BaseShape,
    host_cache: HostCache,
    memory: int,
    dtype: torch.dtype,
    device: torch.device,
    pack: Callable[[Any], PackedLinear],
) -> AdapterPool:
    try:
        return AdapterPool(
            shape, host_cache, memory=memory, max_rank=config.max_lora_rank, dtype=dtype, device=device, pack=pack
        )
    except ValueError as error:
        raise ConfigError("adapter_memory", str(error).removeprefix("adapter_memory: ")) from error


def resolve_context(config: EngineConfig, model: ModelConfig) -> int:
    """Return the limit of a request's tokens. Raises ConfigError for more than the model's context."""
    context = config.max_model_len or model.max_position_embeddings
    if context > model.max_position_embeddings:
        raise ConfigError("max_model_len", f"the model's context is {model.max_position_embeddings}, got {context}")
    return context


def fit_context(config: EngineConfig, context: int, num_blocks: int, kv_cache_bytes: int) -> int:
    """Return the limit of a request's tokens, lowered to the size of the KV cache unless `max_model_len` is given.

    Raises ConfigError if a request of `max_model_len` does not fit into the cache, or if the cache has no block.
    """
    held = num_blocks * config.block_size
    if held >= context:
        return context
    if config.max_model_len is not None or num_blocks < 1:
        raise ConfigError(
            "kv_cache_memory",
            f"{kv_cache_bytes} bytes hold {held} tokens, one request of max_model_len needs {context}; raise it, "
            "or lower adapter_memory or max_model_len",
        )
    log.warning("the KV cache holds %d tokens: max_model_len is lowered to that", held)
    return held


def resolve_device(config: EngineConfig) -> torch.device:
    """Return the configured device. Raises ConfigError if this machine has no such device."""
    if config.device == "auto":
        return default_device()
    device = SIMULATED_DEVICE if config.device.startswith(SIMULATED) else torch.device(config.device)
    if not platform_of(device).is_available():
        raise ConfigError("device", f"expected cpu or auto: torch sees no {config.device.upper()} device")
    return device


def resolve_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    return DTYPES.get(model.dtype if config.dtype == "auto" else config.dtype, torch.float32)


def resolve_dtypes(config: EngineConfig, model: ModelConfig) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of the model, of the KV cache and of the adapters."""
    dtype = resolve_dtype(config, model)
    kv_dtype = DTYPES_OF_8_BITS.get(config.kv_cache_dtype, dtype)
    return dtype, kv_dtype, DTYPES_OF_8_BITS.get(config.lora_dtype, dtype)


def resolve_graph_sizes(config: EngineConfig, device: torch.device, max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows of the decode steps to capture; none on the CPU.

    Raises ConfigError for `cuda_graph_sizes` on the CPU.
    """
    is_host = platform_of(device).is_host
    if is_host and config.cuda_graph_sizes:
        raise ConfigError("cuda_graph_sizes", "expected none: CUDA graphs need a CUDA device")
    if is_host or config.enforce_eager:
        return ()
    return default_sizes(max_num_seqs) if config.cuda_graph_sizes is None else config.cuda_graph_sizes


def check_memory(config: EngineConfig, device: torch.device) -> None:
    """Check the configured sizes against the device's memory, because the system's own error would not name the field.

    Raises ConfigError.
    """
    platform = platform_of(device)
    total = platform.total_memory()
    for field in ("kv_cache_memory", "adapter_memory"):
        asked = getattr(config, field)
        if asked is not None and asked > total:
            raise ConfigError(
                field, f"expected at most the {total >> 20} MiB that this {platform.name} has, got {asked >> 20} MiB"
            )


def split_memory(config: EngineConfig, free: int | None) -> tuple[int, int]:
    """Return the bytes of the KV cache and of the adapters. free: a GPU's bytes left after the weights, else None.

    By default, adapters get a quarter of the free memory, at most 8 GiB, and the KV cache gets the rest except a fifth
    of the free memory, which is for activations. Raises ConfigError if nothing is left for the KV cache.
    """
    if free is None:
        return config.kv_cache_memory or 2 << 30, 1 << 30 if config.adapter_memory is None else config.adapter_memory
    adapters = min(8 << 30, free // 4) if config.adapter_memory is None else config.adapter_memory
    kv_cache = int(free * 0.8) - adapters if config.kv_cache_memory is None else config.kv_cache_memory
    if kv_cache < 1 or kv_cache + adapters > free:
        raise ConfigError(
            "adapter_memory" if config.kv_cache_memory is None else "kv_cache_memory",
            f"expected less: the weights leave {free >> 20} MiB, of which the KV cache would take "
            f"{max(kv_cache, 0) >> 20} MiB beside {adapters >> 20} MiB for adapters; "
            "lower one of them, or use a smaller model",
        )
    return kv_cache, adapters


def host_adapter_bytes(config: EngineConfig, adapter_bytes: int, device: torch.device) -> int:
    """Return the limit of the host tier of adapters. adapter_bytes: of the device tier.

    A default that follows from the device tier is at most half of the host's memory.
    """
    value = device_default(config, "host_adapter_memory", is_gpu=not platform_of(device).is_host)
    if not isinstance(value, Times):
        return value
    most = platform_of(torch.device("cpu")).total_memory() // 2
    return max(1, min(value.factor * adapter_bytes, most))


def kv_bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, including the scales of an 8-bit cache."""
    scales = model.kv_elements_per_token // model.head_dim * 4 if kv_dtype in LARGEST else 0
    return model.kv_elements_per_token * kv_dtype.itemsize + scales
