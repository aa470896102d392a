"""History of the engines in memory: a sample of each every SAMPLE_SECONDS, its steps by second, and the changes of its
state. Bounded.
"""

import asyncio
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.base_queues import BaseQueues
from wire.responses import StepSecond

LOOK_SECONDS = 1.0
SAMPLE_SECONDS = 5.0
# Maximum number of samples (an hour) and of changes kept per engine.
MAX_SAMPLES, MAX_CHANGES = 720, 50
# Period of steps by second that is kept, and period of the utilisation.
STEP_SECONDS, UTILISATION_SECONDS = 240, 60
# Delay until a second's steps are known: engines report every second, and the history looks every second.
LAG_SECONDS = 2
MAX_ENGINES = 512


class Sample(NamedTuple):
    """An engine at a time, in Unix seconds.

    kv_used, pages_used: parts of the total, from 0 to 1. tokens: generated tokens per second. hits: fraction of prompt
    tokens since the last sample that were in the prefix cache. loads, evictions: adapter loads and evictions per
    minute. None: not reported by the engine.
    """

    at: int
    running: int
    waiting: int
    in_flight: int
    kv_used: float | None
    pages_used: float | None
    tokens: float | None
    hits: float | None
    loads: float | None
    evictions: float | None


class Change(NamedTuple):
    """Change of an engine's state. state: as the status strip shows it."""

    at: datetime
    state: str
    reason: str


class EngineHistory:
    """History of one engine."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._steps: deque[StepSecond] = deque(maxlen=STEP_SECONDS)
        self._instance: str | None = None
        self._before: dict[str, Any] = {}
        self._before_at = 0.0

    def look(self, engine: EngineRecord) -> None:
        """Record a change of the engine's state, and the seconds of steps reported since the last look."""
        if engine.state.instance != self._instance:
            # The new process's clock may be behind the old one's.
            self._instance = engine.state.instance
            self._steps.clear()
        for second in engine.state.recent_steps:
            if not self._steps or second.at > self._steps[-1].at:
                self._steps.append(second)
        state, reason = describe_state(engine)
        if not self.changes or (self.changes[-1].state, self.changes[-1].reason) != (state, reason):
            self.changes.append(Change(datetime.now(UTC), state, reason))

    def sample(self, engine: EngineRecord, clock: float) -> None:
        """Add a sample. Rates are those since the sample before, of the same process of the engine."""
        reported = engine.state.reported if engine.is_up else {}
        before = self._before if self._before.get("instance") == reported.get("instance") else {}
        seconds = clock - self._before_at

        def since(name: str) -> float | None:
            if name not in reported or name not in before or seconds <= 0:
                return None
            return max(0.0, reported[name] - before[name])

        generated, loads, evictions = map(since, ("generated_tokens", "adapter_loads", "adapter_evictions"))
        hit, queried = since("prefix_hit_tokens"), since("prefix_query_tokens")
        self.samples.append(
            Sample(
                at=int(time.time()),
                running=engine.state.running if engine.is_up else 0,
                waiting=engine.state.waiting if engine.is_up else 0,
                in_flight=engine.requests.in_flight,
                kv_used=used_part(reported, "kv_blocks"),
                pages_used=used_part(reported, "adapter_pages"),
                tokens=None if generated is None else generated / seconds,
                hits=None if not queried or hit is None else hit / queried,
                loads=None if loads is None else 60 * loads / seconds,
                evictions=None if evictions is None else 60 * evictions / seconds,
            )
        )
        self._before, self._before_at = reported, clock

    def steps(self, now: int) -> list[StepSecond]:
        """Return the last STEP_SECONDS known seconds before `now`, in Unix seconds, including those without steps.

        The list is empty if the engine has reported none.
        """
        known, last = {second.at: second for second in self._steps}, now - LAG_SECONDS
        return [known.get(at) or StepSecond(at) for at in range(last - STEP_SECONDS, last)] if known else []

    def utilisation(self, now: int) -> float | None:
        """Return the device's utilisation in the last minute: the roofline time of its steps as a fraction.

        None if the engine has not measured its device.
        """
        if not self._steps or self._steps[-1].roofline is None:
            return None
        last = self.steps(now)[-UTILISATION_SECONDS:]
        return sum(second.roofline or 0.0 for second in last) / UTILISATION_SECONDS

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None


class History:
    """Histories of all engines of a registry, and of the queue in front of them."""

    def __init__(self, registry: Registry, queues: BaseQueues) -> None:
        self._registry = registry
        self._queues = queues
        self._engines: dict[str, EngineHistory] = {}
        # (Unix seconds, waiting requests, requests on engines)
        self.queue: deque[tuple[int, int, int]] = deque(maxlen=MAX_SAMPLES)

    def of(self, url: str) -> EngineHistory:
        """Return an engine's history, an empty one for an unknown engine."""
        return self._engines.get(url) or EngineHistory()

    def utilisation(self, now: int) -> float | None:
        """Return the mean utilisation of the engines that are up; None if none of them has measured its device."""
        found = [self.of(engine.url).utilisation(now) for engine in self._registry.engines if engine.is_up]
        known = [each for each in found if each is not None]
        return sum(known) / len(known) if known else None

    async def watch(self) -> None:
        """Take samples until cancelled. Run it as a task."""
        sampled_at = 0.0
        while True:
            clock = time.monotonic()
            is_due = clock - sampled_at >= SAMPLE_SECONDS
            for engine in self._registry.engines:
                history = self._engines.setdefault(engine.url, EngineHistory())
                history.look(engine)
                if is_due:
                    history.sample(engine, clock)
            if is_due:
                sampled_at = clock
                self.queue.append((int(time.time()), self._queues.waiting, self._queues.inside))
                self._forget()
            await asyncio.sleep(LOOK_SECONDS)

    def _forget(self) -> None:
        """Remove the oldest histories of engines that are gone, if there are too many."""
        known = {engine.url for engine in self._registry.engines}
        for url in [url for url in self._engines if url not in known][: max(0, len(self._engines) - MAX_ENGINES)]:
            del self._engines[url]


def describe_state(engine: EngineRecord) -> tuple[str, str]:
    """Return an engine's state in a word or two, and its reason."""
    if not engine.is_up:
        return str(engine.condition.health), engine.condition.reason
    if engine.drained is not None:
        return "drained", "an operator drained it"
    return ("up", "") if engine.breaker.allows_some else ("breaker open", "its requests fail")


def used_part(reported: dict[str, Any], name: str) -> float | None:
    """Return the used part of blocks or pages; None if the engine does not report them."""
    total = reported.get(f"{name}_total")
    return None if not total else 1 - reported.get(f"{name}_free", 0) / total
