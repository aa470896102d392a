"""An engine's constants and counters, as its core reports them. No torch and no msgspec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adapters.tiers.state import TierState
from engine.config import EngineConfig
from engine.scheduling.drafter import DraftCount, Outcome
from engine.scheduling.kv_cache import prefix_keys
from engine.scheduling.policies.tenants import FairShareSnapshot
from engine.scheduling.preemption_counts import PreemptionCount


@dataclass(slots=True)
class SecondSums:
    """Sums of one second: the fields of `wire.responses.StepSecond`, without the need of msgspec."""

    at: int
    roofline: float | None = None
    decodes: int = 0
    prompt_tokens: int = 0
    longest: float = 0.0
    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Constants of a loaded engine. page_bytes: device memory of a page of an adapter."""

    config: EngineConfig
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    page_bytes: int

    def prefix_keys(
        self,
        prompt_token_ids: Sequence[int],
        *,
        adapter_digest: str | None,
        tenant_id: str,
        cache_salt: str,
        adapter_start: int = 0,
    ) -> list[bytes]:
        """Return the prompt's keys in the prefix cache; empty if it is disabled. May be called from any thread."""
        if not self.config.enable_prefix_caching:
            return []
        return prefix_keys(
            prompt_token_ids,
            self.config.block_size,
            adapter_digest=adapter_digest,
            tenant_id=tenant_id,
            cache_salt=cache_salt,
            adapter_start=adapter_start,
        )


@dataclass(frozen=True, slots=True)
class EngineState:
    """Snapshot of the counters, for /state and /metrics. `residency_version` changes with the set of resident
    adapters. num_met, num_missed: see `TargetCounts`. draft_steps: steps with decodes by the outcome of their drafts;
    empty without speculative decoding.
    """

    residency_version: int
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
    num_met: int
    num_missed: int
    tenants: tuple[FairShareSnapshot, ...]
    preempted: tuple[PreemptionCount, ...]
    tiers: TierState
    recent_steps: tuple[SecondSums, ...] = ()
    drafts: tuple[DraftCount, ...] = ()
    draft_steps: Mapping[Outcome, int] = field(default_factory=dict)
