"""Objects whose state the metrics read each time that they are scraped."""

from collections.abc import Iterator

from gateway.api.requests.memory import BodyMemory
from gateway.components import Billing, Serving
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.health import Health
from gateway.metrics import EngineFigures, Metrics


def watch_parts(metrics: Metrics, billing: Billing, serving: Serving, body_memory: BodyMemory) -> None:
    """Let the metrics read the engines, the queue for them, the ledger, the quota and the memory of bodies."""
    queues, ledger = serving.queues, billing.ledger
    metrics.watch_engines(lambda: _engine_figures(serving.registry))
    metrics.watch_queue(lambda: queues.waiting, lambda: queues.longest_wait)
    queues.observe_wait = metrics.queued
    metrics.watch_ledger(lambda: ledger.waiting, lambda: ledger.journal_bytes, lambda: ledger.rejected)
    metrics.watch_quota(lambda: not billing.quota.away)
    metrics.watch_bodies(lambda: body_memory.held)


def _engine_figures(registry: Registry) -> Iterator[EngineFigures]:
    for engine in registry.engines:
        health = engine.condition.health
        yield EngineFigures(
            url=engine.url,
            is_up=None if health is Health.ASLEEP else engine.is_up,
            is_available=engine.available,
            is_refused=health is Health.MISCONFIGURED,
            is_drained=engine.drained is not None,
            in_flight=engine.requests.in_flight,
        )
