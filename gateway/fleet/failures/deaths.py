"""Deaths of engines that had requests, and what they show: which suspect is the cause, and which may be.

A suspect is a cause only if no other tenant had requests on the engine at each of its deaths. Deaths that a gateway
process may still have to report, because it stands still or was killed, show no cause: any tenant may have been there.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.shared_deaths import Report

TENANT = "tenant"
# Number of deaths after which a suspect is quarantined: a request; an adapter, counted over all its requests; a tenant
# as a whole. Only these deaths count for a tenant: its quarantined requests or adapters caused them, and no other
# tenant had requests on the engine.
LIMITS = {"request": 2, "adapter": 3, TENANT: 4}
# Broken connections to an engine within this time (seconds) count as a single death. A process that stood still reports
# a death later. Its first report counts towards a death of the same instance of the engine; if the instance is unknown,
# towards a death less than LATE_SECONDS before, because a foreign server takes longer to start again.
ONE_DEATH_SECONDS, LATE_SECONDS = 2.0, 20.0
# Stands for tenants that are unknown.
UNKNOWN_TENANTS = "?"
MAX_SUSPECTS = 10_000


class Death(msgspec.Struct, eq=False):
    """An engine's death. at: its time on this process's clock. instance: the engine's instance, None if unknown.

    reported: the tenants whose requests the engine had, and suspects: the requests and adapters that may be the cause,
    as far as they are reported. processes: those that may have had requests there. answered: those that have reported.
    former_culprits: the tenants that had a suspect in quarantine when an operator ended their quarantine.
    """

    engine: str
    instance: str | None
    at: float
    reported: set[str] = set()
    suspects: set[Suspect] = set()
    processes: set[str] = set()
    answered: set[str] = set()
    former_culprits: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Return whether all tenants whose requests the engine had are known."""
        return self.processes <= self.answered and UNKNOWN_TENANTS not in self.reported

    @property
    def tenants(self) -> set[str]:
        """Return the tenants whose requests the engine had, with UNKNOWN_TENANTS until all are known."""
        return self.reported if self.is_complete else self.reported | {UNKNOWN_TENANTS}

    def is_of(self, process: str, instance: str | None, at: float) -> bool:
        """Return whether a process's report of the engine's death at a time is of this death."""
        if None not in (instance, self.instance) and instance != self.instance:
            return False
        if abs(at - self.at) < ONE_DEATH_SECONDS:
            return True
        if process in self.answered:
            return False
        return None not in (instance, self.instance) or abs(at - self.at) < LATE_SECONDS


class Suspicion(NamedTuple):
    """Suspicion against a request. others: the tenants with requests at each of its deaths. deaths: how many count."""

    others: set[str]
    deaths: int


class QuarantinePeriod(NamedTuple):
    """Quarantine of a suspect. deaths: those that led to it, the newest last. began, ends: on the deaths' clock."""

    suspect: Suspect
    deaths: Sequence[Death]
    began: float
    ends: float


class Deaths:
    """The deaths that a process knows. seconds: how long each is remembered."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._known: list[Death] = []
        self._of: dict[Suspect, list[Death]] = {}
        # Suspects with enough deaths, by tenant; other tenants of these deaths may still be reported.
        self._candidates: defaultdict[str, set[Suspect]] = defaultdict(set)
        # The last death of each request that has run to its end since.
        self._survived: dict[Suspect, Death] = {}
        # Processes that have ended. They have reported all that they had.
        self._ended: set[str] = set()
        # Time of the last end of a tenant's quarantine by an operator. Evidence of earlier deaths does not count.
        self._forgotten: dict[str, float] = {}
        # Results until the next report: suspects in quarantine by tenant, and tenants that caused a death.
        self._quarantined: dict[str, set[Suspect]] = {}
        self._culprits: dict[Death, set[str]] = {}

    def apply(self, report: Report, at: float, process: str) -> Death:
        """Add a process's report, and return its death. at: the death's time on this process's clock."""
        death = self._find(report, at, process)
        # Later reports of the process that was late are of the same time.
        death.at = min(death.at, at)
        death.answered.add(process)
        death.processes.update(each for each in report.processes if each not in self._ended)
        death.reported.update(report.tenants)
        self.add(death, report.suspects)
        return death

    def _find(self, report: Report, at: float, process: str) -> Death:
        """Return the known death that a report is of, or a new one."""
        for death in reversed(self._known):
            if death.engine == report.engine and death.is_of(process, report.instance, at):
                return death
        death = Death(report.engine, report.instance, at)
        self._known = [*self.recent(), death]
        return death

    def note_process_end(self, process: str) -> None:
        """Note that a process has ended and has reported all that it had."""
        self._ended.add(process)
        for death in self._known:
            death.answered.add(process)
        self._forget_results()

    def add(self, death: Death, suspects: Iterable[Suspect]) -> None:
        """Add suspects to a death."""
        self._forget_results()
        suspects = [each for each in suspects if not self.is_forgotten(each.tenant_id, death)]
        death.suspects.update(suspects)
        recent = death.at - self.seconds
        for key in suspects:
            deaths = [known for known in self._of.pop(key, []) if known.at > recent and known is not death]
            # The newest death is the last, though reports may arrive late. The suspect is put last, so that the oldest
            # is forgotten first.
            self._of[key] = sorted([*deaths, death], key=lambda each: each.at)
            # It may have been a candidate by deaths that are forgotten now.
            self._judge(key)
        while (excess := len(self._of) - MAX_SUSPECTS) > 0:
            # The oldest of the tenant with the most, so that no tenant makes room for its own at others' expense.
            [(most, _)] = Counter(key.tenant_id for key in self._of).most_common(1)
            for forgotten in list(islice((key for key in self._of if key.tenant_id == most), excess)):
                self._remove(forgotten)

    def _remove(self, key: Suspect) -> None:
        del self._of[key]
        self._survived.pop(key, None)
        self._remove_candidate(key)

    def _judge(self, key: Suspect) -> None:
        """Set whether a suspect is a candidate."""
        if len(_one_of_each_instance(self._of[key])) >= LIMITS.get(key.kind, math.inf):
            self._candidates[key.tenant_id].add(key)
        else:
            self._remove_candidate(key)

    def _remove_candidate(self, key: Suspect) -> None:
        if key in self._candidates.get(key.tenant_id, ()):
            self._candidates[key.tenant_id].discard(key)
            if not self._candidates[key.tenant_id]:
                del self._candidates[key.tenant_id]

    def _forget_results(self) -> None:
        self._quarantined.clear()
        self._culprits.clear()

    def note_survived(self, key: Suspect) -> None:
        """Forget the deaths of a request that has run to its end, but for the last one."""
        self._forget_results()
        if key in self._of:
            del self._of[key][:-1]
            self._survived[key] = self._of[key][-1]
        self._remove_candidate(key)

    def forget(self, tenant_id: str, at: float) -> None:
        """Forget the evidence against a tenant from the deaths until a time, also from those that are reported later.

        The deaths stay evidence against other tenants, but not those of which this tenant was the cause.
        """
        deaths = [death for death in self._known if death.at <= at]
        for death in deaths:
            if tenant_id in self._culprits_of(death):
                death.former_culprits.add(tenant_id)
        self._forgotten[tenant_id] = max(at, self._forgotten.get(tenant_id, -math.inf))
        for death in deaths:
            death.suspects = {each for each in death.suspects if each.tenant_id != tenant_id}
        for key in [key for key in self._of if key.tenant_id == tenant_id]:
            self._of[key] = [death for death in self._of[key] if death.at > at]
            if self._of[key]:
                self._judge(key)
            else:
                self._remove(key)
        self._forget_results()

    def is_forgotten(self, tenant_id: str, death: Death) -> bool:
        """Return whether a death is no evidence against a tenant, because an operator ended its quarantine since."""
        return death.at <= self._forgotten.get(tenant_id, -math.inf)

    def recent(self, seconds: float | None = None) -> list[Death]:
        """Return the deaths of the last `seconds`, by default all that are remembered."""
        since = self._clock() - (self.seconds if seconds is None else seconds)
        return [death for death in self._known if death.at > since]

    def of(self, suspect: Suspect) -> list[Death]:
        """Return the suspect's recent deaths, whoever else was on the engines. Tenants may be added to them later."""
        since = self._clock() - self.seconds
        return [death for death in self._of.get(suspect, ()) if death.at > since]

    def of_instance(self, engine: str, instance: str | None) -> list[Death]:
        """Return the recent deaths of an engine's instance in their order; none for an unknown one.

        Usually there is one. A connection that breaks without the engine's death makes a further one.
        """
        if instance is None:
            return []
        found = [death for death in self.recent() if (death.engine, death.instance) == (engine, instance)]
        return sorted(found, key=lambda death: death.at)

    def has_candidate(self, tenant_id: str) -> bool:
        """Return whether a request or an adapter of the tenant has enough deaths for a quarantine."""
        since = self._clock() - self.seconds
        for key in [key for key in self._candidates.get(tenant_id, ()) if self._of[key][-1].at <= since]:
            self._forget_results()
            self._remove_candidate(key)
        return tenant_id in self._candidates

    def causes_of(self, key: Suspect) -> Sequence[Death]:
        """Return the deaths for which a suspect is in quarantine, the newest last. There are none if it is not.

        An instance of an engine dies once, so only the first of its deaths is among them.
        """
        if key.kind == TENANT:
            alone = [death for death in self.recent() if death.tenants == {key.tenant_id} == self._culprits_of(death)]
            deaths = [death for death in alone if not self.is_forgotten(key.tenant_id, death)]
            deaths.sort(key=lambda death: death.at)
        else:
            deaths = self._of[key] if key in self._causes(key.tenant_id) else []
        deaths = _one_of_each_instance(deaths)
        return deaths if len(deaths) >= LIMITS.get(key.kind, math.inf) else []

    def are_answered(self, deaths: Iterable[Death]) -> bool:
        """Return whether every process has answered the reports of these deaths, or had LATE_SECONDS to do so."""
        late = self._clock() - LATE_SECONDS
        return all(death.processes <= death.answered or death.at < late for death in deaths)

    def quarantine_of(self, key: Suspect) -> QuarantinePeriod | None:
        """Return a suspect's quarantine, None without one."""
        deaths = self.causes_of(key)
        if not deaths:
            return None
        limit = LIMITS[key.kind]
        if key.kind == TENANT:
            # It ends when too few deaths are remembered.
            first, last = deaths[limit - 1], deaths[-limit]
        else:
            # It began when enough deaths had shown that no other tenant was at each of them.
            numbers = range(limit, len(deaths))
            enough = next((n for n in numbers if _at_each(deaths[:n]) == {key.tenant_id}), len(deaths))
            first, last = deaths[enough - 1], deaths[-1]
        ends = last.at + self.seconds
        return QuarantinePeriod(key, deaths, first.at, ends) if ends > self._clock() else None

    def quarantines(self, tenant_id: str | None = None) -> list[QuarantinePeriod]:
        """Return all suspects in quarantine, or those of a tenant."""
        found = list[QuarantinePeriod]()
        for each in [*self._candidates] if tenant_id is None else [tenant_id]:
            if self.has_candidate(each):
                keys = Suspect(TENANT, each, ""), *sorted(self._causes(each))
                found += [period for key in keys if (period := self.quarantine_of(key)) is not None]
        return found

    def suspicion(self, key: Suspect) -> Suspicion | None:
        """Return the suspicion against a request, None without one or if it is in quarantine.

        A single death is enough if another request or an adapter of the same tenant is in quarantine. A death does not
        count if a quarantined request or adapter of another tenant is among its suspects.
        """
        if any(self.causes_of(each) for each in (key, Suspect(TENANT, key.tenant_id, ""))):
            return None
        deaths = [death for death in self.of(key) if not self._culprits_of(death) - {key.tenant_id}]
        enough = 1 if self._causes(key.tenant_id) else LIMITS[key.kind]
        number = len(_one_of_each_instance(deaths))
        if number < enough or deaths[-1] is self._survived.get(key):
            return None
        others = _at_each(deaths) - {key.tenant_id}
        return Suspicion(others, number) if others else None

    def is_innocent(self, key: Suspect) -> bool:
        """Return whether each death of a suspect has another tenant's request or adapter in quarantine."""
        deaths = self.of(key)
        return bool(deaths) and all(self._culprits_of(death) - {key.tenant_id} for death in deaths)

    def _causes(self, tenant_id: str) -> set[Suspect]:
        """Return a tenant's requests and adapters in quarantine."""
        if tenant_id not in self._quarantined:
            candidates = self._candidates.get(tenant_id, ())
            self._quarantined[tenant_id] = {key for key in candidates if _at_each(self._of[key]) == {tenant_id}}
        return self._quarantined[tenant_id]

    def _culprits_of(self, death: Death) -> set[str]:
        """Return the tenants with a suspect of the death in quarantine, now or until an operator ended it."""
        if death not in self._culprits:
            by_tenant = {key.tenant_id for key in death.suspects}
            found = {each for each in by_tenant if not death.suspects.isdisjoint(self._causes(each))}
            self._culprits[death] = found | death.former_culprits
        return self._culprits[death]


def _one_of_each_instance(deaths: Iterable[Death]) -> list[Death]:
    """Return the first death of each instance of an engine, and each death of an unknown instance, in their order."""
    found: dict[object, Death] = {}
    for death in deaths:
        found.setdefault(death if death.instance is None else (death.engine, death.instance), death)
    return list(found.values())


def _at_each(deaths: Iterable[Death]) -> set[str]:
    """Return the tenants with requests at each complete death, UNKNOWN_TENANTS alone if none is complete."""
    complete = [death.reported for death in deaths if death.is_complete]
    return set.intersection(*complete) if complete else {UNKNOWN_TENANTS}
