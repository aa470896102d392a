"""Metrics of the adapter tiers: device pages, host memory, loads, evictions, waits."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LOAD_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
PREFIX = "loraplex_engine_adapter"


class TierMetrics:
    """Prometheus metrics of the two tiers. Their labels have a fixed set of values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages = Gauge(f"{PREFIX}_pages", "Device pages of adapters.", ["state"], registry=registry)
        self.reserved = Gauge(f"{PREFIX}_pages_reserved", "Pages for which adapters wait.", registry=registry)
        self.host_bytes = Gauge(f"{PREFIX}_host_bytes", "Bytes of adapters in host memory.", registry=registry)
        self.host_adapters = Gauge(f"{PREFIX}_host_resident", "Adapters in host memory.", registry=registry)
        self.host_loads = Counter(f"{PREFIX}_host_loads", "Loads into host memory.", ["result"], registry=registry)
        self.host_load_seconds = Histogram(
            f"{PREFIX}_host_load_seconds",
            "Time of a load into host memory, without its wait for a thread.",
            buckets=LOAD_BUCKETS,
            registry=registry,
        )
        self.evictions = Counter(
            f"{PREFIX}_evictions", "Adapters evicted from device memory.", ["reason"], registry=registry
        )
        self.host_evictions = Counter(
            f"{PREFIX}_host_evictions", "Adapters evicted from host memory.", registry=registry
        )
        self.page_waits = Counter(
            f"{PREFIX}_page_waits", "Adapters that were placed after a wait for pages.", registry=registry
        )
        self.page_wait_seconds = Counter(
            f"{PREFIX}_page_wait_seconds", "Sum of the waits for pages, in seconds.", registry=registry
        )
