"""Quarantine: a request that two engines had when they died is not sent to a third.

Any request that an engine has when it dies may be the cause. An engine counts as having a request that was left until
it has shown that it survived the request. So a request, or a tenant's adapter, is quarantined only if no other tenant
had requests on the engine at each of the deaths. A tenant's requests can therefore never put another tenant's into
quarantine. If another tenant had some at each death, the request is suspected, and runs apart from that tenant's
(`isolation.py`). Every gateway process reports its broken and left requests to the others (`shared_deaths.py`), and the
tenants with requests or hints there, also for a death that another process reports. It applies their reports as its
own. Only an HMAC of a request is kept and shared.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec

from gateway.errors import GatewayError
from gateway.fleet.engine import EngineRecord
from gateway.fleet.own_requests import NamedBody, Names, named
from gateway.fleet.request_names import RequestNames, computed
from gateway.fleet.shared_deaths import Report, SharedDeaths, Suspect

log = logging.getLogger(__name__)

# Deaths until a request, or an adapter with any requests, is quarantined.
DEATHS = {"request": 2, "adapter": 3}
# Broken connections to an engine within this time (seconds) count as a single death.
ONE_DEATH_SECONDS = 2.0
# Stands for the tenants of other gateways' requests, which are unknown while Redis is away.
UNKNOWN_TENANTS = "?"
MAX_SUSPECTS = 10_000
# Pause between two attempts to read other processes' reports while Redis is away, shortest pause between two readings,
# and the longest time that a retry waits for the report of its engine's death.
AWAY_SECONDS = 1.0
PAUSE_SECONDS = 0.1
REPORT_SECONDS = 0.25
# Age of a report up to which a process reports its own left requests for the same death. Later, the engine may run
# again and have other requests.
LATE_SECONDS = 5.0


class Quarantined(GatewayError):
    """Engines died repeatedly with this request or this adapter."""

    status, kind, code = 422, "invalid_request_error", "request_quarantined"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"Engines died while they worked on this {what}; it is refused for {math.ceil(seconds)} s.",
            headers={"Retry-After": str(math.ceil(seconds))},
        )


class Death(msgspec.Struct, eq=False):
    """An engine's death, the tenants whose requests it had, and its suspects, as far as they are reported."""

    at: float
    tenants: set[str]
    suspects: set[Suspect] = set()


class Suspicion(NamedTuple):
    """Suspicion against a request. others: the tenants with requests at each of its deaths. deaths: their number."""

    others: set[str]
    deaths: int


class Quarantine:
    """Deaths of engines, and the requests and adapters in quarantine.

    seconds: how long a death is remembered and a quarantine lasts. secret: key of the HMACs; the same for all processes
    of a deployment. shared: None for a single process. count: called with the kind of each new quarantine.
    report_left: returns the tenants with requests of this process on an engine (its URL), running or left, and the
    names of the left ones, once each.
    """

    def __init__(
        self,
        seconds: float,
        secret: bytes,
        shared: SharedDeaths | None = None,
        count: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
        report_left: Callable[[str], tuple[set[str], list[Names]]] = lambda url: (set(), []),
    ) -> None:
        self._left_on = report_left
        self._seconds = seconds
        self._names = RequestNames(secret)
        self._shared = shared
        self._count = count
        self._clock = clock
        self._last: dict[str, Death] = {}
        self._deaths: dict[Suspect, list[Death]] = {}
        # Suspects with enough deaths; other tenants of these deaths may still be reported.
        self._candidates: set[Suspect] = set()
        self._announced: set[Suspect] = set()
        # Deaths that wait for names.
        self._late: set[asyncio.Task[None]] = set()
        self._unsent: dict[str, Report] = {}
        self._sending: asyncio.Task[None] | None = None

    async def check(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Raise Quarantined for a request or an adapter in quarantine."""
        now = self._clock()
        self._candidates = {key for key in self._candidates if self._deaths[key][-1].at + self._seconds > now}
        # A tenant's large bodies take time, and no other tenant's candidates concern them.
        if any(key.tenant_id == tenant_id for key in self._candidates):
            for key in await self._names.known(tenant_id, digests, body):
                self._check(key, self._clock())

    async def suspicion(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Suspicion | None:
        """Return the suspicion against a request, None without one.

        Deaths with a request or an adapter in quarantine do not count.
        """
        if not any(key.tenant_id == tenant_id for key in self._candidates):
            return None
        key, *_ = await self._names.known(tenant_id, digests, body)
        if key not in self._candidates or self._is_alone(key):
            return None
        recent = self._clock() - self._seconds
        deaths = [each.tenants for each in self._deaths[key] if each.at > recent and not self._has_cause(each)]
        if len(deaths) < DEATHS[key.kind]:
            return None
        others = set.intersection(*deaths) - {tenant_id}
        return Suspicion(others, len(deaths)) if others else None

    def died_lately(self, engine: EngineRecord) -> bool:
        """Return whether the engine died so recently that its next death would count as the same one."""
        last = self._last.get(engine.url)
        return last is not None and self._clock() - last.at < ONE_DEATH_SECONDS

    def _has_cause(self, death: Death) -> bool:
        """Return whether a request or an adapter of the death is in quarantine."""
        return any(key in self._candidates and self._is_alone(key) for key in death.suspects)

    async def clear(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Forget the deaths of a request that was suspected and has run to its end, in this process.

        The last one stays: a request that kills engines only sometimes is suspected again at the next death.
        """
        key, *_ = await self._names.known(tenant_id, digests, body)
        if key in self._deaths:
            del self._deaths[key][:-1]
        self._candidates.discard(key)

    @property
    def remembers_deaths(self) -> bool:
        """Return whether an engine's death is remembered, so that a request may be suspected, perhaps elsewhere."""
        recent = self._clock() - self._seconds
        return any(death.at > recent for death in self._last.values())

    def check_adapter(self, tenant_id: str, name: str) -> None:
        """Raise Quarantined for an adapter in quarantine, by its name there."""
        self._check(Suspect("adapter", tenant_id, name), self._clock())

    def _check(self, key: Suspect, now: float) -> None:
        if (
            key in self._candidates
            and (until := self._deaths[key][-1].at + self._seconds) > now
            and self._is_alone(key)
        ):
            raise Quarantined(key.kind, until - now)

    def died(self, engine: EngineRecord, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Note that an engine died with this request, and report it to the other processes in the background.

        digests: the request's adapter, or all adapters of its mixture.
        """
        self._died(engine, tenant_id, self.suspects(tenant_id, digests, body))

    def died_with(self, engine: EngineRecord, tenant_id: str, suspects: Sequence[Suspect]) -> None:
        """Note that an engine died with a tenant's suspects, as `died`."""
        self._died(engine, tenant_id, named(suspects))

    def _died(self, engine: EngineRecord, tenant_id: str, own: Names) -> None:
        tenants, names = engine.requests.report_left()
        self._note_on(engine, tenants | {tenant_id}, [own, *names])

    def ended(self, engine: EngineRecord) -> None:
        """Note the death of an engine's instance, if requests were there."""
        tenants, names = engine.requests.report_left()
        if tenants:
            self._note_on(engine, tenants, names)

    def _note_on(self, engine: EngineRecord, tenants: set[str], names: Sequence[Names]) -> None:
        if (engine.foreign_load or engine.last_foreign_load) and (self._shared is None or self._shared.is_away):
            tenants = tenants | {UNKNOWN_TENANTS}
        self._note(engine.url, tenants, names, self._clock())

    def _note(self, engine_url: str, tenants: set[str], names: Sequence[Names], at: float) -> None:
        """Apply and report a death with the names that are computed; the others follow when they are."""
        late = [each for each in names if not each.done()]
        found = dict.fromkeys(suspect for each in names if each not in late for suspect in computed(each))
        report = Report(engine_url, [*tenants], [*found])
        death = self._apply(report, at)
        self._share(report)
        for each in late:
            task = asyncio.create_task(self._note_late(engine_url, death, each))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _note_late(self, engine_url: str, death: Death, names: Names) -> None:
        """Add names to a death that is noted already, when they are computed."""
        await asyncio.gather(asyncio.wrap_future(names), return_exceptions=True)
        if suspects := computed(names):
            self._add(death, suspects)
            # Another process may count a late report as a death of its own, so it names all tenants.
            self._share(Report(engine_url, [*death.tenants], suspects))

    def _share(self, report: Report) -> None:
        if self._shared is None:
            self._announce(report.suspects)
        else:
            self._report(report)

    def deaths(self, suspect: Suspect) -> list[Death]:
        """Return the suspect's recent deaths, whoever else was on the engines. Tenants may be added to them later."""
        recent = self._clock() - self._seconds
        return [death for death in self._deaths.get(suspect, ()) if death.at > recent]

    async def reported(self) -> None:
        """Wait, within a deadline, until the last death is reported and all earlier reports are read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                if self._late:
                    await asyncio.wait(self._late)
                if self._sending is not None:
                    await asyncio.shield(self._sending)

    async def watch(self) -> None:
        """Apply other processes' reports as they arrive, until cancelled. Run it as a task."""
        while self._shared is not None:
            try:
                if self._shared.is_away or await self._shared.wait():
                    await self.read()
            except Exception:
                # A bug, or an entry of another release. The next reports are read regardless.
                log.exception("reports of engines' deaths could not be read; retrying")
            await asyncio.sleep(AWAY_SECONDS if self._shared.is_away else PAUSE_SECONDS)

    async def read(self) -> None:
        """Apply the new reports of other processes."""
        assert self._shared is not None
        for report, age in await self._shared.read():
            if age < self._seconds:
                at = self._clock() - age
                death = self._apply(report, at)
                if age < LATE_SECONDS:
                    self._report_left(report.engine, death, at)

    def _report_left(self, engine_url: str, death: Death, at: float) -> None:
        """Report this process's requests on an engine for another's report: one may be the cause.

        A death that has their tenants already was reported with them.
        """
        tenants, names = self._left_on(engine_url)
        if names or not tenants <= death.tenants:
            self._note(engine_url, tenants, names, at)

    def _report(self, report: Report) -> None:
        """Add to the engine's unsent report. All requests that break at once go into a single message."""
        assert self._shared is not None
        unsent = self._unsent.setdefault(report.engine, Report(report.engine, [], []))
        unsent.tenants = [*{*unsent.tenants, *report.tenants}]
        unsent.suspects += report.suspects
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        assert self._shared is not None
        # Requests that break in the same iteration of the event loop are added first.
        await asyncio.sleep(0)
        sent = []
        while self._unsent:
            _, report = self._unsent.popitem()
            await self._shared.add(report, self._seconds)
            sent += report.suspects
            if not self._unsent:
                # It may add reports.
                await self.read()
        self._announce(sent)

    def _announce(self, suspects: list[Suspect]) -> None:
        """Count and log new quarantines, in the process that reports the last death only."""
        self._announced &= self._candidates
        for key in suspects:
            if key in self._candidates and key not in self._announced and self._is_alone(key):
                self._announced.add(key)
                self._count(key.kind)
                what = key.kind, len(self._deaths[key]), key.tenant_id
                log.error("quarantine: the %s was on %d engines when they died: tenant %s", *what)

    def _apply(self, report: Report, at: float) -> Death:
        """Add a report to the known deaths, and return its own. at: the report's time on this process's clock."""
        death = self._death(report.engine, at)
        death.tenants.update(report.tenants)
        self._add(death, report.suspects)
        return death

    def _add(self, death: Death, suspects: Sequence[Suspect]) -> None:
        """Add suspects to a death."""
        recent = death.at - self._seconds
        death.suspects.update(suspects)
        for key in suspects:
            deaths = [known for known in self._deaths.pop(key, []) if known.at > recent and known is not death]
            # The newest last, so that the oldest is forgotten first.
            self._deaths[key] = [*deaths, death]
            if len(self._deaths[key]) >= DEATHS.get(key.kind, math.inf):
                self._candidates.add(key)
            else:
                # It may have been one by deaths that are forgotten now.
                self._candidates.discard(key)
        while (excess := len(self._deaths) - MAX_SUSPECTS) > 0:
            # The oldest of the tenant with the most, so that no tenant makes room for its own at others' expense.
            [(most, _)] = Counter(key.tenant_id for key in self._deaths).most_common(1)
            for forgotten in list(islice((key for key in self._deaths if key.tenant_id == most), excess)):
                del self._deaths[forgotten]
                self._candidates.discard(forgotten)

    def _death(self, engine_url: str, at: float) -> Death:
        last = self._last.get(engine_url)
        if last is not None and abs(at - last.at) < ONE_DEATH_SECONDS:
            return last
        self._last = {url: death for url, death in self._last.items() if death.at > at - self._seconds}
        death = self._last[engine_url] = Death(at, set())
        return death

    def _is_alone(self, key: Suspect) -> bool:
        return set.intersection(*(death.tenants for death in self._deaths[key])) == {key.tenant_id}

    def suspects(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Names:
        """Return the suspects of a request, itself and its adapters. They are computed at once for a small body."""
        return self._names.of(tenant_id, digests, body)
