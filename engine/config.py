"""Configuration of an engine, frozen and checked on construction. Flags have vLLM's names."""

from dataclasses import dataclass
from typing import Literal, get_args

from wire.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
GenerationConfig = Literal["auto", "none"]
KvCacheDType = Literal["auto", "fp8_e4m3", "int8"]
LoraDType = Literal["auto", "fp8_e4m3", "int8"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of an engine. Sizes are in tokens, memory in bytes. None: taken from the model or the machine.
    Raises ConfigError for a value out of range.

    model: a Hugging Face folder or a .gguf file.
    tokenizer: a folder whose tokenizer replaces the model's own.
    prefill_stretch: maximum slow-down of a decode step caused by prefill, as a factor.
    async_scheduling: plan and launch a step before the tokens of the one before are read; None: only on a GPU.
    generation_config: defaults of omitted sampling fields; auto: the model's generation_config.json, none: OpenAI's.
    kv_cache_dtype: auto is the model's dtype; an 8-bit dtype has a scale for each token and head.
    host_adapter_memory: limit of the host tier of adapters, from which the device's pages are filled.
    lora_dtype: of adapters in device memory; auto is the model's; an 8-bit dtype has a scale for each row of rank.
    threads: CPU threads for matrix products; None: as many as the affinity mask and the cgroup's quota allow.
    enforce_eager: no CUDA graphs.
    cuda_graph_sizes: numbers of rows of the decode steps to capture; None: increasing sizes up to max_num_seqs on a
        GPU.
    """

    model: str
    tokenizer: str | None = None
    served_model_name: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 640
    block_size: int = 16
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefill_stretch: float = 1.8
    async_scheduling: bool | None = None
    kv_cache_dtype: KvCacheDType = "auto"
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] | None = None
    adapter_memory: int | None = None
    host_adapter_memory: int = 4 << 30
    max_lora_rank: int = 64
    generation_config: GenerationConfig = "auto"
    lora_dtype: LoraDType = "auto"
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise ConfigError("dtype", f"expected one of {', '.join(get_args(DType))}, got {self.dtype!r}")
        if self.generation_config not in get_args(GenerationConfig):
            raise ConfigError("generation_config", f"expected auto or none, got {self.generation_config!r}")
        if self.device not in get_args(Device):
            raise ConfigError("device", f"expected one of {', '.join(get_args(Device))}, got {self.device!r}")
        for field, kind in (("kv_cache_dtype", KvCacheDType), ("lora_dtype", LoraDType)):
            if getattr(self, field) not in get_args(kind):
                raise ConfigError(field, f"expected one of {', '.join(get_args(kind))}, got {getattr(self, field)!r}")
        sizes = self.cuda_graph_sizes
        if sizes is not None and not all(1 <= size <= self.max_num_seqs for size in sizes):
            raise ConfigError(
                "cuda_graph_sizes", f"expected numbers from 1 to max_num_seqs ({self.max_num_seqs}), got {list(sizes)}"
            )
        for field, least in (
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("kv_cache_memory", 1),
            ("adapter_memory", 0),
            ("host_adapter_memory", 1),
            ("max_lora_rank", 1),
            ("threads", 1),
        ):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigError(field, f"expected at least {least}, got {value}")
        if self.prefill_stretch <= 1:
            raise ConfigError("prefill_stretch", f"expected more than 1, got {self.prefill_stretch}")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError("block_size", f"expected 8, 16, 32, 64 or 128, got {self.block_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"expected at least max_num_seqs ({self.max_num_seqs}), got {self.max_num_batched_tokens}",
            )
