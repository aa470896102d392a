"""Prometheus metrics of the gateway, in a registry of each application, without global state."""

import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.metric_labels import TenantLabels, method_label
from gateway.usage_row import UsageRow

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# Micro-units (`UsageRow.cost`) in a unit of the currency.
MICRO = 1_000_000
# Maximum number of tenants in the metric of used budgets.
MAX_BUDGETS = 100
# Histograms with series by tenant have fewer buckets.
TENANT_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class EngineFigures(NamedTuple):
    """Figures of an engine. is_up: None while it sleeps, when it has no such metric."""

    url: str
    is_up: bool | None
    is_available: bool
    is_refused: bool
    is_drained: bool
    in_flight: int


class EngineGauges:
    """Gauges with a series for each engine on record."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"loraplex_gateway_engine_{name}", text, ["engine"], registry=registry)

        self._up = gauge("up", "1 if the engine answers its health check.")
        self._refused = gauge(
            "refused", "1 if the engine runs and gets no requests because of its model, its version or its secret."
        )
        self._drained = gauge(
            "drained", "1 if an operator drained the engine: it gets no new requests until it is resumed."
        )
        self._in_flight = gauge("in_flight", "Requests of this gateway that the engine works on.")
        self._available = gauge(
            "available", "1 if the engine gets requests: it is up and its circuit breaker is closed."
        )

    def update(self, engines: Iterable[EngineFigures]) -> None:
        """Set the gauges to these engines' figures, and remove the series of all others."""
        for each in (self._up, self._refused, self._drained, self._in_flight, self._available):
            each.clear()
        for engine in engines:
            if engine.is_up is not None:
                self._up.labels(engine.url).set(engine.is_up)
            self._available.labels(engine.url).set(engine.is_available)
            self._refused.labels(engine.url).set(engine.is_refused)
            self._drained.labels(engine.url).set(engine.is_drained)
            self._in_flight.labels(engine.url).set(engine.in_flight)


class Metrics:
    """Metrics with bounded labels: routes are patterns, and `gateway/metric_labels.py` caps tenants and models."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # CPU, memory, open files and start time of the process.
        ProcessCollector(registry=self.registry)
        self._labels = TenantLabels()
        self._engines = EngineGauges(self.registry)
        self._read_engines: Callable[[], Iterable[EngineFigures]] = tuple
        self._make_http()
        self._make_inference()
        self._make_limits()
        self._make_queue()
        self._make_process()
        # Caches for the metrics of every request, because the library looks up each child under a lock. They are no
        # larger than the library's own tables.
        self._requests_of = cache(self._requests.labels)
        self._latency_of = cache(self._latency.labels)
        self._finished_of = cache(self._finished.labels)
        self._tokens_of = cache(self._tokens.labels)
        self._model_requests_of = cache(self._model_requests.labels)
        self._cost_of = cache(self._cost.labels)

    def _make_http(self) -> None:
        self._requests = self._counter(
            "loraplex_gateway_http_requests", "HTTP requests answered.", "method", "route", "status"
        )
        self._latency = self._histogram(
            "loraplex_gateway_http_request_seconds",
            "Time from the arrival of a request to the end of its answer.",
            "route",
        )
        self._in_flight = self._gauge("loraplex_gateway_http_in_flight", "HTTP requests in progress.")
        self._connections = self._gauge("loraplex_gateway_connections", "Open connections of clients.")
        self._closed_connections = self._counter(
            "loraplex_gateway_connections_closed", "Client connections closed because too many were open."
        )
        self._delayed = self._counter(
            "loraplex_gateway_delayed_requests",
            "Requests that waited because their key or address sends too many that no engine serves.",
        )
        self._bodies = self._gauge("loraplex_gateway_request_body_bytes", "Memory held by large request bodies.")
        self._unread = self._gauge(
            "loraplex_gateway_unread_answer_bytes", "Bytes of answers that clients have not yet read."
        )
        self._slow_readers = self._counter(
            "loraplex_gateway_slow_readers_cut", "Clients cut off because they read their answers too slowly."
        )

    def _make_inference(self) -> None:
        self._finished = self._counter(
            "loraplex_gateway_inference_requests",
            "Admitted inference requests, by ending.",
            "tenant",
            "endpoint",
            "status",
        )
        self._tokens = self._counter(
            "loraplex_gateway_tokens",
            "Tokens charged, by kind: prompt, cached (a part of prompt), completion.",
            "tenant",
            "kind",
        )
        self._ttft = self._histogram(
            "loraplex_gateway_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            "endpoint",
        )
        self._tenant_ttft = self._histogram(
            "loraplex_gateway_tenant_time_to_first_token_seconds",
            "Time from a request's arrival to its first token, by tenant.",
            "tenant",
            buckets=TENANT_SECONDS,
        )
        self._target_met = self._counter(
            "loraplex_gateway_ttft_target_met", "Streams whose first token came within their target.", "tenant"
        )
        self._target_missed = self._counter(
            "loraplex_gateway_ttft_target_missed",
            "Streams whose first token came after their target or never, refused ones too.",
            "tenant",
        )
        self._model_requests = self._counter(
            "loraplex_gateway_model_requests", "Admitted inference requests, by tenant and model.", "tenant", "model"
        )
        self._cost = self._counter(
            "loraplex_gateway_cost", "Cost of requests in the currency of the deployment.", "tenant"
        )
        self._mismatches = self._counter(
            "loraplex_gateway_adapter_mismatches",
            "Answers for which the engine read an adapter other than the request's.",
            "engine",
        )
        self._golden = self._counter(
            "loraplex_gateway_golden_checks",
            "Golden answers of adapters that were checked again, by result: same or different.",
            "tenant",
            "result",
        )
        self._quarantined = self._counter(
            "loraplex_gateway_quarantined",
            "Requests, adapters and tenants put into quarantine because engines died with them.",
            "kind",
        )

    def _make_limits(self) -> None:
        self._refusals = self._counter(
            "loraplex_gateway_quota_refusals",
            "Requests refused because of a limit: requests, tokens, concurrency or budget.",
            "tenant",
            "limit",
        )
        self._only_counted = self._counter(
            "loraplex_gateway_refusals_only_counted",
            "Refused requests without a row in the request log, because of its limits.",
        )
        self._over_budget: set[str] = set()
        self._num_wrong_keys = 0
        self._budget_used = self._gauge(
            "loraplex_gateway_budget_used_ratio",
            "Share of its fullest budget that a tenant has spent: the 100 largest, from one gateway at a time.",
            "tenant",
        )
        self._without_redis = self._counter(
            "loraplex_gateway_quota_fallbacks",
            "Requests admitted while Redis was away, by mode: open or local.",
            "mode",
        )
        self._quota_up = self._gauge(
            "loraplex_gateway_quota_up", "1 if Redis answers; 0 while limits follow LORAPLEX_QUOTA_FALLBACK."
        )
        self._wrong_keys = self._counter(
            "loraplex_gateway_wrong_keys", "Requests with an API key that was never issued."
        )
        self._refused_keys = self._counter(
            "loraplex_gateway_refused_keys",
            "Requests refused, without a comparison of their secret, because of wrong keys from their address.",
        )

    def _make_queue(self) -> None:
        self._queue_waiting = self._gauge("loraplex_gateway_queue_waiting", "Requests that wait for room on an engine.")
        self._queue_wait = self._gauge(
            "loraplex_gateway_queue_wait_seconds", "Longest wait of the requests that still wait for room on an engine."
        )
        self._queue_time = self._histogram(
            "loraplex_gateway_queue_time_seconds", "Wait of admitted requests for room on an engine."
        )

    def _make_process(self) -> None:
        self._loop_lag = self._gauge("loraplex_gateway_loop_lag_seconds", "Delay of the event loop's last timer.")
        self._loop_lag_max = self._gauge(
            "loraplex_gateway_loop_lag_max_seconds", "Longest stall of the event loop in the last minute."
        )
        self._loop_stalled = self._counter(
            "loraplex_gateway_loop_stalled_seconds_total",
            "Seconds of the event loop's stalls of more than 100 ms: computing, waiting_for_cpu or blocked.",
            "cause",
        )
        self._part_up = self._gauge(
            "loraplex_gateway_part_up",
            "1 if /readyz reports the part as ok: database, redis, quota, engines, tokenizer, ledger, process.",
            "part",
        )
        self._ledger_waiting = self._gauge(
            "loraplex_gateway_ledger_waiting_rows", "Usage rows not yet in the database."
        )
        self._ledger_journal = self._gauge(
            "loraplex_gateway_ledger_journal_bytes", "Size of the usage journal on this host's disk."
        )
        self._ledger_rejected = self._gauge(
            "loraplex_gateway_ledger_rejected_events", "Usage events that this process moved to usage_rejected."
        )
        self._disk_free = self._gauge(
            "loraplex_gateway_disk_free_bytes", "Free bytes of a disk: adapter_store or journal.", "disk"
        )
        self._disk_size = self._gauge(
            "loraplex_gateway_disk_size_bytes", "Size of a disk: adapter_store or journal.", "disk"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def arrived(self) -> None:
        self._in_flight.inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._in_flight.dec()
        self._requests_of(method_label(method), route, status).inc()
        self._latency_of(route).observe(seconds)

    def finished(self, row: UsageRow) -> None:
        tenant = self._labels.tenant(row.tenant)
        self._finished_of(tenant, row.endpoint, row.status).inc()
        self._tokens_of(tenant, "prompt").inc(row.prompt_tokens)
        self._tokens_of(tenant, "cached").inc(row.cached_tokens)
        self._tokens_of(tenant, "completion").inc(row.completion_tokens)
        model = self._labels.model(row.tenant, row.model, is_adapter=row.version is not None)
        self._model_requests_of(tenant, model).inc()
        self._cost_of(tenant).inc(row.cost / MICRO)
        if row.ttft_ms is not None:
            self._ttft.labels(row.endpoint).observe(row.ttft_ms / 1000)
            self._tenant_ttft.labels(tenant).observe(row.ttft_ms / 1000)

    def target_ended(self, tenant_name: str, is_met: bool | None) -> None:
        """Count a request with a target of the time to first token. is_met: None if it does not count."""
        if is_met is not None:
            counter = self._target_met if is_met else self._target_missed
            counter.labels(self._labels.tenant(tenant_name)).inc()

    def refused(self, tenant_name: str, limit: str) -> None:
        """Count a refusal. limit: the class of the limit (`quota/refusals.py`, `counted_as`)."""
        if limit == "budget":
            self._over_budget.add(tenant_name)
        self._refusals.labels(self._labels.tenant(tenant_name), limit).inc()

    def refusals_only_counted(self, number: int) -> None:
        self._only_counted.inc(number)

    def admitted_without_redis(self, mode: str) -> None:
        """Count a request that was admitted without Redis. mode: "open" or "local"."""
        self._without_redis.labels(mode).inc()

    def take_over_budget(self) -> set[str]:
        """Return the tenants that were refused because of a budget since the last call."""
        found, self._over_budget = self._over_budget, set()
        return found

    def budgets_used(self, ratios: Mapping[str, float]) -> None:
        """Set the metric to the largest MAX_BUDGETS of these shares by tenant; remove all others."""
        self._budget_used.clear()
        for name in heapq.nlargest(MAX_BUDGETS, ratios, key=lambda name: ratios[name]):
            self._budget_used.labels(name).set(ratios[name])

    @property
    def wrong_keys(self) -> int:
        """Return the number of wrong keys so far."""
        return self._num_wrong_keys

    def count_wrong_key(self) -> None:
        self._num_wrong_keys += 1
        self._wrong_keys.inc()

    def count_refused_key(self) -> None:
        self._refused_keys.inc()

    def watch_loop(self, last: Callable[[], float], longest: Callable[[], float]) -> None:
        self._loop_lag.set_function(last)
        self._loop_lag_max.set_function(longest)

    def loop_stalled(self, cause: str, seconds: float) -> None:
        """Count a part of a stall. cause: "computing", "waiting_for_cpu" or "blocked"."""
        self._loop_stalled.labels(cause).inc(seconds)

    def adapter_mismatch(self, engine: str) -> None:
        """Count an answer with another adapter than the request's. engine: its URL."""
        self._mismatches.labels(engine).inc()

    def golden_checked(self, tenant_name: str, num_prompts: int, num_different: int) -> None:
        """Count a check of golden answers."""
        tenant = self._labels.tenant(tenant_name)
        self._golden.labels(tenant, "same").inc(num_prompts - num_different)
        self._golden.labels(tenant, "different").inc(num_different)

    def quarantined(self, kind: str) -> None:
        """Count a quarantine. kind: "request", "adapter" or "tenant"."""
        self._quarantined.labels(kind).inc()

    def slow_reader_cut(self) -> None:
        self._slow_readers.inc()

    def delayed(self) -> None:
        self._delayed.inc()

    def connection_closed(self) -> None:
        self._closed_connections.inc()

    def watch_connections(self, number: Callable[[], int]) -> None:
        self._connections.set_function(number)

    def watch_bodies(self, held: Callable[[], int]) -> None:
        self._bodies.set_function(held)

    def watch_deliveries(self, unread: Callable[[], int]) -> None:
        self._unread.set_function(unread)

    def part_up(self, part: str, up: bool) -> None:
        self._part_up.labels(part).set(up)

    def disk(self, name: str, free: int, size: int) -> None:
        """Set the free bytes and the size of a disk. name: "adapter_store" or "journal"."""
        self._disk_free.labels(name).set(free)
        self._disk_size.labels(name).set(size)

    def watch_quota(self, up: Callable[[], bool]) -> None:
        self._quota_up.set_function(up)

    def watch_engines(self, engines: Callable[[], Iterable[EngineFigures]]) -> None:
        self._read_engines = engines

    def watch_queue(self, waiting: Callable[[], int], longest_wait: Callable[[], float]) -> None:
        self._queue_waiting.set_function(waiting)
        self._queue_wait.set_function(longest_wait)

    def queued(self, seconds: float) -> None:
        """Observe an admitted request's wait for room on an engine."""
        self._queue_time.observe(seconds)

    def watch_ledger(
        self, waiting: Callable[[], int], journal_bytes: Callable[[], int], rejected: Callable[[], int]
    ) -> None:
        self._ledger_waiting.set_function(waiting)
        self._ledger_journal.set_function(journal_bytes)
        self._ledger_rejected.set_function(rejected)

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        self._engines.update(self._read_engines())
        return generate_latest(self.registry)
