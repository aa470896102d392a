"""Gauges under vLLM's names, by which inference gateways such as llm-d choose among engines.

Names and labels are those of the Gateway API inference extension's model server protocol (proposal 003) and of the
metrics extractor of llm-d's router, which reads vLLM's names by default.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge

from engine.state import EngineState


class VllmMetrics:
    """The gauges of one engine. A scrape updates them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["model_name", "engine"]
        self._running = Gauge("vllm:num_requests_running", "Requests in the batch.", labels, registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests in the queue.", labels, registry=registry)
        self._kv_usage = Gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all.", labels, registry=registry)
        self._adapters = Gauge(
            "vllm:lora_requests_info",
            "Adapters; the value is the time of the reading.",
            ["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
            registry=registry,
        )
        self._cache = Gauge("vllm:cache_config_info", "KV cache.", ["block_size", "num_gpu_blocks"], registry=registry)

    def show(self, state: EngineState, model: str, adapters: Sequence[str], block_size: int) -> None:
        """Set the gauges. model: the base model's name. adapters: every name of each adapter on the device."""
        for gauge, value in (
            (self._running, state.num_running),
            (self._waiting, state.num_waiting),
            (self._kv_usage, 1 - state.num_free_blocks / max(1, state.num_blocks)),
        ):
            gauge.labels(model, "0").set(value)
        self._cache.labels(str(block_size), str(state.num_blocks)).set(1)
        # Only the present series stays. A comma separates names, so a name with one cannot be listed.
        self._adapters.clear()
        listed = ",".join(name for name in adapters if "," not in name)
        self._adapters.labels(str(_room(state)), "", listed).set_to_current_time()


def _room(state: EngineState) -> int:
    """Return about how many adapters fit on the device at once, by the size of those there."""
    number = len(state.resident_adapters)
    if not number:
        return max(1, state.num_adapter_pages)
    pages_each = max(1.0, (state.num_adapter_pages - state.num_free_adapter_pages) / number)
    return max(number, int(state.num_adapter_pages / pages_each))
