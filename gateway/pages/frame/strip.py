"""Status strip of every page: parts and engines with the time of their last change. It is read from memory only."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.health import Health as EngineHealth
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.fleet.queueing.waits import EngineQueues, Waits

Level = Literal["good", "warn", "bad"]

TITLES = {
    "database": "Database",
    "redis": "Redis",
    "quota": "Limits",
    "redis_settings": "Redis settings",
    "engines": "Engines",
    "tokenizer": "Tokenizer",
    "adapter_store": "Adapter store",
    "ledger": "Ledger",
    "process": "Gateway",
}
# Titles that take the plural.
PLURAL = {"Engines", "Limits", "Redis settings"}
# Parts without which requests are refused or not charged. The state of Redis alone is a warning: `quota` says whether
# requests are served without it.
NEEDED = {"database", "quota", "engines", "ledger", "tokenizer"}


class PartState(NamedTuple):
    """A part of `/readyz`. text: its fault, or "ok" with a remark."""

    name: str
    title: str
    level: Level
    text: str
    since: datetime


class EngineView(NamedTuple):
    """An engine's state. state: a word or two; until: the end of a pause of its circuit breaker."""

    url: str
    state: str
    level: Level
    reason: str
    since: datetime
    until: datetime | None


class Status(NamedTuple):
    """State of the whole service at a time. level: the worst of its parts. summary: a sentence."""

    at: datetime
    level: Level
    summary: str
    parts: tuple[PartState, ...]
    engines: tuple[EngineView, ...]
    waits: Waits

    @property
    def waiting(self) -> int:
        return self.waits.waiting

    @property
    def mark(self) -> str:
        """Return the sign for the title of the browser's tab."""
        return {"good": "●", "warn": "▲", "bad": "■"}[self.level]

    @property
    def faults(self) -> list[PartState]:
        return [part for part in self.parts if part.level != "good"]


class Strip:
    """Reader of the status. states: the states of `gateway/api/health.py`, by part."""

    def __init__(self, states: Callable[[], Mapping[str, Any]], registry: Registry, queues: BaseQueues) -> None:
        self._states = states
        self._registry = registry
        self._queues = queues

    def read(self) -> Status:
        now = datetime.now(UTC)
        parts = tuple(_part_state(name, state) for name, state in self._states().items())
        engines = tuple(view_engine(engine, now) for engine in self._registry.engines)
        levels = [*(part.level for part in parts), *(_softened(engine.level) for engine in engines)]
        level: Level = "bad" if "bad" in levels else "warn" if "warn" in levels else "good"
        up = [engine for engine in self._registry.engines if engine.is_up]
        waits = EngineQueues(up).total(self._queues.waiting, self._queues.longest_wait)
        summary = _summary(parts, engines)
        return Status(now, level, summary, parts, engines, waits)


def view_engine(engine: EngineRecord, now: datetime) -> EngineView:
    """Return the engine's state as the strip shows it."""
    since = now - timedelta(seconds=max(0.0, time.monotonic() - engine.condition.since))
    if engine.is_up and (drained := engine.drained) is not None:
        running = engine.requests.in_flight
        state = f"draining, {running} running" if running else "drained"
        return EngineView(engine.url, state, "warn", "an operator drained it", drained.at, None)
    if engine.is_up:
        if engine.breaker.allows_some:
            return EngineView(engine.url, "up", "good", "", since, None)
        until = now + timedelta(seconds=engine.breaker.seconds_open)
        return EngineView(engine.url, "breaker open", "bad", "its requests fail", since, until)
    health = engine.condition.health
    level: Level = LEVELS.get(health, "bad")
    return EngineView(engine.url, str(health), level, engine.condition.reason, since, None)


# Levels of an engine's state other than up.
LEVELS: dict[EngineHealth, Level] = {
    EngineHealth.ASLEEP: "good",
    EngineHealth.DRAINING: "warn",
    EngineHealth.UNKNOWN: "warn",
}


def _part_state(name: str, state: Any) -> PartState:
    level: Level = "good" if state.ok else "bad" if name in NEEDED else "warn"
    return PartState(name, TITLES.get(name, name), level, state.text, state.since)


def verb_of(*titles: str) -> str:
    """Return "is" or "are", for a sentence about the parts with these titles."""
    return "is" if len(titles) == 1 and titles[0] not in PLURAL else "are"


def _softened(level: Level) -> Level:
    """Return "warn" for an engine's fault, because requests are served while another engine is up."""
    return "warn" if level == "bad" else level


def _summary(parts: tuple[PartState, ...], engines: tuple[EngineView, ...]) -> str:
    faulty = [part.title for part in parts if part.level != "good"]
    up = sum(engine.level == "good" for engine in engines)
    if faulty:
        return (
            f"{' and '.join(faulty)} {verb_of(*faulty)} faulty"
            if len(faulty) < 3
            else f"{len(faulty)} parts are faulty"
        )
    if up < len(engines):
        return f"{up} of {len(engines)} engines serve requests"
    return "All parts work"
