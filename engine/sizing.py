"""Estimate of an engine before it exists: its memory and throughput on this machine or on a GPU of `engine.gpus`.

The sizes come from the engine's own functions: the decoder is loaded without memory (torch's `meta` device), and pages,
KV blocks and batch sizes are divided as `engine.build` does. Only activations and CUDA graphs, which an engine
measures, are estimated here. `engine.sizing_speed` estimates the time of a step.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapters.manifest import BaseShape
from adapters.tiers.pages import PAGE_RANK, RankPages
from engine.build import (
    fit_context,
    kv_bytes_per_token,
    resolve_context,
    resolve_device,
    resolve_dtypes,
)
from engine.config import DEVICE_NAMES, BatchSizes, EngineConfig
from engine.draft import find_draft
from engine.execution.graphs import default_sizes, default_token_sizes
from engine.execution.sampling_tables import seat_bytes
from engine.gpus import GPUS
from engine.memory import (
    Needs,
    adapter_bytes,
    count_blocks,
    fixed_kv_cache,
    host_adapter_bytes,
    most_prompt_logits,
    open_share,
)
from engine.model.config import ModelConfig, read_config
from engine.model.decoder import Decoder
from engine.model.families import make_decoder, parse_model_config
from engine.model.quantised.methods import read_method
from engine.model.weights import ModelWeights, open_weights
from engine.sizing_speed import ExpectedLoad, StepTime, Throughput, steady_throughput
from engine.sizing_steps import MeasuredSteps
from engine.step_log import StepWork
from kernels.cpu.plain import TorchOps
from kernels.gpu import schemes
from kernels.ops import Ops
from kernels.platform import Platform, pick_ops, platform_of
from kernels.roofline import Roofline, measure_roofline
from kernels.simulated.platform import SimulatedPlatform
from kernels.weights import LinearWeights, Scheme
from wire.errors import ConfigError

META = torch.device("meta")
# Memory of a CUDA graph, nodes and parameters; the tensors are shared by all graphs. Not measured yet.
GRAPH_BYTES = 4 << 20
# Copies of the logits that sampling makes beside the model's own, in fp32.
LOGITS_COPIES = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine's memory, in bytes.

    usable: bytes of the device's memory that the engine may use. context: maximum tokens of a request. resident:
    adapters of the load that are on the device at once; in_host: in host memory.
    """

    device: str
    total: int
    usable: int
    needs: Needs
    kv_cache: int
    kv_tokens: int
    context: int
    page_bytes: int
    num_pages: int
    host_adapters: int
    resident: int
    in_host: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and throughput of an engine that is not started."""

    memory: Memory
    throughput: Throughput


class GpuPlatform(SimulatedPlatform):
    """A GPU that is only described. Nothing else uses its memory."""

    has_ops = True

    def __init__(self, title: str, memory: int) -> None:
        self.name, self._memory = title, memory

    def total_memory(self) -> int:
        return self._memory


class GpuOps(TorchOps):
    """Ops of a GPU that is only described: they keep its weights' schemes, and compute nothing."""

    def serves(self, scheme: Scheme) -> bool:
        return schemes.serves(scheme)


class AbsentWeights(ModelWeights):
    """Double of an unquantised checkpoint whose files are not on this machine: it has every module."""

    def has_module(self, module: str) -> bool:
        return True

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def _stored(self, module: str, rows: int, in_features: int) -> LinearWeights | None:
        return None

    def _read(self, name: str, out: Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EstimatedDevice:
    """A device to estimate. ops: pack its weights. roofline: None if it is measured once the weights are
    known.
    """

    platform: Platform
    ops: Ops
    roofline: Roofline | None


def estimate(config: EngineConfig, gpu: str | None, load: ExpectedLoad) -> Estimate:
    """Return an engine's memory and speed. gpu: a name of `GPUS`; None: the configuration's device on this machine.

    Raises ConfigError, naming the field, for a configuration that does not fit or a load that it cannot serve.
    """
    if load.rank > config.max_lora_rank:
        raise ConfigError("rank", f"expected at most {config.max_lora_rank} (--max-lora-rank), got {load.rank}")
    raw = read_config(Path(config.model))
    model = parse_model_config(raw)
    target = _target(config, model, gpu)
    platform = target.platform
    context = resolve_context(config, model)
    share = open_share(config, platform)
    # On the CPU the memory limit includes the engine's process, which is assumed to be as large as this one.
    process = platform.used_memory() - (0 if share is None else share.before)
    decoder = describe_decoder(config, raw, model, target.ops, context)
    weights = decoder.weights
    draft = _describe_draft(config, model, target, context)
    used = weights.num_bytes + draft.weights + process
    loaded = used if share is not None else used - process
    sizes = BatchSizes.of(config, is_host=platform.is_host)
    dtype, kv_dtype, lora_dtype = resolve_dtypes(config, model)
    on_device = adapter_bytes(config, share, used, platform)
    pages = _pages(config, BaseShape.from_config(raw), on_device, lora_dtype)
    # LoRA on embed_tokens and lm_head may take a quarter of the pages' memory, as in `engine.build`.
    needs = Needs(
        loaded,
        on_device if share is None else on_device + on_device // 4,
        max(draft.activations, activation_bytes(model, sizes, dtype.itemsize)),
        _graph_bytes(config, sizes, platform) + draft.graphs,
        _seat_bytes(sizes, model, platform) + draft.seats,
    )
    kv_bytes = kv_bytes_per_token(model, kv_dtype)
    block_bytes = (kv_bytes + draft.kv_bytes) * config.block_size
    num_blocks = (
        fixed_kv_cache(config, platform, used) // block_bytes
        if share is None
        else count_blocks(config, share, needs, block_bytes, sizes.max_num_seqs)
    )
    kv_cache = num_blocks * block_bytes
    host = host_adapter_bytes(config, on_device, platform, platform_of(torch.device("cpu")), used)
    total = platform.total_memory()
    memory = Memory(
        device=platform.name,
        total=total,
        usable=total if share is None else share.num_bytes,
        needs=needs,
        kv_cache=kv_cache,
        kv_tokens=num_blocks * config.block_size,
        context=fit_context(config, context, num_blocks, kv_cache),
        page_bytes=pages.page_bytes,
        num_pages=pages.num_pages,
        host_adapters=host,
        resident=min(load.adapters, pages.num_slots, pages.num_pages // _pages_each(load)),
        in_host=min(load.adapters, host * PAGE_RANK // (pages.page_bytes * load.rank)),
    )
    work = StepWork.of(model, sum(matrix.num_bytes for matrix in weights.matrices), kv_bytes)
    time = _step_time(config, target, decoder, work)
    stretch = config.prefill_stretch if config.enable_chunked_prefill else math.inf
    return Estimate(memory, _throughput(memory, time, load, sizes.max_num_seqs, stretch))


def _target(config: EngineConfig, model: ModelConfig, gpu: str | None) -> EstimatedDevice:
    """Return the device. Raises ConfigError for an unknown GPU, or a device that does not compute."""
    if gpu is not None:
        if gpu not in GPUS:
            raise ConfigError("gpu", f"expected one of {', '.join(GPUS)}; got {gpu!r}")
        found = GPUS[gpu]
        return EstimatedDevice(GpuPlatform(found.title, found.memory), GpuOps(), found.roofline)
    device = resolve_device(config)
    platform = platform_of(device)
    if not platform.has_ops:
        names = f"{', '.join(DEVICE_NAMES[:-1])} or {DEVICE_NAMES[-1]}"
        raise ConfigError("device", f"expected {names}, or a --gpu to estimate; got {config.device!r}")
    dtype, kv_dtype, lora_dtype = resolve_dtypes(config, model)
    ops = pick_ops(device, dtype, model.head_dim, config.block_size, kv_dtype, lora_dtype)
    return EstimatedDevice(platform, ops, None)


class DraftNeeds(NamedTuple):
    """Bytes of a draft model. kv_bytes: bytes of a token's keys and values."""

    weights: int = 0
    activations: int = 0
    graphs: int = 0
    seats: int = 0
    kv_bytes: int = 0


def _describe_draft(config: EngineConfig, model: ModelConfig, target: EstimatedDevice, context: int) -> DraftNeeds:
    """Return what the draft model needs; nothing without one. Raises ConfigError for one that cannot be served."""
    found = find_draft(config, model, target.platform)
    if found is None:
        return DraftNeeds()
    draft_config, draft = found
    raw = read_config(Path(draft_config.model))
    dtype, kv_dtype, _ = resolve_dtypes(draft_config, draft)
    sizes = BatchSizes.of(config, is_host=target.platform.is_host)
    return DraftNeeds(
        describe_decoder(
            draft_config, raw, draft, target.ops, min(context, draft.max_position_embeddings)
        ).weights.num_bytes,
        activation_bytes(draft, sizes, dtype.itemsize),
        _graph_bytes(config, sizes, target.platform),
        _seat_bytes(sizes, draft, target.platform),
        kv_bytes_per_token(draft, kv_dtype),
    )


def describe_decoder(config: EngineConfig, raw: dict[str, Any], model: ModelConfig, ops: Ops, context: int) -> Decoder:
    """Load a decoder's weights as tensors without memory. Quantised checkpoints are read, because their layers' schemes
    depend on their content.

    Raises ConfigError for a quantised model whose weights are not on this machine.
    """
    dtype, _, _ = resolve_dtypes(config, model)
    with _open(config, raw, dtype, ops) as source:
        return make_decoder(model, ops, source, context)


@contextmanager
def _open(config: EngineConfig, raw: dict[str, Any], dtype: torch.dtype, ops: Ops) -> Iterator[ModelWeights]:
    path = Path(config.model)
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf")):
        if read_method(raw) is not None:
            raise ConfigError("model", f"{path} has no weights; the size of a quantised model is read from its weights")
        yield AbsentWeights([], dtype, META, quantization=config.quantization)
        return
    with open_weights(path, dtype, META, quantization=config.quantization, serves=ops.serves) as source:
        yield source


def _pages(config: EngineConfig, shape: BaseShape, memory: int, dtype: torch.dtype) -> RankPages:
    try:
        return RankPages(shape, memory=memory, max_rank=config.max_lora_rank, dtype=dtype, device=META)
    except ValueError as error:
        raise ConfigError("adapter_memory", str(error).removeprefix("adapter_memory: ")) from error


def activation_bytes(model: ModelConfig, sizes: BatchSizes, element_bytes: int) -> int:
    """Estimate the tensors of the largest step. An engine that divides a device's memory measures them instead.

    They are the residual, a sublayer's input and output, and the widest tensors between, and afterwards the logits.
    """
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * model.hidden_size + max(attention, 3 * model.intermediate_size)
    layers = sizes.max_num_batched_tokens * widest * element_bytes
    rows = max(sizes.max_num_seqs, min(most_prompt_logits(model), sizes.max_num_batched_tokens))
    return layers + rows * model.vocab_size * 4 * (1 + LOGITS_COPIES)


def _graph_bytes(config: EngineConfig, sizes: BatchSizes, platform: Platform) -> int:
    if platform.is_host or config.enforce_eager:
        return 0
    decodes = default_sizes(sizes.max_num_seqs) if config.cuda_graph_sizes is None else config.cuda_graph_sizes
    return (len(decodes) + len(default_token_sizes(sizes.max_num_batched_tokens))) * GRAPH_BYTES


def _seat_bytes(sizes: BatchSizes, model: ModelConfig, platform: Platform) -> int:
    return 0 if platform.is_host else seat_bytes(sizes.max_num_seqs, model.vocab_size)


def _pages_each(load: ExpectedLoad) -> int:
    return -(-load.rank // PAGE_RANK)


def _step_time(config: EngineConfig, target: EstimatedDevice, decoder: Decoder, work: StepWork) -> StepTime:
    """Return the times of the device's steps, by a roofline or measured on this machine."""
    model = decoder.config
    dtype, kv_dtype, _ = resolve_dtypes(config, model)
    roofline = target.roofline or measure_roofline(resolve_device(config), dtype, work.weight_bytes)
    if not target.platform.is_host:
        return StepTime(work, model, roofline, None)
    most_tokens = BatchSizes.of(config, is_host=True).max_num_batched_tokens
    return StepTime(work, model, roofline, MeasuredSteps(decoder, config.block_size, most_tokens, kv_dtype).seconds)


def _throughput(memory: Memory, time: StepTime, load: ExpectedLoad, max_num_seqs: int, stretch: float) -> Throughput:
    """Return the times of the load. Raises ConfigError for a request that does not fit."""
    tokens = load.prompt_tokens + load.output_tokens
    if tokens > memory.context:
        raise ConfigError(
            "prompt_tokens", f"a request has {tokens} tokens with its output; at most {memory.context} fit"
        )
    fitting = min(max_num_seqs, memory.kv_tokens // tokens)
    streams = fitting if load.streams is None else min(fitting, load.streams)
    distinct = min(memory.resident, streams)
    return steady_throughput(time, load, streams, distinct, distinct * _pages_each(load) * memory.page_bytes, stretch)
