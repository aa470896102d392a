"""Prometheus metrics of the gateway, in a registry of each application, without global state."""

from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.billing.ledger import Ledger
from gateway.billing.usage_row import UsageRow
from gateway.fleet.health import Health
from gateway.fleet.queue import Gate
from gateway.fleet.registry import Registry
from gateway.process.loop_lag import LoopLag

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Metrics with bounded labels: routes are patterns, tenants are names that an operator chose."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engines: Registry | None = None
        self._requests = Counter(
            "loraplex_gateway_http_requests",
            "HTTP requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._latency = Histogram(
            "loraplex_gateway_http_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "loraplex_gateway_http_in_flight", "HTTP requests being answered.", registry=self.registry
        )
        self._finished = Counter(
            "loraplex_gateway_inference_requests",
            "Admitted inference requests by how they ended.",
            ["tenant", "endpoint", "status"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "loraplex_gateway_tokens",
            "Tokens charged, by kind: prompt, cached (a part of prompt), completion.",
            ["tenant", "kind"],
            registry=self.registry,
        )
        self._ttft = Histogram(
            "loraplex_gateway_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._refusals = Counter(
            "loraplex_gateway_quota_refusals",
            "Requests refused for a limit: requests, tokens, concurrency or budget.",
            ["tenant", "limit"],
            registry=self.registry,
        )
        self._without_redis = Counter(
            "loraplex_gateway_quota_fallbacks",
            "Requests admitted while Redis was away, by how: open or local.",
            ["mode"],
            registry=self.registry,
        )
        self._quota_up = Gauge(
            "loraplex_gateway_quota_up",
            "1 if Redis answers, 0 while limits are as configured without.",
            registry=self.registry,
        )
        self._loop_lag = Gauge(
            "loraplex_gateway_loop_lag_seconds",
            "How late the event loop ran its newest timer.",
            registry=self.registry,
        )
        self._loop_lag_max = Gauge(
            "loraplex_gateway_loop_lag_max_seconds",
            "The event loop's longest stall in the last minute.",
            registry=self.registry,
        )
        self._part_up = Gauge(
            "loraplex_gateway_part_up",
            "1 if the part is well, as /readyz has it: database, redis, quota, engines, tokenizer, ledger, process.",
            ["part"],
            registry=self.registry,
        )
        self._failed_logins = Counter(
            "loraplex_gateway_wrong_keys", "Requests with an API key that opens nothing.", registry=self.registry
        )
        self._refused_logins = Counter(
            "loraplex_gateway_refused_keys",
            "Requests refused because of wrong keys from their address; their own secret was not compared.",
            registry=self.registry,
        )
        self._engine_up = Gauge(
            "loraplex_gateway_engine_up",
            "1 if the engine answers its health check.",
            ["engine"],
            registry=self.registry,
        )
        self._engine_refused = Gauge(
            "loraplex_gateway_engine_refused",
            "1 if the engine lives and gets no requests because of its model, its version or its secret.",
            ["engine"],
            registry=self.registry,
        )
        self._engine_in_flight = Gauge(
            "loraplex_gateway_engine_in_flight",
            "This gateway's requests with the engine.",
            ["engine"],
            registry=self.registry,
        )
        self._engine_available = Gauge(
            "loraplex_gateway_engine_available",
            "1 if the engine is given requests: it is up and its circuit breaker is closed.",
            ["engine"],
            registry=self.registry,
        )
        self._queue_waiting = Gauge(
            "loraplex_gateway_queue_waiting", "Requests that wait for an engine to have room.", registry=self.registry
        )
        self._ledger_waiting = Gauge(
            "loraplex_gateway_ledger_waiting_rows", "Usage rows not yet in the database.", registry=self.registry
        )
        self._ledger_journal = Gauge(
            "loraplex_gateway_ledger_journal_bytes", "Usage on this host's disk.", registry=self.registry
        )
        self._ledger_rejected = Gauge(
            "loraplex_gateway_ledger_rejected_events",
            "Usage events that this process set aside in usage_rejected.",
            registry=self.registry,
        )
        self._mismatches = Counter(
            "loraplex_gateway_adapter_mismatches",
            "Answers for which the engine read another adapter than the request's.",
            ["engine"],
            registry=self.registry,
        )
        self._quarantined = Counter(
            "loraplex_gateway_quarantined",
            "Requests and adapters put into quarantine because engines died with them.",
            ["kind"],
            registry=self.registry,
        )
        self._slow_readers = Counter(
            "loraplex_gateway_slow_readers_cut",
            "Clients cut off because they read their answers too slowly.",
            registry=self.registry,
        )
        self._bodies = Gauge(
            "loraplex_gateway_request_body_bytes", "memory that large request bodies hold", registry=self.registry
        )
        self._unread = Gauge(
            "loraplex_gateway_unread_answer_bytes",
            "Bytes of answers that clients have not read.",
            registry=self.registry,
        )
        self._connections = Gauge(
            "loraplex_gateway_connections", "Open connections of clients.", registry=self.registry
        )
        self._closed_connections = Counter(
            "loraplex_gateway_connections_closed",
            "Connections closed because too many were open.",
            registry=self.registry,
        )
        self._delayed = Counter(
            "loraplex_gateway_delayed_requests",
            "Requests that waited because their key or address sends too many that no engine serves.",
            registry=self.registry,
        )
        # Caches for the metrics of every request, because the library looks up each child under a lock. They grow no
        # larger than the library's own tables.
        self._requests_of = cache(self._requests.labels)
        self._latency_of = cache(self._latency.labels)
        self._finished_of = cache(self._finished.labels)
        self._tokens_of = cache(self._tokens.labels)

    def arrived(self) -> None:
        self._in_flight.inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._in_flight.dec()
        self._requests_of(method, route, status).inc()
        self._latency_of(route).observe(seconds)

    def finished(self, row: UsageRow) -> None:
        self._finished_of(row.tenant, row.endpoint, row.status).inc()
        self._tokens_of(row.tenant, "prompt").inc(row.prompt_tokens)
        self._tokens_of(row.tenant, "cached").inc(row.cached_tokens)
        self._tokens_of(row.tenant, "completion").inc(row.completion_tokens)
        if row.ttft_ms is not None:
            self._ttft.labels(row.endpoint).observe(row.ttft_ms / 1000)

    def refused(self, tenant: str, limit: str) -> None:
        self._refusals.labels(tenant, limit).inc()

    def admitted_without_redis(self, mode: str) -> None:
        """Count a request that was admitted without Redis. mode: "open" or "local"."""
        self._without_redis.labels(mode).inc()

    def login_failed(self) -> None:
        self._failed_logins.inc()

    def login_refused(self) -> None:
        self._refused_logins.inc()

    def watch_loop(self, lag: LoopLag) -> None:
        self._loop_lag.set_function(lambda: lag.last)
        self._loop_lag_max.set_function(lambda: lag.longest)

    def adapter_mismatch(self, engine: str) -> None:
        self._mismatches.labels(engine).inc()

    def quarantined(self, kind: str) -> None:
        """Count a quarantine. kind: "request" or "adapter"."""
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

    def watch_quota(self, up: Callable[[], bool]) -> None:
        self._quota_up.set_function(up)

    def watch(self, registry: Registry, ledger: Ledger, gate: Gate) -> None:
        """Read these objects each time that the metrics are scraped."""
        self._engines = registry
        self._queue_waiting.set_function(lambda: gate.waiting)
        self._ledger_waiting.set_function(lambda: ledger.waiting)
        self._ledger_journal.set_function(lambda: ledger.journal_bytes)
        self._ledger_rejected.set_function(lambda: ledger.rejected)

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format."""
        # Drop the engines that have been removed.
        self._engine_up.clear()
        self._engine_available.clear()
        self._engine_refused.clear()
        self._engine_in_flight.clear()
        for engine in self._engines.engines if self._engines is not None else ():
            self._engine_up.labels(engine.url).set(engine.is_up)
            self._engine_available.labels(engine.url).set(engine.available)
            self._engine_refused.labels(engine.url).set(engine.health is Health.MISCONFIGURED)
            self._engine_in_flight.labels(engine.url).set(engine.in_flight)
        return generate_latest(self.registry)
