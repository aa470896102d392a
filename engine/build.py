"""Construction of an engine's parts from its configuration: device, dtypes, memory, model, adapter pages, runner."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapters.manifest import BaseShape
from adapters.tiers.device_pool import AdapterPool
from adapters.tiers.host_cache import HostCache
from engine.config import BatchSizes, EngineConfig, StepTime
from engine.draft import Draft, find_draft, num_weights
from engine.execution.graphs import default_sizes, default_token_sizes
from engine.execution.runner import Runner, RunnerLimits, StepRunner
from engine.execution.simulated import SimulatedRunner
from engine.execution.warmup import WarmUp
from engine.memory import (
    Needs,
    adapter_bytes,
    count_blocks,
    fixed_kv_cache,
    host_adapter_bytes,
    mib,
    most_prompt_logits,
    open_share,
)
from engine.model.config import ModelConfig, read_config
from engine.model.decoder import Decoder
from engine.model.families import load_decoder, parse_model_config
from engine.progress import CAPTURING, WARMING, StartProgress
from engine.scheduling.policies.policy import Policy
from engine.scheduling.policies.registry import make_policy
from engine.scheduling.proposer import Proposer
from engine.speculative_config import refused
from kernels.devices import kind_of
from kernels.platform import Platform, default_device, pick_ops, platform_of
from kernels.reference import LARGEST
from kernels.threads import usable_cpus
from kernels.weights import LinearWeights, dense
from wire.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES_OF_8_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an engine. The adapters' pages, the KV caches and the decoder's weights are on the same device.
    step_bytes: bytes of the weights that every step reads; 0 on a simulated device. proposer: the draft model, if there
    is one.
    """

    model: ModelConfig
    device: torch.device
    sizes: BatchSizes
    limits: RunnerLimits
    step_bytes: int
    adapters: AdapterPool
    runner: StepRunner
    policy: Policy
    proposer: Proposer | None


def build(config: EngineConfig, host_cache: HostCache, progress: StartProgress) -> Parts:
    """Load the model and reserve the memory. Raises ConfigError for a configuration that cannot be served."""
    path = Path(config.model)
    raw_config = read_config(path)
    model = parse_model_config(raw_config)
    device = resolve_device(config)
    torch.set_num_threads(config.threads or min(torch.get_num_threads(), usable_cpus()))
    platform = platform_of(device)
    found_draft = find_draft(config, model, platform)
    share = open_share(config, platform)
    _, kv_dtype, lora_dtype = resolve_dtypes(config, model)
    context = resolve_context(config, model)
    sizes = BatchSizes.of(config, is_host=platform.is_host)
    graph_sizes = resolve_graph_sizes(config, device, sizes.max_num_seqs)
    graph_tokens = default_token_sizes(sizes.max_num_batched_tokens) if graph_sizes else ()
    limits = RunnerLimits(0, config.block_size, sizes.max_num_seqs, context, kv_dtype, graph_sizes, graph_tokens)
    # The draft model comes first, because it is small: its faults are found before the base model's long load.
    draft = None if found_draft is None else _load_draft(*found_draft, device, limits, sizes, progress)
    loaded = (_load_decoder if platform.has_ops else _simulate)(config, model, device, context, progress)
    platform.release_memory()  # temporary tensors of the load are not counted as weights
    used = platform.used_memory() - (0 if share is None else share.before)
    shape, on_device = BaseShape.from_config(raw_config), adapter_bytes(config, share, used, platform)
    host_cache.limit_to(host_adapter_bytes(config, on_device, platform, platform_of(torch.device("cpu")), used))
    adapters = _adapter_pool(config, shape, host_cache, on_device, lora_dtype, device, loaded.pack)
    # A block of the draft model's cache belongs to each block of the base model's.
    token_bytes = kv_bytes_per_token(model, kv_dtype) + (0 if draft is None else draft.kv_bytes)
    block_bytes = token_bytes * config.block_size
    most_drafts = 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    warmup = WarmUp(limits, sizes.max_num_batched_tokens, adapters.num_slots, most_prompt_logits(model), most_drafts)
    warming = partial(progress, WARMING)
    if share is None:
        num_blocks = fixed_kv_cache(config, platform, used) // block_bytes
    else:
        with _fitting(platform, "max_num_batched_tokens", "a step of so many tokens does not fit; lower it"):
            measured = warmup.measure(partial(loaded.make_runner, adapters), platform, warming)
            measured = measured if draft is None else measured.with_draft(draft.measure(platform, warming))
        # LoRA on embed_tokens and lm_head is outside of the pages, up to a quarter of their size.
        needs = Needs(used, on_device + on_device // 4, measured.activations, measured.graphs, measured.seats)
        num_blocks = count_blocks(config, share, needs, block_bytes, sizes.max_num_seqs)
    context = fit_context(config, context, num_blocks, num_blocks * block_bytes)
    limits = replace(limits, num_blocks=num_blocks, max_model_len=context)
    runner = loaded.make_runner(adapters, limits, partial(progress, CAPTURING))
    if platform.has_ops and not platform.is_host:
        replace(warmup, limits=limits).run(runner, warming)
    proposer = None if draft is None else draft.start(config, num_blocks, loaded.num_weights, platform, warming)
    policy = make_policy(config)
    return Parts(model, device, sizes, limits, loaded.step_bytes, adapters, runner, policy, proposer)


@contextmanager
def _fitting(platform: Platform, field: str, problem: str) -> Iterator[None]:
    """Raise ConfigError with the device's memory instead of torch's error that there is none left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        used, total = mib(platform.used_memory()), mib(platform.total_memory())
        raise ConfigError(field, f"{problem} ({used} of this {platform.name}'s {total} are in use)") from error


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run. step_bytes, num_weights: bytes and number of the weights that every step reads.
    pack: packs a dense weight. make_runner: called with adapters, sizes, and a function of the number of captured
    graphs and of all graphs.
    """

    step_bytes: int
    num_weights: int
    pack: Callable[[Any], LinearWeights]
    make_runner: Callable[[AdapterPool, RunnerLimits, Callable[[int, int], None]], StepRunner]


def _load_decoder(
    config: EngineConfig, model: ModelConfig, device: torch.device, context: int, progress: StartProgress
) -> Loaded:
    decoder = _open_decoder(config, model, device, context, progress)

    def make_runner(adapters: AdapterPool, limits: RunnerLimits, captured: Callable[[int, int], None]) -> Runner:
        return Runner(decoder, adapters, limits, device, captured)

    def pack(weight: Any) -> LinearWeights:
        return decoder.ops.pack(dense(weight))

    step_bytes = sum(matrix.num_bytes for matrix in decoder.weights.matrices)
    return Loaded(step_bytes, num_weights(decoder.weights), pack, make_runner)


def _open_decoder(
    config: EngineConfig, model: ModelConfig, device: torch.device, context: int, progress: StartProgress
) -> Decoder:
    dtype, kv_dtype, lora_dtype = resolve_dtypes(config, model)
    ops = pick_ops(device, dtype, model.head_dim, config.block_size, kv_dtype, lora_dtype)
    with _fitting(platform_of(device), "model", "its weights do not fit; use a smaller model, or end other processes"):
        return load_decoder(Path(config.model), model, ops, dtype, device, context, progress, config.quantization)


def _load_draft(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    base: RunnerLimits,
    sizes: BatchSizes,
    progress: StartProgress,
) -> Draft:
    """Load the draft model. config, model: its own, see `find_draft`. base: sizes of the base model's runner."""
    context = min(base.max_model_len, model.max_position_embeddings)
    _, kv_dtype, _ = resolve_dtypes(config, model)
    try:
        decoder = _open_decoder(config, model, device, context, progress)
    except ConfigError as error:
        raise refused("model", error.message) from error
    limits = replace(base, max_model_len=context, kv_dtype=kv_dtype)
    return Draft(decoder, limits, sizes.max_num_batched_tokens, kv_bytes_per_token(model, kv_dtype))


def _simulate(config: EngineConfig, model: ModelConfig, *_: object) -> Loaded:
    step_time = StepTime.parse(config.device)

    def make_runner(adapters: AdapterPool, limits: RunnerLimits, _: object) -> SimulatedRunner:
        return SimulatedRunner(model.vocab_size, adapters, limits, step_time)

    return Loaded(0, 0, dense, make_runner)


def _adapter_pool(
    config: EngineConfig,
    shape: BaseShape,
    host_cache: HostCache,
    memory: int,
    dtype: torch.dtype,
    device: torch.device,
    pack: Callable[[Any], LinearWeights],
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
    device = torch.device(kind_of(config.device).torch_type)
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


def kv_bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, including the scales of an 8-bit cache."""
    scales = model.kv_elements_per_token // model.head_dim * 4 if kv_dtype in LARGEST else 0
    return model.kv_elements_per_token * kv_dtype.itemsize + scales
