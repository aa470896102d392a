"""The engine: one base model with many adapters in one batch. A step is schedule, launch, commit, sample.

With async scheduling the host works while the device computes: it plans a step and launches its forward pass before it
reads the tokens of the step before. It reads and commits these while the pass runs, so that sampling knows every
earlier token; requests that ended then are dropped from the in-flight step. The answers are the same.

Knows no HTTP, no text, and no threads except the adapter loaders'. All methods except `prefix_keys` are called from one
thread.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from adapters.manifest import BaseShape
from adapters.tiers.device_pool import AdapterPool
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.execution.graphs import default_sizes
from engine.execution.runner import Runner, Sampling
from engine.model.config import ModelConfig, read_config
from engine.model.families import load_decoder, parse_model_config
from engine.model.weights import Progress
from engine.scheduling.kv_cache import KVCache, prefix_keys
from engine.scheduling.pacing import Pacer
from engine.scheduling.request import Request, RequestOutput, SamplingParams
from engine.scheduling.scheduler import Scheduler
from kernels.backend import pick_ops
from kernels.reference import LARGEST
from kernels.threads import usable_cpus
from wire.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

# Limit of a step's logits for prompt_logprobs; larger prompts take more steps.
PROMPT_LOGITS_BYTES = 128 << 20

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES_OF_8_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose tokens the host has not read. started: perf_counter at the start of its planning."""

    sampling: Sampling
    started: float
    num_decodes: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """A reading of the counters, for /state and /metrics. `generation` changes with the set of resident adapters."""

    generation: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    resident_adapters: tuple[str, ...]
    num_adapter_pages: int
    num_free_adapter_pages: int
    num_adapter_loads: int
    num_adapter_evictions: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    prefix_hit_tokens: int
    prefix_query_tokens: int


def resolve_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda was asked for, but torch sees no CUDA device")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    return torch.device(kind)


def resolve_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    return DTYPES.get(model.dtype if config.dtype == "auto" else config.dtype, torch.float32)


def resolve_graph_sizes(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """Return the sizes of the decode steps to capture, none without a CUDA device. Raises ConfigError for sizes without
    one.
    """
    if device.type != "cuda" and config.cuda_graph_sizes:
        raise ConfigError("cuda_graph_sizes", "expected none: CUDA graphs need a CUDA device")
    if device.type != "cuda" or config.enforce_eager:
        return ()
    return default_sizes(config.max_num_seqs) if config.cuda_graph_sizes is None else config.cuda_graph_sizes


def check_memory(config: EngineConfig, device: torch.device) -> None:
    """Check the configured sizes against the machine's memory. Raises ConfigError that names the field, which the
    system's own error would not.
    """
    if device.type == "cuda":
        _free, total = torch.cuda.mem_get_info(device)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for field in ("kv_cache_memory", "adapter_memory"):
        asked = getattr(config, field)
        if asked is not None and asked > total:
            where = "GPU" if device.type == "cuda" else "machine"
            raise ConfigError(
                field, f"expected at most the {total >> 20} MiB that this {where} has, got {asked >> 20} MiB"
            )


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU; None for the CPU, which allocates memory when it is first written."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def split_memory(config: EngineConfig, free: int | None) -> tuple[int, int]:
    """Return the bytes of the KV cache and of the adapters. free: a GPU's bytes left after the weights.

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
            f"{max(kv_cache, 0) >> 20} MiB beside {adapters >> 20} MiB for adapters; lower one or take a smaller model",
        )
    return kv_cache, adapters


def kv_bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, including the scales of an 8-bit cache."""
    scales = model.kv_elements_per_token // model.head_dim * 4 if kv_dtype in LARGEST else 0
    return model.kv_elements_per_token * kv_dtype.itemsize + scales


class Engine:
    """An engine, which loads its model on construction. Raises ConfigError for a model or configuration that cannot be
    served.

    host_cache: source of adapters; it outlives the engine and is closed by its owner.
    """

    def __init__(self, config: EngineConfig, host_cache: HostCache, progress: Progress | None = None) -> None:
        path = Path(config.model)
        self.config = config
        raw_config = read_config(path)
        self.model_config = parse_model_config(raw_config)
        self.eos_token_ids = self.model_config.eos_token_ids
        self.device = resolve_device(config)
        torch.set_num_threads(config.threads or min(torch.get_num_threads(), usable_cpus()))
        check_memory(config, self.device)
        self.dtype = resolve_dtype(config, self.model_config)
        model_len = config.max_model_len or self.model_config.max_position_embeddings
        if model_len > self.model_config.max_position_embeddings:
            raise ConfigError(
                "max_model_len", f"the model's context is {self.model_config.max_position_embeddings}, got {model_len}"
            )
        kv_dtype = DTYPES_OF_8_BITS.get(config.kv_cache_dtype, self.dtype)
        lora_dtype = DTYPES_OF_8_BITS.get(config.lora_dtype, self.dtype)
        graph_sizes = resolve_graph_sizes(config, self.device)
        ops = pick_ops(self.device, self.dtype, self.model_config.head_dim, config.block_size, kv_dtype, lora_dtype)
        progress = progress or (lambda *_: None)
        decoder = load_decoder(path, self.model_config, ops, self.dtype, self.device, model_len, progress)
        kv_cache_bytes, adapter_bytes = split_memory(config, free_memory(self.device))
        num_blocks = kv_cache_bytes // (kv_bytes_per_token(self.model_config, kv_dtype) * config.block_size)
        if num_blocks * config.block_size < model_len:
            if config.max_model_len is not None or num_blocks < 1:
                raise ConfigError(
                    "kv_cache_memory",
                    f"{kv_cache_bytes} bytes hold {num_blocks * config.block_size} tokens, one request of "
                    f"max_model_len needs {model_len}; give it more, or lower adapter_memory or max_model_len",
                )
            model_len = num_blocks * config.block_size
            log.warning("the KV cache holds %d tokens: max_model_len is lowered to that", model_len)
        self.max_model_len = model_len
        base = BaseShape.from_config(raw_config)
        try:
            self.adapters = AdapterPool(
                base,
                host_cache,
                memory=adapter_bytes,
                max_rank=config.max_lora_rank,
                dtype=lora_dtype,
                device=self.device,
                pack=ops.pack_linear,
            )
        except ValueError as error:
            raise ConfigError("adapter_memory", str(error).removeprefix("adapter_memory: ")) from error
        self.runner = Runner(
            decoder,
            self.adapters,
            num_blocks,
            config.block_size,
            self.dtype,
            self.device,
            max_num_seqs=config.max_num_seqs,
            max_model_len=model_len,
            kv_dtype=kv_dtype,
            graph_sizes=graph_sizes,
            progress=partial(progress, "Capturing CUDA graphs"),
        )
        # On the CPU the step occupies the host's cores, so reading its tokens later would only delay them.
        self._async = self.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self._in_flight: StepInFlight | None = None
        self._last_commit = 0.0
        self._pacer = Pacer(config.prefill_stretch)
        self.scheduler = Scheduler(
            KVCache(num_blocks, config.block_size, config.enable_prefix_caching),
            self.adapters,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            pacer=self._pacer,
            max_prompt_logits=max(1, PROMPT_LOGITS_BYTES // (4 * self.model_config.vocab_size)),
        )
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        cache_salt: str = "",
        prefix_keys: Sequence[bytes] = (),
    ) -> None:
        """Queue a request. prefix_keys: the result of the method of this name, if already computed.

        Raises RequestError that names the parameter, for a request that could never run.
        """
        if request_id in self.scheduler.requests:
            raise RequestError("request_id", f"{request_id} is already in flight")
        if not prompt_token_ids:
            raise RequestError("prompt", "expected at least one token, got an empty prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestError(
                "prompt",
                f"{len(prompt_token_ids)} tokens leave no room to answer in this model's context of "
                f"{self.max_model_len} tokens",
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < self.model_config.vocab_size:
            raise RequestError("prompt", f"expected token ids from 0 to {self.model_config.vocab_size - 1}")
        if params.max_tokens < 1:
            raise RequestError("max_tokens", f"expected at least 1, got {params.max_tokens}")
        if len(prompt_token_ids) + params.max_tokens > self.max_model_len:
            raise RequestError(
                "max_tokens",
                f"{len(prompt_token_ids)} prompt tokens and max_tokens {params.max_tokens} are together over this "
                f"model's context of {self.max_model_len} tokens",
            )
        if weight <= 0:
            raise RequestError("weight", f"expected a number above 0, got {weight}")
        for field, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", () if params.allowed is None else (params.allowed.largest,)),
            ("bad_words", () if params.bad_words is None else (params.bad_words.largest,)),
        ):
            if any(not 0 <= i < self.model_config.vocab_size for i in ids):
                raise RequestError(field, f"expected token ids from 0 to {self.model_config.vocab_size - 1}")
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        self._arrivals += 1
        self.scheduler.add(
            Request(
                request_id,
                prompt_token_ids,
                params,
                adapter=adapter,
                tenant=tenant,
                weight=weight,
                priority=priority,
                cache_salt=cache_salt,
                prefix_keys=prefix_keys,
                arrival=self._arrivals,
                seed=seed,
                stop_ids=stop_ids,
            )
        )

    def prefix_keys(
        self, prompt_token_ids: Sequence[int], *, adapter: str | None, tenant: str, cache_salt: str
    ) -> list[bytes]:
        """Return the prompt's keys in the prefix cache; empty if it is disabled. May be called from any thread."""
        if not self.config.enable_prefix_caching:
            return []
        return prefix_keys(
            prompt_token_ids, self.config.block_size, adapter=adapter, tenant=tenant, cache_salt=cache_salt
        )

    def abort(self, request_id: str) -> None:
        """End a request at once, in any state. Its blocks and its adapter's pin are free on return."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return bool(self.scheduler.requests) or self._in_flight is not None

    @property
    def is_waiting_for_adapters(self) -> bool:
        """Return whether all work waits for adapters to load, so that the thread may sleep."""
        return not self.scheduler.running and self._in_flight is None and self.adapters.is_loading

    def step(self) -> list[RequestOutput]:
        """Run a step. Return an output for each request that received a token or ended; with async scheduling, the
        tokens are those of the step before.
        """
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        outputs = [request.output([]) for request in self.scheduler.take_failed()]
        launched = self.runner.forward(plan) if plan else None
        outputs += self._commit()
        if launched is not None:
            num_prompt_tokens = sum(n for r, n in plan.items() if not r.is_decoding)
            num_decodes = sum(r.is_decoding for r in plan)
            self.scheduler.advance(plan)
            sampling = self.runner.sample(launched)
            for request in sampling.requests:
                request.num_pending = 1
            self._in_flight = StepInFlight(sampling, started, num_decodes, num_prompt_tokens)
            self._num_steps += 1
            self._num_prompt_tokens += num_prompt_tokens
            if not self._async:
                outputs += self._commit()
        return outputs

    def _commit(self) -> list[RequestOutput]:
        """Read the tokens of the in-flight step, if there is one, and append them to its requests."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        sampled = step.sampling.wait()
        moved = self.scheduler.commit(sampled)
        self._num_generated_tokens += len(moved)
        outputs = [request.output([token] if (token := sampled[request]) >= 0 else []) for request in moved]
        now = time.perf_counter()
        # The step ran from its start, or from the end of the step before it if that was later.
        self._pacer.observe(now - max(step.started, self._last_commit), step.num_decodes, step.num_prompt_tokens)
        self._last_commit = now
        return outputs

    def adapter_ready(self, digest: str) -> bool:
        return self.adapters.is_resident(digest)

    def unload_adapter(self, digest: str) -> bool:
        """Free the adapter's pages. Return False while a request uses them; they are then evicted when their room is
        needed.
        """
        return self.adapters.evict(digest)

    def state(self) -> EngineState:
        scheduler, cache, pool = self.scheduler, self.scheduler.cache, self.adapters
        return EngineState(
            generation=pool.generation,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free,
            resident_adapters=tuple(pool.resident),
            num_adapter_pages=pool.num_pages,
            num_free_adapter_pages=pool.num_free_pages,
            num_adapter_loads=pool.num_loads,
            num_adapter_evictions=pool.num_evictions,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            prefix_hit_tokens=cache.hit_tokens,
            prefix_query_tokens=cache.query_tokens,
        )

    def close(self) -> None:
        self.adapters.close()
