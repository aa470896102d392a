"""Quarantine: a request that two engines had when they died is not sent to a third.

Any request that an engine has when it dies may be the cause. An engine counts as having a detached request
(`own_requests.py`) until it has shown that it survived the request. So a request, or a tenant's adapter, is quarantined
only if no other tenant had requests on the engine at each of the deaths. A tenant's requests can therefore never put
another tenant's into quarantine. If another tenant had some at each death, the request is suspected, and runs apart
from that tenant's (`isolation.py`). A tenant whose requests in quarantine were the cause of several deaths is refused
altogether, because it may have more of them.

Every gateway process reports its broken and detached requests to the others (`shared_deaths.py`), and the tenants with
requests or hints there, also for a death that another process reports. It applies their reports as its own. Only an
HMAC of a request is kept and shared. An operator can end a tenant's quarantine in all processes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gateway.errors import GatewayError, Unavailable
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.own_requests import NamedBody, Names
from gateway.fleet.engines.suspects import OrphanedRequests, Suspect
from gateway.fleet.failures.deaths import (
    LATE_SECONDS,
    ONE_DEATH_SECONDS,
    TENANT,
    UNKNOWN_TENANTS,
    Death,
    Deaths,
    QuarantinePeriod,
    Suspicion,
)
from gateway.fleet.failures.quarantine_log import QuarantineLog
from gateway.fleet.failures.request_names import RequestNames, computed
from gateway.fleet.failures.shared_deaths import ENDED_BY_OPERATOR, NO_ENGINE, Report, SharedDeaths

log = logging.getLogger(__name__)

# Pause between two attempts to read other processes' reports while Redis is away, shortest pause between two readings,
# and the longest time that a retry waits for the report of its engine's death.
AWAY_SECONDS = 1.0
PAUSE_SECONDS = 0.1
REPORT_SECONDS = 0.5


class Quarantined(GatewayError):
    """Engines died repeatedly with this request or this adapter."""

    status, kind, code = 422, "invalid_request_error", "request_quarantined"
    consequence = "it is refused"

    def __init__(self, cause: str, seconds: float) -> None:
        super().__init__(
            f"Engines died while they worked on {cause}; {self.consequence} for {math.ceil(seconds)} s.",
            headers={"Retry-After": str(math.ceil(seconds))},
        )


class TenantQuarantined(Quarantined):
    """Engines died repeatedly with several of this tenant's requests."""

    code = "tenant_quarantined"
    consequence = "all are refused"


class Quarantine:
    """Deaths of engines, and the requests and adapters in quarantine.

    seconds: how long a death is remembered and a quarantine lasts. secret: key of the HMACs; the same for all processes
    of a deployment. shared: None for a single process. count: called with the kind of each new quarantine.
    report_detached: returns the tenants with requests of this process on an engine's instance (its URL and instance),
    running or detached, and the names of the detached ones, once each. is_alone: returns whether an engine works only
    on a request that runs apart, whatever other processes report. engines: returns all engines that may have requests
    of this process. take_over: called with the requests that an ending process left on an engine, their age, and
    whether a death was reported with them.
    """

    def __init__(
        self,
        seconds: float,
        secret: bytes,
        shared: SharedDeaths | None = None,
        count: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
        report_detached: Callable[[str, str | None], tuple[set[str], list[Names]]] = lambda url, instance: (set(), []),
    ) -> None:
        self._report_detached = report_detached
        self.is_alone: Callable[[EngineRecord], bool] = lambda engine: False
        self.engines: Callable[[], Sequence[EngineRecord]] = tuple
        self.take_over: Callable[[OrphanedRequests, float, bool], None] = lambda requests, age, is_reported: None
        self._names = RequestNames(secret)
        self._shared = shared
        self._clock = clock
        self._deaths = Deaths(seconds, clock)
        self._announcer = QuarantineLog(self._deaths, count)
        self._process = "" if shared is None else shared.process
        self._was_read = asyncio.Event()
        # Deaths that wait for names.
        self._late: set[asyncio.Task[None]] = set()
        # Reports by engine, instance and time of the death.
        self._unsent: dict[tuple[str, str | None, float], Report] = {}
        self._sending: asyncio.Task[None] | None = None

    async def check(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Raise Quarantined for a request, an adapter or a tenant in quarantine."""
        # A tenant's large bodies take time, and no other tenant's candidates concern them.
        if self._deaths.has_candidate(tenant_id):
            self._check(Suspect(TENANT, tenant_id, ""))
            for key in await self._names.known(tenant_id, digests, body):
                self._check(key)

    async def name(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Suspect:
        """Return the name of a request. Identical requests of a tenant have the same one."""
        return (await self._names.known(tenant_id, digests, body))[0]

    async def suspicion(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Suspicion | None:
        """Return the suspicion against a request, None without one."""
        if not self._deaths.has_candidate(tenant_id):
            return None
        return self._deaths.suspicion(await self.name(tenant_id, digests, body))

    async def is_innocent(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> bool:
        """Return whether other tenants' requests or adapters in quarantine were the cause of a request's deaths."""
        return self._deaths.is_innocent(await self.name(tenant_id, digests, body))

    def died_lately(self, engine: EngineRecord) -> bool:
        """Return whether the engine died so recently that its next death would count as the same one."""
        return any(death.engine == engine.url for death in self._deaths.recent(ONE_DEATH_SECONDS))

    async def note_survived(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Forget the deaths of a request that was suspected and has run to its end, in this process.

        The last one stays: a request that kills engines only sometimes is suspected again at the next death.
        """
        self._deaths.note_survived(await self.name(tenant_id, digests, body))

    @property
    def remembers_deaths(self) -> bool:
        """Return whether an engine's death is remembered, so that a request may be suspected, perhaps elsewhere."""
        return bool(self._deaths.recent())

    def check_adapter(self, tenant_id: str, name: str) -> None:
        """Raise Quarantined for an adapter in quarantine, by its name there, or for its tenant."""
        self._check(Suspect(TENANT, tenant_id, ""))
        self._check(Suspect("adapter", tenant_id, name))

    def _check(self, key: Suspect) -> None:
        if (period := self._deaths.quarantine_of(key)) is not None:
            seconds = period.ends - self._clock()
            if key.kind == TENANT:
                raise TenantQuarantined("several of your requests", seconds)
            raise Quarantined(f"this {key.kind}", seconds)

    def quarantines(self, tenant_id: str | None = None) -> list[QuarantinePeriod]:
        """Return all quarantines that this process knows, or those of a tenant."""
        return self._deaths.quarantines(tenant_id)

    def take_begun(self) -> list[QuarantinePeriod]:
        """Return the quarantines that this process has logged since the last call."""
        return self._announcer.take_begun()

    def age(self, at: float) -> float:
        """Return the seconds since a time of `QuarantinePeriod`; they are negative if it has not come yet."""
        return self._clock() - at

    async def clear_tenant(self, tenant_id: str) -> list[QuarantinePeriod]:
        """End a tenant's quarantine in all processes, and forget the evidence against it. Return what ended.

        Raises Unavailable, also if it is unknown whether Redis has taken the report.
        """
        at = self._clock()
        if self._shared is not None:
            await self.read()
            # A death while Redis answers stays evidence, here as in the other processes.
            at = self._clock()
            if await self._shared.add(Report(ENDED_BY_OPERATOR, [tenant_id], []), self._deaths.seconds) is None:
                raise Unavailable("Redis is unavailable, so the quarantine cannot be ended; try again shortly.")
        found = self._deaths.quarantines(tenant_id)
        self._deaths.forget(tenant_id, at)
        self._announcer.announce()
        return found

    def is_forgotten(self, tenant_id: str, death: Death) -> bool:
        """Return whether a death is no evidence against a tenant, because an operator ended its quarantine since."""
        return self._deaths.is_forgotten(tenant_id, death)

    def died(self, engine: EngineRecord, tenant_id: str, names: Names, instance: str | None = None) -> None:
        """Note that an engine died with a tenant's request, and report it to the other processes in the background.

        names: the request's (`suspects`). instance: the engine's instance that had the request; None if it is unknown,
        which counts as the present one.
        """
        if engine.is_present(instance):
            tenants, names_of_detached = engine.requests.report_detached()
            self._note_on(engine, tenants | {tenant_id}, [names, *names_of_detached], self._clock())
            return
        # The others on a former instance were reported at its end, unless that was no death.
        known = self._deaths.of_instance(engine.url, instance)
        tenants, at = ({tenant_id}, known[-1].at) if known else ({tenant_id, UNKNOWN_TENANTS}, self._clock())
        self._note_on(engine, tenants, [names], at, instance)

    def note_instance_death(self, engine: EngineRecord) -> None:
        """Note the death of an engine's instance, if requests were there."""
        tenants, names = engine.requests.report_detached()
        if tenants:
            self._note_on(engine, tenants, names, self._clock())

    def _note_on(
        self, engine: EngineRecord, tenants: set[str], names: Sequence[Names], at: float, former: str | None = None
    ) -> None:
        """Note a death at a time. former: the instance that died; None for the engine's present one."""
        instance = former or engine.state.instance
        # A connection may break, or be found broken, long after the first one. Its tenant was not there alone.
        tenants = tenants.union(*(death.reported for death in self._deaths.of_instance(engine.url, instance)))
        has_others = bool(engine.other_processes_load or engine.last_other_processes_load)
        if has_others and (self._shared is None or self._shared.is_away):
            tenants = tenants | {UNKNOWN_TENANTS}
        processes = list[str]()
        # A kept engine that is the only one serves other processes' requests too.
        if self._shared is not None and not self._shared.is_away and (has_others or not self.is_alone(engine)):
            processes += self._shared.processes
        self._note(Report(engine.url, [*tenants], [], instance, processes), names, at)

    def _note(self, report: Report, names: Sequence[Names], at: float) -> None:
        """Apply and send a report with the names that are computed; the others follow when they are."""
        late = [each for each in names if not each.done()]
        found = dict.fromkeys(suspect for each in names if each not in late for suspect in computed(each))
        report.suspects = [*found]
        death = self._deaths.apply(report, at, self._process)
        self._share(report, death.at)
        for each in late:
            task = asyncio.create_task(self._note_late(death, each))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _note_late(self, death: Death, names: Names) -> None:
        """Add names to a death that is noted already, when they are computed."""
        await asyncio.gather(asyncio.wrap_future(names), return_exceptions=True)
        if suspects := computed(names):
            self._deaths.add(death, suspects)
            # Another process may not know the death, so the report is complete.
            known = [*death.reported], suspects, death.instance, [*death.processes]
            self._share(Report(death.engine, *known), death.at)

    def _share(self, report: Report, at: float) -> None:
        self._announcer.note_own(report.suspects)
        if self._shared is None:
            self._announcer.announce()
        else:
            self._put(report, at)
            self._start_sending()

    def deaths(self, suspect: Suspect) -> list[Death]:
        """Return the suspect's recent deaths, whoever else was on the engines. Tenants may be added to them later."""
        return self._deaths.of(suspect)

    async def wait_until_reported(self) -> None:
        """Wait, within a deadline, until this process's deaths are reported and every other one has answered."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                if self._late:
                    await asyncio.wait(self._late)
                if self._sending is not None:
                    await asyncio.shield(self._sending)
                while not all(death.processes <= death.answered for death in self._deaths.recent(ONE_DEATH_SECONDS)):
                    self._was_read.clear()
                    await self._was_read.wait()

    async def watch(self) -> None:
        """Apply other processes' reports as they arrive, until cancelled. Run it as a task.

        The others wait for this process's answers from its first call on.
        """
        if self._shared is None:
            return
        while True:
            try:
                if self._shared.is_away or self._shared.is_due or await self._shared.wait():
                    await self.read()
                if not self._shared.is_away:
                    self._start_sending()
            except Exception:
                # A bug, or an entry of another release. The next reports are read regardless.
                log.exception("reports of engines' deaths could not be read; retrying")
            await asyncio.sleep(AWAY_SECONDS if self._shared.is_away else PAUSE_SECONDS)

    async def leave(self) -> None:
        """Tell the other processes that this one has ended, and what engines may still have of it. Call it last."""
        if self._shared is not None:
            await self._shared.leave(self._deaths.seconds, await self._orphaned())

    async def _orphaned(self) -> list[OrphanedRequests]:
        """Return the requests of this process that engines may still have, with the names that are soon computed."""
        found = [(engine, *engine.requests.report_detached()) for engine in self.engines()]
        if waiting := [asyncio.wrap_future(each) for _, _, names in found for each in names if not each.done()]:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    # `computed` tells of a name that failed.
                    await asyncio.gather(*waiting, return_exceptions=True)
        orphaned = list[OrphanedRequests]()
        for engine, tenants, names in found:
            suspects = dict.fromkeys(suspect for each in names if each.done() for suspect in computed(each))
            if tenants:
                orphaned.append(OrphanedRequests(engine.url, engine.state.instance, [*tenants], [*suspects]))
        return orphaned

    async def read(self) -> None:
        """Apply the new reports of other processes."""
        assert self._shared is not None
        for entry in await self._shared.read():
            report, age = entry.report, entry.age + entry.report.age
            if report.engine == NO_ENGINE:
                for orphaned in report.left:
                    self._take_over(orphaned, age, entry.process)
                if not report.continues:
                    self._deaths.note_process_end(entry.process)
            elif report.engine == ENDED_BY_OPERATOR:
                for tenant_id in report.tenants:
                    self._deaths.forget(tenant_id, self._clock() - age)
            elif age < self._deaths.seconds:
                death = self._deaths.apply(report, self._clock() - age, entry.process)
                self._announcer.note_other(entry)
                # The engine may run again and have other requests, which is unknown without its instance.
                if age < LATE_SECONDS or death.instance is not None:
                    self._answer(death)
        self._was_read.set()
        self._announcer.announce()

    def _take_over(self, orphaned: OrphanedRequests, age: float, process: str) -> None:
        """Add the requests that a process left to a death that is known, else to this process's until one follows."""
        # A connection may have broken earlier without the engine's death, before these requests were there.
        since = self._clock() - age - LATE_SECONDS
        known = [death for death in self._deaths.of_instance(orphaned.engine, orphaned.instance) if death.at > since]
        if known:
            report = Report(orphaned.engine, orphaned.tenants, orphaned.suspects, orphaned.instance)
            self._deaths.apply(report, known[-1].at, process)
            assert self._shared is not None
            if self._process == min(self._shared.processes):
                # The process that reported them cannot announce their quarantines any more.
                self._announcer.note_own(orphaned.suspects)
        self.take_over(orphaned, age, bool(known))

    def _answer(self, death: Death) -> None:
        """Answer another process's report of a death. Report this process's tenants and detached requests on that
        engine, because one of them may be the cause; report that there are none only if the death waits for this
        process's answer. Send nothing if no answer is awaited, no detached request is new, and the death already lists
        all these tenants.
        """
        tenants, names = self._report_detached(death.engine, death.instance)
        if names or not tenants <= death.reported or self._process in death.processes - death.answered:
            self._note(Report(death.engine, [*tenants], [], death.instance), names, death.at)

    def _put(self, report: Report, at: float) -> None:
        """Add to the unsent report of a death. All requests that break at once go into a single message."""
        key = report.engine, report.instance, at
        unsent = self._unsent.setdefault(key, Report(report.engine, [], [], report.instance))
        unsent.tenants = [*{*unsent.tenants, *report.tenants}]
        unsent.suspects = [*{*unsent.suspects, *report.suspects}]
        unsent.processes = [*{*unsent.processes, *report.processes}]

    def _start_sending(self) -> None:
        if self._unsent and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send the unsent reports. If Redis is away, they are sent after the next reading."""
        assert self._shared is not None
        # Requests that break in the same iteration of the event loop are added first.
        await asyncio.sleep(0)
        while self._unsent:
            (*_, at), report = self._unsent.popitem()
            report.age = self._clock() - at
            if report.age > self._deaths.seconds:
                continue
            if (entry_id := await self._shared.add(report, self._deaths.seconds)) is None:
                self._put(report, at)
                return
            self._announcer.note_sent(report.suspects, entry_id)
            if report.processes:
                # Processes may have started since the last call. Redis has added them to the entry, so all processes
                # wait for their answers.
                started = Report(report.engine, [], [], report.instance, [*self._shared.processes])
                self._deaths.apply(started, at, self._process)
            if not self._unsent:
                # It may add reports.
                await self.read()

    def suspects(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Names:
        """Return the suspects of a request, itself and its adapters. They are computed at once for a small body."""
        return self._names.of(tenant_id, digests, body)
