"""Prometheus metrics of one engine, in a registry of its own, so that two engines in one process stay separate."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from adapters.tiers.state import EVICTION_REASONS, LoadResult, TierState
from engine.config import MetricsNames
from engine.metrics.quick_histogram import QuickHistogram
from engine.metrics.tiers import TierMetrics
from engine.metrics.vllm import VllmMetrics
from engine.scheduling.drafter import OTHERS, DraftCount, Outcome
from engine.scheduling.policies.tenants import FairShareSnapshot
from engine.scheduling.request import BASE_SERVED, RequestOutput
from wire.digests import digest_name

STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PREFIX = "loraplex_engine"


class Metrics:
    """Metrics of one engine. Events update the counters; a scrape updates the gauges, and the counters that the engine
    keeps itself.
    """

    def __init__(self, names: MetricsNames = "loraplex") -> None:
        self._registry = registry = CollectorRegistry()
        self.vllm = VllmMetrics(registry) if names == "vllm" else None
        # CPU, memory, open files and start time of the process.
        ProcessCollector(registry=registry)
        self.running = Gauge(f"{PREFIX}_requests_running", "Requests in the batch.", registry=registry)
        self.waiting = Gauge(f"{PREFIX}_requests_waiting", "Requests in the queue.", registry=registry)
        self.kv_used = Gauge(f"{PREFIX}_kv_blocks_used", "KV cache blocks held by requests.", registry=registry)
        self.kv_total = Gauge(f"{PREFIX}_kv_blocks", "KV cache blocks.", registry=registry)
        self.adapters = Gauge(f"{PREFIX}_adapters_resident", "Adapters in device memory.", registry=registry)
        self.preemptions = Counter(
            f"{PREFIX}_preemptions", "Requests put back in the queue to free KV cache blocks.", registry=registry
        )
        self.adapter_loads = Counter(
            f"{PREFIX}_adapter_loads", "Adapters loaded into device memory.", registry=registry
        )
        self.num_met = Counter(
            f"{PREFIX}_ttft_target_met", "Sequences whose first token came within their target.", registry=registry
        )
        self.num_missed = Counter(
            f"{PREFIX}_ttft_target_missed", "Sequences without a first token within their target.", registry=registry
        )
        self._tenants = _tenant_gauges(registry)
        self._counted: dict[Counter, float] = {}
        self.adapter_load_failures = Counter(
            f"{PREFIX}_adapter_load_failures", "Adapter loads that failed.", registry=registry
        )
        self._tiers = TierMetrics(registry)
        self.prompt_tokens = Counter(f"{PREFIX}_prompt_tokens", "Prompt tokens of requests.", registry=registry)
        self.cached_tokens = Counter(
            f"{PREFIX}_prompt_tokens_cached", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.generation_tokens = Counter(f"{PREFIX}_generation_tokens", "Tokens generated.", registry=registry)
        self._drafted, self._accepted, self._draft_steps = _draft_counters(registry)
        self.finished = Counter(
            f"{PREFIX}_requests_finished",
            "Finished sequences, including those whose client disconnected.",
            ["finish_reason"],
            registry=registry,
        )
        self.step_seconds = Histogram(
            f"{PREFIX}_step_seconds", "Time of one engine step.", buckets=STEP_BUCKETS, registry=registry
        )
        self.time_to_first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "Seconds from a request's arrival at this engine to its first token, with its adapter's load.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = QuickHistogram(
            f"{PREFIX}_inter_token_latency_seconds",
            "Seconds between two deliveries of tokens of one sequence.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def watch_core(self, pid: int) -> None:
        """Export the CPU time, memory and open files of a core's process."""
        ProcessCollector("core", lambda: pid, registry=self._registry)

    def observe_step(self, seconds: float, outputs: Iterable[RequestOutput]) -> None:
        """Record a step."""
        self.step_seconds.observe(seconds)
        tokens = 0
        for output in outputs:
            tokens += len(output.token_ids)
            if output.token_ids and output.num_output_tokens == len(output.token_ids):
                self.prompt_tokens.inc(output.num_prompt_tokens)
                self.cached_tokens.inc(output.num_cached_tokens)
        if tokens:
            self.generation_tokens.inc(tokens)

    def show_tenants(self, tenants: Iterable[FairShareSnapshot]) -> None:
        """Show these tenants only, so that the label has a bounded number of values."""
        for gauge in self._tenants.values():
            gauge.clear()
        for tenant in tenants:
            for name, gauge in self._tenants.items():
                if (value := getattr(tenant, name)) is not None:
                    gauge.labels(tenant.tenant_id).set(value)

    def host_load_ended(self, result: LoadResult, seconds: float) -> None:
        """Record the end of a load into host memory. Called on the load's thread."""
        self._tiers.host_loads.labels(result).inc()
        self._tiers.host_load_seconds.observe(seconds)
        if result != "loaded":
            self.adapter_load_failures.inc()

    def show_tiers(self, state: TierState) -> None:
        tiers = self._tiers
        for name, pages in state.pages.items():
            tiers.pages.labels(name).set(pages)
        tiers.reserved.set(state.reserved_pages)
        tiers.host_bytes.set(state.host.num_bytes)
        tiers.host_adapters.set(state.host.num_adapters)
        for reason in EVICTION_REASONS:
            self.count(tiers.evictions.labels(reason), state.evictions.get(reason, 0))
        self.count(tiers.host_evictions, state.host.evictions)
        self.count(tiers.page_waits, state.page_waits)
        self.count(tiers.page_wait_seconds, state.page_wait_seconds)

    def show_drafts(self, counts: Iterable[DraftCount], steps: Mapping[Outcome, int]) -> None:
        """Update the counters of speculative decoding, whose labels the engine bounds."""
        for adapter, drafted, accepted in counts:
            label = adapter if adapter == OTHERS else digest_name(adapter) if adapter else BASE_SERVED
            self.count(self._drafted.labels(label), drafted)
            self.count(self._accepted.labels(label), accepted)
        for outcome, number in steps.items():
            self.count(self._draft_steps.labels(outcome), number)

    def count(self, counter: Counter, total: float) -> None:
        """Raise a counter to the engine's own total."""
        counter.inc(max(0, total - self._counted.get(counter, 0)))
        self._counted[counter] = total

    def render(self) -> bytes:
        return generate_latest(self._registry)


def _draft_counters(registry: CollectorRegistry) -> tuple[Counter, Counter, Counter]:
    """Return the counters of drafts, of accepted drafts, and of steps by outcome."""
    computed, accepted = "Drafts computed for the requests of an adapter.", "Drafts that became tokens of an answer."
    outcomes = "Steps with decodes, by whether they had drafts or why not."
    return (
        Counter(f"{PREFIX}_draft_tokens", computed, ["adapter"], registry=registry),
        Counter(f"{PREFIX}_draft_tokens_accepted", accepted, ["adapter"], registry=registry),
        Counter(f"{PREFIX}_draft_steps", outcomes, ["outcome"], registry=registry),
    )


def _tenant_gauges(registry: CollectorRegistry) -> dict[str, Gauge]:
    """Return the gauges with a tenant's label, by the field of `FairShareSnapshot`."""
    texts = {
        "counter": "Service of a tenant divided by its weight.",
        "waiting": "Waiting requests of a tenant.",
        "oldest_wait": "Longest wait of a tenant's waiting requests, in seconds.",
        "share": "A tenant's part of the service of the last minute.",
        "entitled": "A weight's part of the weights of the active tenants.",
        "goodput": "Part of the last minute's sequences with a target whose first token came in time.",
    }
    return {name: Gauge(f"{PREFIX}_tenant_{name}", text, ["tenant"], registry=registry) for name, text in texts.items()}
