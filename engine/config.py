"""Configuration of an engine and of its server, frozen and checked on construction. Flags have vLLM's names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.speculative_config import SpeculativeConfig
from kernels.devices import DEVICES, SIMULATED
from wire.errors import ConfigError
from wire.options import ByDevice, Times, check_options, option, options

DType = Literal["auto", "float32", "bfloat16", "float16"]
GenerationConfig = Literal["auto", "none"]
Quantization = Literal["auto", "none", "int8", "int4"]
KvCacheDType = Literal["auto", "fp8_e4m3", "int8"]
LoraDType = Literal["auto", "fp8_e4m3", "int8"]
PolicyName = Literal["fair", "fcfs"]
CoreMode = Literal["process", "thread"]
ToolFormatName = Literal["hermes", "llama3_json"]
MetricsNames = Literal["loraplex", "vllm"]

DEVICE_NAMES = ("auto", *DEVICES)
# Maximum of each time in a simulated step.
MAX_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of a simulated device's step, in seconds: `fixed`, `per_token` for each token of the step, and `prompt`
    if it has prompt tokens.
    """

    fixed: float
    per_token: float
    prompt: float = 0.0

    @classmethod
    def parse(cls, device: str) -> "StepTime":
        """Parse a device such as `simulated:4.5,0.01`, times in milliseconds. Raises ConfigError."""
        kind, _, times = device.partition(":")
        try:
            seconds = [float(time) / 1000 for time in times.split(",")]
        except ValueError:
            seconds = []
        if kind != SIMULATED or len(seconds) not in (2, 3) or not all(0 <= s <= MAX_STEP_S for s in seconds):
            expected = f"{', '.join(DEVICE_NAMES)} or {SIMULATED}:STEP_MS,MS_PER_TOKEN, such as {SIMULATED}:4.5,0.01"
            raise ConfigError("device", f"expected {expected}; got {device!r}")
        return cls(*seconds)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of an engine. Sizes are in tokens, memory in bytes. None: taken from the model or the machine.
    Raises ConfigError for a value out of range.

    async_scheduling: plan and launch a step before the tokens of the previous step are read, except beside drafts.
    quantization: int8 and int4 round the weights of an unquantised checkpoint in groups of 32; int4 keeps the
        embedding and the head in 8 bits.
    kv_cache_dtype: auto is the model's dtype; an 8-bit dtype has a scale for each token and head.
    host_adapter_memory: limit of the host tier of adapters, from which the device's pages are filled.
    lora_dtype: dtype of adapters in device memory; auto is the model's; an 8-bit dtype has a scale for each row of
        rank.
    cuda_graph_sizes: numbers of rows of the decode steps to capture; None: increasing sizes up to max_num_seqs on a
        GPU.
    """

    model: str = option(help="A model folder, a .gguf file, or a hub id.")
    tokenizer: str | None = option(None, help="Folder with the tokenizer to use; default: the model's own.")
    served_model_name: str | None = option(None, help="The base model's name in the API; default: from --model.")
    dtype: DType = option("auto", help="Model dtype.")
    quantization: Quantization = option(
        "auto",
        help="Weights in memory: as in the checkpoint (auto), in the model's dtype (none), or rounded (int8, int4).",
    )
    device: str = option(
        "auto", help="Device: auto, cpu, cuda, or simulated:STEP_MS,MS_PER_TOKEN to measure the host's share."
    )
    max_model_len: int | None = option(
        None, least=1, help="Maximum tokens of prompt and answer together; default: the model's."
    )
    max_num_seqs: int | None = option(
        None, least=1, by_device=ByDevice(cpu=64, gpu=256), help="Maximum requests in a batch."
    )
    max_num_batched_tokens: int | None = option(
        None, least=1, by_device=ByDevice(cpu=640, gpu=8192), help="Maximum tokens in a step."
    )
    block_size: int = option(16, help="Tokens per KV cache block: 8, 16, 32, 64 or 128.")
    threads: int | None = option(
        None, least=1, help="CPU threads; default: as many as CPU affinity and cgroup quota allow."
    )
    gpu_memory_utilization: float | None = option(
        None,
        above=0,
        most=1,
        by_device=ByDevice(cpu=None, gpu=0.9),
        help="Share of the device's memory that the engine may use.",
    )
    kv_cache_memory: int | None = option(
        None, least=1, is_size=True, help="Size of the KV cache, such as 4GiB; default: what is left of the share."
    )
    kv_cache_dtype: KvCacheDType = option("auto", help="KV cache dtype.")
    enforce_eager: bool = option(False, help="Do not use CUDA graphs.")
    cuda_graph_sizes: tuple[int, ...] | None = option(
        None, help="Batch sizes of CUDA graphs for decode, such as 1,2,4,8."
    )
    enable_prefix_caching: bool = option(True, help="Reuse the KV cache of equal prefixes.")
    enable_chunked_prefill: bool = option(
        True, help="Split long prompts into chunks that share steps with running requests."
    )
    prefill_stretch: float = option(
        1.8, above=1, help="Maximum slow-down of a decode step caused by prefill, as a factor."
    )
    scheduler: PolicyName = option("fair", help="Order of requests: fair share, or first come, first served.")
    fair_slack: int = option(
        256,
        least=0,
        help="Service per weight (a prompt token is 1, an output token at least 2) by which a tenant may be ahead and "
        "still be served first where its adapter or prefix is loaded, and by which a tenant that begins to wait may be "
        "behind.",
    )
    preempt_behind: int = option(
        512,
        least=0,
        help="Service per weight (a prompt token is 1, an output token at least 2) that a tenant must be behind before "
        "streams of another give way to it.",
    )
    preempt_after: float = option(
        0.25, least=0, help="Seconds after which streams of a tenant that is ahead give way to a waiting request."
    )
    engine_core_mode: CoreMode | None = option(
        None,
        former="--core",
        help="Run scheduler and model in a process of their own, or in a thread of the server; default: a process on a "
        "GPU, a thread on the CPU.",
    )
    async_scheduling: bool | None = option(
        None, help="Plan the next step while the current one runs; default: on a GPU."
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        help='Propose several tokens for a step, as JSON: {"method": "ngram", "num_speculative_tokens": 4}, or method '
        '"draft_model" with the field "model"; no answer changes.',
    )
    max_lora_rank: int = option(64, least=1, help="Maximum rank of an adapter.")
    lora_dtype: LoraDType = option("auto", help="Dtype of adapters.")
    adapter_memory: int | None = option(
        None, least=0, is_size=True, help="Device memory for adapters; default: derived from the device's memory."
    )
    host_adapter_memory: int | None = option(
        None,
        least=1,
        is_size=True,
        by_device=ByDevice(cpu=4 << 30, gpu=Times(4, "adapter_memory")),
        help="Host memory for adapters.",
    )
    engines_on_host: int = option(
        1, least=1, help="Engines that share this host's memory; defaults that depend on it are for an equal part."
    )
    generation_config: GenerationConfig = option(
        "auto", help="Default sampling parameters: the model's generation_config.json (auto) or OpenAI's (none)."
    )
    seed: int = option(0, help="Seed of requests without one.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.device not in DEVICE_NAMES:
            StepTime.parse(self.device)
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError("block_size", f"expected 8, 16, 32, 64 or 128, got {self.block_size}")
        if self.max_num_seqs is not None and self.max_num_batched_tokens is not None:
            BatchSizes.of(self, is_host=True)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes of a batch: those of the configuration, or the device's defaults."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, *, is_host: bool) -> "BatchSizes":
        """Return the sizes on a device. is_host: see `Platform`. Raises ConfigError for sizes that do not fit
        together.
        """
        found = cls(*(device_default(config, name, is_host=is_host) for name in cls.__slots__))
        sizes, most = config.cuda_graph_sizes, found.max_num_seqs
        if sizes is not None and not all(1 <= size <= most for size in sizes):
            raise ConfigError(
                "cuda_graph_sizes", f"expected numbers from 1 to max_num_seqs ({most}), got {list(sizes)}"
            )
        if found.max_num_batched_tokens < most:
            raise ConfigError(
                "max_num_batched_tokens",
                f"expected at least max_num_seqs ({most}), got {found.max_num_batched_tokens}",
            )
        return found


def device_default(config: EngineConfig, name: str, *, is_host: bool) -> Any:
    """Return an option's value: as configured, else the device's default."""
    given, by_device = getattr(config, name), options(EngineConfig)[name].by_device
    if given is not None or by_device is None:
        return given
    return by_device.cpu if is_host else by_device.gpu


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of an engine's HTTP server and process. Raises ConfigError for a value out of range.

    adapter_store: the source of models named `sha256:...`, which have no name of their own.
    internal_token: secret of gateways. A request that carries it may use every route and names its tenant.
    announce_token: secret for announcements to gateways; None: the internal token.
    """

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int = option(8000, least=0, most=65535, help="Port to listen on; 0: a free one.")
    adapter_store: str | None = option(
        None, help="Folder or s3://bucket/prefix of adapters by digest, for models named `sha256:...`."
    )
    adapter_cache: Path = option(
        Path("~/.cache/loraplex/adapters"), help="Local folder for copies of adapters at s3://."
    )
    adapter_cache_bytes: int = option(16 * 2**30, least=1, is_size=True, help="Size limit of the local copies.")
    lora_modules: tuple[tuple[str, Path], ...] = option((), help="Adapter folders to serve under given names.")
    max_waiting: int = option(1024, least=0, help="Maximum waiting requests; further requests get 503.")
    usage_log: Path | None = option(
        None,
        former="--finished-file",
        help="File of the usage log, which keeps requests' token counts across restarts.",
    )
    tool_call_parser: ToolFormatName | None = option(
        None, help="Format of tool calls; default: from the chat template."
    )
    gateways: tuple[str, ...] = option(
        (), flag="--gateway", help="URL of a gateway to announce this engine to; repeatable."
    )
    advertise_url: str | None = option(
        None, help="URL at which gateways reach this engine; default: --host and --port."
    )
    drain_seconds: float = option(30.0, least=0, help="Seconds for requests to finish after SIGTERM.")
    api_keys: tuple[str, ...] = option(
        (),
        flag="--api-key",
        env="LORAPLEX_ENGINE_API_KEY",
        help="Key that clients send as Authorization: Bearer; repeatable. [env: LORAPLEX_ENGINE_API_KEY, space "
        "separated]",
    )
    access_log: bool = option(False, help="Log a line per request.")
    metrics_names: MetricsNames = option(
        "loraplex", help="Names in /metrics; vllm: also vLLM's, by which inference gateways choose among engines."
    )
    internal_token: str | None = field(default=None, repr=False)
    announce_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
