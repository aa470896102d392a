"""Registry of engines: discovery, and one task per engine that checks it and follows its state."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from gateway.errors import NoEngine
from gateway.fleet.discovery.base_engines import EXACT, MAX_AGE, BaseEngines, capacity_of
from gateway.fleet.discovery.sleeping import BaseAsleep
from gateway.fleet.engines.engine import DEFAULT_SLOTS, Address, Drained, EngineRecord
from gateway.fleet.engines.health import Health
from gateway.fleet.engines.own_requests import SURVIVED_SECONDS, Names
from gateway.fleet.engines.suspects import OrphanedRequests
from gateway.fleet.queueing.queue import Capacity

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
# Longest time that a dropped engine is watched without a report. Then it counts as dead: another server may have its
# address. A starved engine reports again within seconds, and Kubernetes drops it after 6 s (deploy/kubernetes).
UNREAD_SECONDS = 30.0


class EngineChecks(Protocol):
    """Updates of engines' records; gateway/fleet/discovery/health_checks.py implements it."""

    async def check(self, engine: EngineRecord) -> None:
        """Check the engine."""

    async def running_instance(self, engine: EngineRecord) -> str | None:
        """Return the instance that runs at the engine's address, None if that cannot be read now."""

    async def follow(self, engine: EngineRecord, changed: Callable[[], None]) -> bool:
        """Follow the engine's state stream until it ends. Returns whether it had any line. changed: called for each."""

    async def wake(self, url: str) -> int | None:
        """Wake the engines of a supervisor. Return the seconds until they serve; None if it does not answer."""


class Registry:
    """The engines that `discover` finds.

    Each is checked and then followed; an engine that cannot be followed is checked every second. An engine that
    discovery drops gets no new requests; its running requests go on. While it may have requests of this process, it is
    checked as before, because only its end shows whether it has died with them. It has ended when it is down, or has
    not reported its state for UNREAD_SECONDS.
    """

    def __init__(
        self,
        discover: Callable[[], Awaitable[Iterable[Address]]],
        checks: EngineChecks,
        silence_patience: float = 300.0,
    ) -> None:
        self._discover = discover
        self._silence_patience = silence_patience
        self._checks = checks
        # Called with an engine whose instance has died: it reports another one, or has ended and is no longer listed.
        self.on_end: Callable[[EngineRecord], None] = lambda _: None
        # Called with an engine and the reason when its instance, which served requests, has died.
        self.on_death: Callable[[EngineRecord, str], None] = lambda engine, reason: None
        # Called with an engine and the instance that answered with another adapter than the request's.
        self.on_mismatch: Callable[[EngineRecord, str | None], None] = lambda engine, instance: None
        self._engines: dict[str, EngineRecord] = {}
        # Dropped engines by URL, watched because they may have requests of this process.
        self._leaving: dict[str, EngineRecord] = {}
        # Dropped engines that are watched no more but have requests whose connections have not broken. Other processes
        # may still report their deaths.
        self._gone: list[EngineRecord] = []
        # Large fleets, by base model.
        self._by_base: dict[str, BaseEngines] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._drained: Mapping[str, Drained] = {}

    @property
    def engines(self) -> tuple[EngineRecord, ...]:
        return tuple(self._engines.values())

    @property
    def with_dropped(self) -> tuple[EngineRecord, ...]:
        """Return the listed engines, and the dropped ones that may have requests of this process."""
        return (*self._engines.values(), *self._leaving.values(), *self._gone)

    def report_detached(self, url: str, instance: str | None) -> tuple[set[str], list[Names]]:
        """Return the result of `OwnRequests.report_detached` for an engine's instance.

        Return nothing if the engine is unknown or has another instance: the former one's requests were reported then.
        """
        tenants, names = set[str](), list[Names]()
        for engine in self.with_dropped:
            if engine.url == url and (engine.state.instance is None or engine.is_present(instance)):
                its_tenants, its_names = engine.requests.report_detached()
                tenants |= its_tenants
                names += its_names
        return tenants, names

    def take_over(self, orphaned: OrphanedRequests, age: float, is_reported: bool) -> None:
        """Count requests that another process left on an engine as this process's, if the engine may still have them.

        See `OwnRequests.take_over`.
        """
        engine = self._engines.get(orphaned.engine) or self._leaving.get(orphaned.engine)
        if engine is None or orphaned.instance != engine.state.instance:
            return
        if engine.observed_at < time.monotonic() - age + SURVIVED_SECONDS:
            engine.requests.take_over(orphaned, age, is_reported)

    @property
    def up(self) -> list[EngineRecord]:
        return [engine for engine in self._engines.values() if engine.is_up]

    @property
    def drained(self) -> Mapping[str, Drained]:
        """The operators' drains by URL, also of engines not in the registry. `drains.py` sets them."""
        return self._drained

    @drained.setter
    def drained(self, drained: Mapping[str, Drained]) -> None:
        self._drained = drained
        for engine in self._engines.values():
            engine.drained = drained.get(engine.url)

    @property
    def faults(self) -> dict[str, str]:
        """Return, by address, the reason why an engine gets no requests; engines that get requests are left out."""
        return {engine.url: fault for engine in self._engines.values() if (fault := engine.fault) is not None}

    @property
    def capacity(self) -> Capacity | None:
        """Return the capacity of the available engines, or None without one, so that requests fail without a wait."""
        return capacity_of([engine for engine in self._engines.values() if engine.available])

    def of_base(self, base: str) -> BaseEngines:
        """Return the engines of a base model (its id). In a large fleet, their sums may be MAX_AGE old."""
        former = self._by_base.get(base)
        if former is not None and former.is_large and time.monotonic() - former.made < MAX_AGE:
            return former
        engines = tuple(engine for engine in self._engines.values() if engine.base == base)
        found = BaseEngines(engines, former)
        if found.is_large:
            self._by_base[base] = found
        else:
            self._by_base.pop(base, None)
        return found

    def capacity_of(self, base: str) -> Capacity | None:
        """Return the capacity of the available engines of a base model (its id), or None without one."""
        return self.of_base(base).capacity

    @property
    def is_asleep(self) -> bool:
        """Return whether an engine sleeps, so that a request may wake it."""
        return any(engine.condition.health is Health.ASLEEP for engine in self._engines.values())

    async def absence(self, base: str, otherwise: NoEngine) -> NoEngine:
        """Return the error of a request for a base model (its id) without an available engine.

        If engines of the base sleep, wake them. Else return `otherwise`.
        """
        absent = [each for each in self._engines.values() if each.base == base and each.drained is None]
        # An engine that is about to sleep or to serve looks draining or down for a moment.
        urls = {each.address.wake for each in absent if each.address.wake is not None and not each.is_up}
        found = await asyncio.gather(*(self._checks.wake(url) for url in urls))
        seconds = [each for each in found if each is not None]
        return BaseAsleep(min(seconds)) if seconds else otherwise

    async def still_runs(self, engine: EngineRecord, instance: str) -> bool:
        """Ask an engine, beside its own task, whether it is this instance. Returns False if it does not answer now."""
        return await self._checks.running_instance(engine) == instance

    @property
    def _watched(self) -> dict[str, EngineRecord]:
        """Return the listed engines, and the dropped ones that are watched, by URL."""
        return {**self._leaving, **self._engines}

    async def poll(self) -> None:
        """Discover engines, and check once each of them and of the dropped ones that are watched."""
        await self._discover_engines()
        await asyncio.gather(*(self._checks.check(engine) for engine in self._watched.values()))

    async def watch(self, changed: Callable[[], None]) -> None:
        """Discover and watch engines until cancelled. Run it as a task.

        Each engine has a task of its own, so a slow engine delays no other. changed: called after each report of an
        engine, because waiting requests may have room then; in a large fleet, at most once in MAX_AGE.
        """
        changed = self._merged(changed)
        try:
            while True:
                await self._discover_engines()
                for url, engine in self._watched.items():
                    if url not in self._watching:
                        task = self._watching[url] = asyncio.create_task(self._watch_one(engine, changed))
                        task.add_done_callback(partial(self._end_watch, url))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in self._watching.values():
                task.cancel()

    async def _watch_one(self, engine: EngineRecord, changed: Callable[[], None]) -> None:
        """Check the engine, follow its state stream to the end, and check it again at once."""
        await self._checks.check(engine)
        self._abandon_silent(engine)
        changed()
        if engine.is_up and await self._checks.follow(engine, changed):
            self._abandon_silent(engine)
            await self._checks.check(engine)
            changed()

    def _merged(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Return a call of `changed`. In a large fleet, which has thousands of reports a second, calls are merged."""
        due: asyncio.TimerHandle | None = None

        def call() -> None:
            nonlocal due
            due = None
            changed()

        def call_soon() -> None:
            nonlocal due
            if len(self._engines) <= EXACT:
                changed()
            elif due is None:
                due = asyncio.get_running_loop().call_later(MAX_AGE, call)

        return call_soon

    def _abandon_silent(self, engine: EngineRecord) -> None:
        """End the wait for a silent engine's first byte.

        The wait ends at once if another engine of the base is available, else after `silence_patience`, because the
        engine may come back.
        """
        if engine.condition.health is not Health.SILENT:
            return
        has_other = any(other.available and other.base == engine.base for other in self._engines.values())
        if has_other or time.monotonic() - engine.condition.since > self._silence_patience:
            engine.requests.abandon_unanswered()

    def _end_watch(self, url: str, task: "asyncio.Task[None]") -> None:
        self._watching.pop(url, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine %s could not be checked", url, exc_info=error)

    async def _discover_engines(self) -> None:
        addresses = {address.url: address for address in await self._discover()}
        for url in self._engines.keys() - addresses.keys():
            self._leaving[url] = self._engines.pop(url)
            self._leaving[url].is_listed = False
        for url, address in addresses.items():
            if url not in self._engines:
                self._engines[url] = self._listed_again(address) or EngineRecord(
                    address,
                    slots=address.requests if address.traits.has_own_secret else DEFAULT_SLOTS,
                    on_end=self.on_end,
                    on_death=self.on_death,
                    on_mismatch=self.on_mismatch,
                )
                self._engines[url].drained = self._drained.get(url)
        self._end_dropped()

    def _end_dropped(self) -> None:
        """Stop watching the dropped engines that have ended or have no requests, and forget those without requests."""
        for engine in [*self._leaving.values()]:
            if not engine.requests.tenants:
                self._stop_watching(engine)
            elif _has_ended(engine):
                # Its next instance may have another address.
                engine.note_end()
                engine.requests.abandon_unanswered()
                self._stop_watching(engine)
        self._gone = [engine for engine in self._gone if engine.requests.by_tenant]

    def _listed_again(self, address: Address) -> EngineRecord | None:
        """Return the record of a dropped engine that is still watched, None without one."""
        engine = self._leaving.get(address.url)
        if engine is None:
            return None
        if engine.address != address:
            self._stop_watching(engine)
            return None
        engine.is_listed = True
        return self._leaving.pop(address.url)

    def _stop_watching(self, engine: EngineRecord) -> None:
        """Stop watching a dropped engine."""
        del self._leaving[engine.url]
        if watching := self._watching.get(engine.url):
            watching.cancel()
        engine.mark_down("it is no longer listed or announced", Health.DRAINING)
        self._gone.append(engine)


def _has_ended(engine: EngineRecord) -> bool:
    """Return whether a dropped engine is down or asleep, or has not reported its state for UNREAD_SECONDS."""
    if engine.condition.health is Health.DRAINING:
        # It answers, but its state is not read.
        return False
    is_unread = time.monotonic() - engine.read_at > UNREAD_SECONDS
    return is_unread or engine.condition.health in (Health.DOWN, Health.ASLEEP)
