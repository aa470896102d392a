"""Quarantine: a request that two engines had when they died is not sent to a third.

Any request that an engine has when it dies may be the cause. An engine counts as having a request that was left until
it has shown that it survived the request. So a request, or a tenant's adapter, is quarantined only if no other tenant
had requests on the engine at each of the deaths. A tenant's requests can therefore never put another tenant's into
quarantine. If another tenant had some at each death, the request is suspected, and runs apart from that tenant's
(`isolation.py`). A tenant whose requests in quarantine were the cause of several deaths is refused altogether, because
it may have more of them.

Every gateway process reports its broken and left requests to the others (`shared_deaths.py`), and the tenants with
requests or hints there, also for a death that another process reports. It applies their reports as its own. Only an
HMAC of a request is kept and shared.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gateway.errors import GatewayError
from gateway.fleet.deaths import LATE_SECONDS, ONE_DEATH_SECONDS, TENANT, UNKNOWN_TENANTS, Death, Deaths, Suspicion
from gateway.fleet.engine import EngineRecord
from gateway.fleet.own_requests import NamedBody, Names, named
from gateway.fleet.request_names import RequestNames, computed
from gateway.fleet.shared_deaths import Report, SharedDeaths, Suspect

log = logging.getLogger(__name__)

# Pause between two attempts to read other processes' reports while Redis is away, shortest pause between two readings,
# and the longest time that a retry waits for the report of its engine's death.
AWAY_SECONDS = 1.0
PAUSE_SECONDS = 0.1
REPORT_SECONDS = 0.5


class Quarantined(GatewayError):
    """Engines died repeatedly with this request or this adapter."""

    status, kind, code = 422, "invalid_request_error", "request_quarantined"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"Engines died while they worked on {what} refused for {math.ceil(seconds)} s.",
            headers={"Retry-After": str(math.ceil(seconds))},
        )


class TenantQuarantined(Quarantined):
    """Engines died repeatedly with several of this tenant's requests."""

    code = "tenant_quarantined"

    def __init__(self, seconds: float) -> None:
        super().__init__("several of your requests; all are", seconds)


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
        self._names = RequestNames(secret)
        self._shared = shared
        self._count = count
        self._clock = clock
        self._deaths = Deaths(seconds, clock)
        self._process = "" if shared is None else shared.process
        # Suspects that this process reported last, and those whose quarantine it has logged.
        self._unannounced: set[Suspect] = set()
        self._announced: set[Suspect] = set()
        self._was_read = asyncio.Event()
        # Deaths that wait for names.
        self._late: set[asyncio.Task[None]] = set()
        self._unsent: dict[str, Report] = {}
        self._sending: asyncio.Task[None] | None = None

    async def check(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Raise Quarantined for a request, an adapter or a tenant in quarantine."""
        # A tenant's large bodies take time, and no other tenant's candidates concern them.
        if self._deaths.has_candidate(tenant_id):
            self._check(Suspect(TENANT, tenant_id, ""))
            for key in await self._names.known(tenant_id, digests, body):
                self._check(key)

    async def suspicion(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Suspicion | None:
        """Return the suspicion against a request, None without one."""
        if not self._deaths.has_candidate(tenant_id):
            return None
        key, *_ = await self._names.known(tenant_id, digests, body)
        return self._deaths.suspicion(key)

    async def is_innocent(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> bool:
        """Return whether other tenants' requests or adapters in quarantine were the cause of a request's deaths."""
        key, *_ = await self._names.known(tenant_id, digests, body)
        return self._deaths.is_innocent(key)

    def died_lately(self, engine: EngineRecord) -> bool:
        """Return whether the engine died so recently that its next death would count as the same one."""
        return any(death.engine == engine.url for death in self._deaths.recent(ONE_DEATH_SECONDS))

    async def clear(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        """Forget the deaths of a request that was suspected and has run to its end, in this process.

        The last one stays: a request that kills engines only sometimes is suspected again at the next death.
        """
        key, *_ = await self._names.known(tenant_id, digests, body)
        self._deaths.clear(key)

    @property
    def remembers_deaths(self) -> bool:
        """Return whether an engine's death is remembered, so that a request may be suspected, perhaps elsewhere."""
        return bool(self._deaths.recent())

    def check_adapter(self, tenant_id: str, name: str) -> None:
        """Raise Quarantined for an adapter in quarantine, by its name there, or for its tenant."""
        self._check(Suspect(TENANT, tenant_id, ""))
        self._check(Suspect("adapter", tenant_id, name))

    def _check(self, key: Suspect) -> None:
        if deaths := self._deaths.causes_of(key):
            seconds = deaths[-1].at + self._deaths.seconds - self._clock()
            if seconds > 0:
                raise (
                    TenantQuarantined(seconds)
                    if key.kind == TENANT
                    else Quarantined(f"this {key.kind}; it is", seconds)
                )

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
        self._note(engine.url, engine.state.instance, tenants, names, self._clock())

    def _note(
        self, engine_url: str, instance: str | None, tenants: set[str], names: Sequence[Names], at: float
    ) -> None:
        """Apply and report a death with the names that are computed; the others follow when they are."""
        late = [each for each in names if not each.done()]
        found = dict.fromkeys(suspect for each in names if each not in late for suspect in computed(each))
        processes = [] if self._shared is None or self._shared.is_away else [*self._shared.processes]
        report = Report(engine_url, [*tenants], [*found], instance, processes, self._clock() - at)
        death = self._deaths.apply(report, at, self._process)
        self._share(report)
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
            known = [*death.reported], suspects, death.instance, [*death.processes], self._clock() - death.at
            self._share(Report(death.engine, *known))

    def _share(self, report: Report) -> None:
        self._unannounced.update(report.suspects)
        if self._shared is None:
            self._announce()
        else:
            self._report(report)

    def deaths(self, suspect: Suspect) -> list[Death]:
        """Return the suspect's recent deaths, whoever else was on the engines. Tenants may be added to them later."""
        return self._deaths.of(suspect)

    async def reported(self) -> None:
        """Wait, within a deadline, until this process's deaths are reported and every other one has answered."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                if self._late:
                    await asyncio.wait(self._late)
                if self._sending is not None:
                    await asyncio.shield(self._sending)
                while not all(death.is_complete for death in self._deaths.recent(LATE_SECONDS)):
                    self._was_read.clear()
                    await self._was_read.wait()

    async def watch(self) -> None:
        """Apply other processes' reports as they arrive, until cancelled. Run it as a task.

        The others wait for this process's answers from its first call on.
        """
        if self._shared is None:
            return
        try:
            while True:
                try:
                    await self.read()
                    if not self._shared.is_away:
                        await self._shared.wait()
                except Exception:
                    # A bug, or an entry of another release. The next reports are read regardless.
                    log.exception("reports of engines' deaths could not be read; retrying")
                await asyncio.sleep(AWAY_SECONDS if self._shared.is_away else PAUSE_SECONDS)
        finally:
            await self._shared.leave()

    async def read(self) -> None:
        """Apply the new reports of other processes."""
        assert self._shared is not None
        for process, report, age in await self._shared.read():
            age += report.age
            if age < self._deaths.seconds:
                at = self._clock() - age
                death = self._deaths.apply(report, at, process)
                # The process of the last report announces a quarantine.
                self._unannounced.difference_update(report.suspects)
                # Later, the engine may run again and have other requests.
                if age < LATE_SECONDS:
                    self._answer(death)
        self._was_read.set()
        self._announce()

    def _answer(self, death: Death) -> None:
        """Report this process's requests on an engine for another's report, even if there are none.

        A request among them may be the cause. A death that has their tenants already was reported with them.
        """
        tenants, names = self._left_on(death.engine)
        if names or not tenants <= death.reported or self._process not in death.answered:
            self._note(death.engine, death.instance, tenants, names, death.at)

    def _report(self, report: Report) -> None:
        """Add to the engine's unsent report. All requests that break at once go into a single message."""
        assert self._shared is not None
        unsent = self._unsent.setdefault(report.engine, Report(report.engine, [], [], report.instance))
        unsent.tenants = [*{*unsent.tenants, *report.tenants}]
        unsent.suspects += report.suspects
        unsent.processes, unsent.age = report.processes, max(unsent.age, report.age)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        assert self._shared is not None
        # Requests that break in the same iteration of the event loop are added first.
        await asyncio.sleep(0)
        while self._unsent:
            _, report = self._unsent.popitem()
            await self._shared.add(report, self._deaths.seconds)
            if not self._unsent:
                # It may add reports.
                await self.read()

    def _announce(self) -> None:
        """Count and log new quarantines, in the process that reports the last death only."""
        self._announced = {key for key in self._announced if self._deaths.causes_of(key)}
        self._unannounced = {key for key in self._unannounced if self._deaths.of(key)}
        found = [key for key in self._unannounced if self._deaths.causes_of(key)]
        self._unannounced.difference_update(found)
        for key in dict.fromkeys([*found, *(Suspect(TENANT, each.tenant_id, "") for each in found)]):
            if key not in self._announced and (deaths := self._deaths.causes_of(key)):
                self._announced.add(key)
                self._count(key.kind)
                what = key.kind, len(deaths), key.tenant_id
                log.error("quarantine: the %s was on %d engines when they died: tenant %s", *what)

    def suspects(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Names:
        """Return the suspects of a request, itself and its adapters. They are computed at once for a small body."""
        return self._names.of(tenant_id, digests, body)
