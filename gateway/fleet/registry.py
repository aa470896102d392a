"""Registry of engines: their existence, health, resident adapters and load."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from gateway.fleet.addresses import Address
from gateway.fleet.breaker import Breakers
from gateway.fleet.health import Health
from wire.digests import bare_digest

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
# An engine in a long step may miss a probe or two. A refused connection means down at once.
MISSES_UNTIL_DOWN = 3
# Besides its batch, an engine gets as many requests again, to fill places as they become free. Further requests wait in
# the gateway, where they can still be ordered and sent to another engine.
BATCHES_IN_FLIGHT = 2
# Assumed until an engine reports its own number.
DEFAULT_SLOTS = 32
MISMATCH = "engine answered with another adapter than was asked for; restart it and report its log"
DEFAULT_LOAD_SECONDS = 0.05
# Minimum, because an engine measures its loads only into host memory, without the copy to the device.
LEAST_LOAD_SECONDS = 0.02


@dataclass(slots=True, eq=False, weakref_slot=True)
class EngineRecord:
    """An engine as this gateway process sees it.

    resident: digests (no prefix) of the adapters it holds. serving: number of this process's requests by digest, None
    for the base model. tenants: the same by tenant. others: number of other gateways' requests. slots: number of
    requests that it runs at once. load_seconds: time to load an adapter. request_seconds: time of a request. reason:
    the cause of its health and the remedy, if there is one; "" while it is up. health_since: time (monotonic) of the
    last change of health. misses: unanswered health checks in a row. mismatched: the instance that answered with
    another adapter than the request's. unanswered: a time-out for each request that it has not begun to answer.
    """

    address: Address
    health: Health = Health.UNKNOWN
    reason: str = "it has not been probed yet"
    health_since: float = field(default_factory=time.monotonic)
    resident: frozenset[str] = frozenset()
    serving: Counter[str | None] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    others: int = 0
    slots: int = DEFAULT_SLOTS
    load_seconds: float = DEFAULT_LOAD_SECONDS
    request_seconds: float = 1.0
    state: dict[str, Any] = field(default_factory=dict)
    misses: int = 0
    mismatched: str | None = None
    unanswered: set[asyncio.Timeout] = field(default_factory=set)
    breaker: Breakers = field(default_factory=Breakers)

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def load(self) -> int:
        """Return the number of requests on this engine, those of other gateways included as far as known."""
        return self.in_flight + self.others

    @property
    def limit(self) -> int:
        """Return the most requests that the engine gets."""
        return self.slots if self.address.kind == "vllm" else BATCHES_IN_FLIGHT * self.slots

    @property
    def keeps_allowances(self) -> bool:
        """Return whether the engine stays within a request's allowance and reports whole answers that need more."""
        return self.address.kind == "loraplex" and self.state.get("keeps_allowances") is True

    @property
    def is_up(self) -> bool:
        return self.health is Health.UP

    @property
    def available(self) -> bool:
        return self.is_up and self.breaker.allows_some

    @property
    def fault(self) -> str | None:
        """Return the reason why the engine gets no requests, or None if it gets requests."""
        if not self.is_up:
            return f"{self.health}: {self.reason}"
        return None if self.breaker.allows_some else "up, but its requests fail: its circuit breaker is open"

    def holds(self, digest: str) -> bool:
        """Return whether the engine has the adapter, or loads it for a request of this process."""
        return digest in self.resident or self.serving[digest] > 0

    @contextmanager
    def busy(self, digest: str | None, tenant_id: str = "") -> Iterator["Busy"]:
        """Count a request while it is with this engine."""
        self.in_flight += 1
        self.serving[digest] += 1
        self.tenants[tenant_id] += 1
        busy = Busy(self)
        try:
            yield busy
        finally:
            busy.free()
            self.serving[digest] -= 1
            if not self.serving[digest]:
                del self.serving[digest]
            self.tenants[tenant_id] -= 1
            if not self.tenants[tenant_id]:
                del self.tenants[tenant_id]

    def observe_request(self, seconds: float) -> None:
        """Update the mean time of a request, in which the last few count most."""
        self.request_seconds += 0.1 * (seconds - self.request_seconds)

    def observe_state(self, state: dict[str, Any], in_flight: int) -> None:
        """Apply the engine's state, unless a newer one is known. in_flight: this process's requests at the query."""
        if state.get("instance") == self.state.get("instance") and _int(state, "generation") < _int(
            self.state, "generation"
        ):
            return
        self.state = state
        self.resident = resident_adapters(state)
        self.others = max(0, _int(state, "running") + _int(state, "waiting") - in_flight)
        self.slots = _int(state, "max_num_seqs") or self.slots
        seconds = state.get("adapter_load_seconds")
        if isinstance(seconds, int | float) and seconds > 0:
            self.load_seconds = max(float(seconds), LEAST_LOAD_SECONDS)

    def abandon_unanswered(self) -> None:
        """End the wait of all requests that the engine has not begun to answer; they go to other engines."""
        now = asyncio.get_running_loop().time()
        for wait in self.unanswered:
            if not wait.expired():
                wait.reschedule(now)

    def mark_down(self, reason: str, health: Health = Health.DOWN) -> None:
        """Stop sending requests to the engine. health: DOWN, SILENT or DRAINING."""
        self._change(health, reason)
        self.others = 0

    def mark_misconfigured(self, reason: str) -> None:
        """Stop sending requests to the engine until the operator has corrected the reason."""
        self._change(Health.MISCONFIGURED, reason)
        self.misses = 0

    def mark_mismatched(self) -> None:
        """Send this engine no requests until it reports another instance."""
        self.mismatched = str(self.state.get("instance"))
        self.mark_misconfigured(MISMATCH)

    def mark_up(self) -> None:
        if self.mismatched is not None and self.mismatched == str(self.state.get("instance")):
            self.mark_misconfigured(MISMATCH)
            return
        self.mismatched = None
        if not self.is_up:
            # Earlier failures do not count against an engine that comes back.
            self.breaker = Breakers()
        self._change(Health.UP, "")
        self.misses = 0

    def missed(self, reason: str) -> None:
        """Note an unanswered health check."""
        self.misses += 1
        if self.health is Health.UNKNOWN:
            self.reason = reason
        if self.misses >= MISSES_UNTIL_DOWN:
            self.mark_down(reason, Health.SILENT)

    def _change(self, health: Health, reason: str) -> None:
        """Set the health, and log a change of the health or its reason."""
        if (health, reason) != (self.health, self.reason):
            if health is Health.UP:
                log.info("engine %s is up", self.url)
            else:
                level = logging.ERROR if health is Health.MISCONFIGURED else logging.WARNING
                log.log(level, "engine %s is %s: %s", self.url, health, reason)
        if health is not self.health:
            self.health_since = time.monotonic()
        self.health, self.reason = health, reason
        if health is not Health.UP:
            self.resident = frozenset()


class Busy:
    """A request in an engine's `in_flight`."""

    def __init__(self, engine: EngineRecord) -> None:
        self._engine = engine
        self.is_counted = True

    def free(self) -> None:
        """Stop counting the request, because the engine has finished its part. Its adapter stays in `serving`."""
        self._engine.in_flight -= self.is_counted
        self.is_counted = False


class Watch(Protocol):
    """Updates of engines' records; gateway/fleet/probe.py implements it."""

    async def __call__(self, engine: EngineRecord) -> None:
        """Probe the engine."""

    async def follow(self, engine: EngineRecord, heard: Callable[[], None]) -> bool:
        """Follow the engine's state stream until it ends. Returns whether it had any line. heard: called for each."""


class Registry:
    """The engines that `discover` finds.

    Each is probed and then followed; an engine that cannot be followed is probed every second. An engine that discovery
    drops gets no new requests; its running requests go on.
    """

    def __init__(
        self, discover: Callable[[], Awaitable[Iterable[Address]]], watch: Watch, silence_patience: float = 300.0
    ) -> None:
        self._discover = discover
        self._silence_patience = silence_patience
        self._watch = watch
        self._engines: dict[str, EngineRecord] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}

    @property
    def engines(self) -> tuple[EngineRecord, ...]:
        return tuple(self._engines.values())

    @property
    def up(self) -> list[EngineRecord]:
        return [engine for engine in self._engines.values() if engine.is_up]

    @property
    def faults(self) -> dict[str, str]:
        """Return, by address, the reason why an engine gets no requests; engines that get requests are left out."""
        return {engine.url: fault for engine in self._engines.values() if (fault := engine.fault) is not None}

    @property
    def capacity(self) -> int | None:
        """Return the most requests that this gateway may have on all engines together.

        None while no engine is available: requests then fail at once instead of waiting for a place.
        """
        available = [engine for engine in self._engines.values() if engine.available]
        return sum(max(0, engine.limit - engine.others) for engine in available) if available else None

    async def poll(self) -> None:
        """Discover engines and probe each of them once."""
        await self._find()
        await asyncio.gather(*(self._watch(engine) for engine in self._engines.values()))

    async def watch(self, changed: Callable[[], None]) -> None:
        """Discover and watch engines until cancelled. Run it as a task.

        Each engine has a task of its own, so a slow engine delays no other. changed: called after each report of an
        engine, because waiting requests may have room then.
        """
        try:
            while True:
                await self._find()
                for url, engine in self._engines.items():
                    if url not in self._watching:
                        task = self._watching[url] = asyncio.create_task(self._watch_one(engine, changed))
                        task.add_done_callback(partial(self._watched, url))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in self._watching.values():
                task.cancel()

    async def _watch_one(self, engine: EngineRecord, changed: Callable[[], None]) -> None:
        """Probe the engine, follow its state stream to the end, and probe it again at once."""
        await self._watch(engine)
        self._abandon_silent(engine)
        changed()
        if engine.is_up and await self._watch.follow(engine, changed):
            self._abandon_silent(engine)
            await self._watch(engine)
            changed()

    def _abandon_silent(self, engine: EngineRecord) -> None:
        """End the wait for a silent engine's first byte.

        The wait ends at once if another engine is available, else after `silence_patience`, because the engine may
        come back.
        """
        if engine.health is not Health.SILENT:
            return
        has_other = any(other.available for other in self._engines.values())
        if has_other or time.monotonic() - engine.health_since > self._silence_patience:
            engine.abandon_unanswered()

    def _watched(self, url: str, task: "asyncio.Task[None]") -> None:
        self._watching.pop(url, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine %s could not be asked for its state", url, exc_info=error)

    async def _find(self) -> None:
        addresses = {address.url: address for address in await self._discover()}
        for url in self._engines.keys() - addresses.keys():
            if watching := self._watching.get(url):
                watching.cancel()
            self._engines.pop(url).mark_down("it is no longer listed or announced", Health.DRAINING)
        for url, address in addresses.items():
            if url not in self._engines:
                slots = address.requests if address.kind == "vllm" else DEFAULT_SLOTS
                self._engines[url] = EngineRecord(address, slots=slots)


def resident_adapters(state: dict[str, Any]) -> frozenset[str]:
    """Return the digests of the adapters in an engine's /state, without any `sha256:` prefix."""
    adapters = state.get("adapters_resident")
    if not isinstance(adapters, list):
        return frozenset()
    return frozenset(bare_digest(str(digest)) for digest in adapters)


def _int(state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    return value if isinstance(value, int) else 0
