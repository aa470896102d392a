"""Division of a device's memory: weights, adapters, activations and CUDA graphs, and KV blocks from what is left.

On a GPU an engine uses a share of the memory, `gpu_memory_utilization`, as vLLM does: activations and graphs are
measured by steps of the largest shape before the KV blocks are allocated. The CPU allocates at the first write, so
sizes are fixed there unless a share is given. An engine's part of the host's memory is all of it divided by
`engines_on_host`.
"""

import logging
from dataclasses import dataclass

from engine.config import EngineConfig, device_default
from engine.model.config import ModelConfig
from kernels.platform import Platform
from wire.errors import ConfigError
from wire.options import Times

log = logging.getLogger(__name__)

# Sizes on devices whose memory is not measured. They are at most these parts of the memory that the loaded model
# leaves of the engine's part of the host: the tables fill with use, and a container's engine that exceeds its limit is
# killed.
FIXED_KV_CACHE, FIXED_ADAPTERS = 2 << 30, 1 << 30
KV_CACHE_PART, ADAPTERS_PART, HOST_ADAPTERS_PART = 1 / 4, 1 / 8, 1 / 4
# Default of the adapters' memory: a quarter of what the weights leave, at most this.
MAX_ADAPTERS = 8 << 30

# Limit of a step's logits for prompt_logprobs; larger prompts take more steps.
PROMPT_LOGITS_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a device's memory that an engine may use. device: its name in messages. total: bytes of the device.
    before: bytes in use before the weights are loaded, by other processes. utilization: share of the total.
    """

    device: str
    total: int
    before: int
    utilization: float

    @property
    def num_bytes(self) -> int:
        return int(self.total * self.utilization)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes beside the KV cache. adapters: limit of the pages, and of LoRA on embed_tokens and lm_head. seats: bytes of
    the tables by seat, which hold token counts for penalties, and allowed tokens.
    """

    weights: int
    adapters: int
    activations: int
    graphs: int
    seats: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.activations + self.graphs + self.seats

    def __str__(self) -> str:
        parts = [("weights", self.weights), ("adapters", self.adapters), ("activations", self.activations)]
        parts += [("CUDA graphs", self.graphs), ("tables by seat", self.seats)]
        shown = [f"{name} {mib(size)}" for name, size in parts if size]
        return ", ".join(shown)


def most_prompt_logits(model: ModelConfig) -> int:
    """Return the rows of logits that a step computes for prompt_logprobs."""
    return max(1, PROMPT_LOGITS_BYTES // (4 * model.vocab_size))


def mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"


def open_share(config: EngineConfig, platform: Platform) -> Share | None:
    """Return the engine's share before anything is loaded; None for a device whose memory is not measured.

    Raises ConfigError for a configured size that the device does not have, because the system's own error would not
    name the field, and if other processes use so much that the share is not free.
    """
    _check_sizes(config, platform)
    utilization = device_default(config, "gpu_memory_utilization", is_host=platform.is_host)
    if utilization is None or not platform.has_ops:
        return None
    # On the host, only this process is measured, and its memory is part of the engine's share.
    before = 0 if platform.is_host else platform.used_memory()
    share = Share(platform.name, platform.total_memory(), before, utilization)
    if share.num_bytes > share.total - before:
        raise ConfigError(
            "gpu_memory_utilization",
            f"expected at most {(share.total - before) / share.total:.2f}, got {utilization:g}: other processes use "
            f"{mib(before)} of this {platform.name}'s {mib(share.total)}; lower it, or end them",
        )
    return share


def _check_sizes(config: EngineConfig, platform: Platform) -> None:
    total = platform.total_memory()
    for field in ("kv_cache_memory", "adapter_memory"):
        asked = getattr(config, field)
        if asked is not None and asked > total:
            raise ConfigError(
                field, f"expected at most the {mib(total)} that this {platform.name} has, got {mib(asked)}"
            )


def fixed_kv_cache(config: EngineConfig, platform: Platform, used: int) -> int:
    """Return the bytes of the KV cache on a device whose memory is not measured. used: bytes of the loaded model."""
    return config.kv_cache_memory or _part(FIXED_KV_CACHE, KV_CACHE_PART, config, platform, used)


def _part(most: int, part: float, config: EngineConfig, platform: Platform, used: int) -> int:
    return max(1, min(most, int((platform.total_memory() // config.engines_on_host - used) * part)))


def adapter_bytes(config: EngineConfig, share: Share | None, used: int, platform: Platform) -> int:
    """Return the bytes of the adapters' pages. used: bytes of the loaded model. Raises ConfigError if these leave
    nothing of the share.
    """
    if config.adapter_memory is not None:
        return config.adapter_memory
    if share is None:
        return _part(FIXED_ADAPTERS, ADAPTERS_PART, config, platform, used)
    if used >= share.num_bytes:
        raise ConfigError("gpu_memory_utilization", f"the model does not fit: {_spent(share, used)}")
    return min(MAX_ADAPTERS, (share.num_bytes - used) // 4)


def host_adapter_bytes(config: EngineConfig, on_device: int, platform: Platform, host: Platform, used: int) -> int:
    """Return the limit of the host tier of adapters. on_device: bytes of the device tier. used: see `adapter_bytes`.

    The default is at most half of the engine's part of the host's memory on a GPU, and HOST_ADAPTERS_PART of what is
    left of it on the CPU.
    """
    value = device_default(config, "host_adapter_memory", is_host=platform.is_host)
    if not isinstance(value, Times):
        return config.host_adapter_memory or _part(value, HOST_ADAPTERS_PART, config, host, used)
    return max(1, min(value.factor * on_device, host.total_memory() // (2 * config.engines_on_host)))


def count_blocks(config: EngineConfig, share: Share, needs: Needs, block_bytes: int, least: int) -> int:
    """Return the number of KV blocks that fit beside the engine's needs. least: fewest that are of use.

    Raises ConfigError with all sizes if these do not fit: a given `kv_cache_memory` into the whole device, else `least`
    blocks into the share.
    """
    given = config.kv_cache_memory
    if given is not None:
        left = share.total - share.before - needs.total
        if given > left:
            raise ConfigError(
                "kv_cache_memory",
                f"expected at most {mib(max(left, 0))}, got {mib(given)}: of this {share.device}'s {mib(share.total)}, "
                f"other processes use {mib(share.before)}, and this engine needs {needs}; lower it, --adapter-memory "
                "or --max-num-batched-tokens, or use a smaller model",
            )
        return given // block_bytes
    left = share.num_bytes - needs.total
    if left < least * block_bytes:
        raise ConfigError(
            "gpu_memory_utilization",
            f"the model does not fit: {_spent(share, needs)}; this leaves {mib(max(left, 0))} for "
            f"{max(left // block_bytes, 0)} KV blocks of {block_bytes >> 10} KiB, and at least {least} are needed, one "
            "for each of max_num_seqs; raise it, or lower --max-num-seqs, --max-num-batched-tokens or --adapter-memory",
        )
    log.info("memory: %s, KV cache %s (%d blocks)", _spent(share, needs), mib(left), left // block_bytes)
    return left // block_bytes


def _spent(share: Share, needs: Needs | int) -> str:
    what = f"weights {mib(needs)}" if isinstance(needs, int) else str(needs)
    return (
        f"{share.utilization:g} of this {share.device}'s {mib(share.total)} is {mib(share.num_bytes)}, of which {what}"
    )
