"""Deaths of engines that had requests, and what they show: which suspect is the cause, and which may be.

A suspect is a cause only if no other tenant had requests on the engine at each of its deaths. Unreported tenants count
as present until every process has reported.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from gateway.fleet.shared_deaths import Report, Suspect

TENANT = "tenant"
# Deaths until a request, or an adapter with any requests, is quarantined, and deaths by requests and adapters in
# quarantine until all requests of their tenant are.
LIMITS = {"request": 2, "adapter": 3, TENANT: 5}
# Broken connections to an engine within this time (seconds) count as a single death. Those to one instance do so within
# LATE_SECONDS, because a process that stood still notices a death late.
ONE_DEATH_SECONDS, LATE_SECONDS = 2.0, 5.0
# Stands for the tenants of processes that have not reported, or of all others while Redis is away.
UNKNOWN_TENANTS = "?"
MAX_SUSPECTS = 10_000


class Death(msgspec.Struct, eq=False):
    """An engine's death. at: its time on this process's clock. instance: the engine's, None if unknown.

    reported: the tenants whose requests the engine had, and suspects: the requests and adapters that may be the cause,
    as far as they are reported. processes: those that may have had requests there. answered: those that have reported.
    """

    engine: str
    instance: str | None
    at: float
    reported: set[str] = set()
    suspects: set[Suspect] = set()
    processes: set[str] = set()
    answered: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Return whether all processes have reported their tenants."""
        return self.processes <= self.answered

    @property
    def tenants(self) -> set[str]:
        """Return the tenants whose requests the engine had, with UNKNOWN_TENANTS until all are reported."""
        return self.reported if self.is_complete else self.reported | {UNKNOWN_TENANTS}


class Suspicion(NamedTuple):
    """Suspicion against a request. others: the tenants with requests at each of its deaths. deaths: their number."""

    others: set[str]
    deaths: int


class Deaths:
    """The deaths that a process knows. seconds: how long each is remembered."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._known: list[Death] = []
        self._of: dict[Suspect, list[Death]] = {}
        # Suspects with enough deaths; other tenants of these deaths may still be reported.
        self._candidates: set[Suspect] = set()

    def apply(self, report: Report, at: float, process: str) -> Death:
        """Add a process's report, and return its death. at: the death's time on this process's clock."""
        death = self._find(report.engine, report.instance, at)
        death.answered.add(process)
        death.processes.update(report.processes)
        death.reported.update(report.tenants)
        self.add(death, report.suspects)
        return death

    def _find(self, engine_url: str, instance: str | None, at: float) -> Death:
        """Return the known death that this one is, or a new one."""
        for death in reversed(self._known):
            is_same_instance = instance is not None and death.instance == instance
            if death.engine == engine_url and abs(at - death.at) < (
                LATE_SECONDS if is_same_instance else ONE_DEATH_SECONDS
            ):
                return death
        death = Death(engine_url, instance, at)
        self._known = [*self.recent(), death]
        return death

    def add(self, death: Death, suspects: Iterable[Suspect]) -> None:
        """Add suspects to a death."""
        death.suspects.update(suspects)
        recent = death.at - self.seconds
        for key in suspects:
            deaths = [known for known in self._of.pop(key, []) if known.at > recent and known is not death]
            # The newest last, so that the oldest is forgotten first.
            self._of[key] = [*deaths, death]
            if len(self._of[key]) >= LIMITS.get(key.kind, math.inf):
                self._candidates.add(key)
            else:
                # It may have been one by deaths that are forgotten now.
                self._candidates.discard(key)
        while (excess := len(self._of) - MAX_SUSPECTS) > 0:
            # The oldest of the tenant with the most, so that no tenant makes room for its own at others' expense.
            [(most, _)] = Counter(key.tenant_id for key in self._of).most_common(1)
            for forgotten in list(islice((key for key in self._of if key.tenant_id == most), excess)):
                del self._of[forgotten]
                self._candidates.discard(forgotten)

    def clear(self, key: Suspect) -> None:
        """Forget the deaths of a suspect but for the last one."""
        if key in self._of:
            del self._of[key][:-1]
        self._candidates.discard(key)

    def recent(self, seconds: float | None = None) -> list[Death]:
        """Return the deaths of the last `seconds`, by default all that are remembered."""
        since = self._clock() - (self.seconds if seconds is None else seconds)
        return [death for death in self._known if death.at > since]

    def of(self, suspect: Suspect) -> list[Death]:
        """Return the suspect's recent deaths, whoever else was on the engines. Tenants may be added to them later."""
        since = self._clock() - self.seconds
        return [death for death in self._of.get(suspect, ()) if death.at > since]

    def has_candidate(self, tenant_id: str) -> bool:
        """Return whether a request or an adapter of the tenant has enough deaths for a quarantine."""
        since = self._clock() - self.seconds
        self._candidates = {key for key in self._candidates if self._of[key][-1].at > since}
        return any(key.tenant_id == tenant_id for key in self._candidates)

    def causes_of(self, key: Suspect) -> Sequence[Death]:
        """Return the deaths for which a suspect is in quarantine, the newest last. There are none if it is not."""
        if key.kind == TENANT:
            causes = self._quarantined(key.tenant_id)
            deaths = sorted({death for each in causes for death in self.of(each)}, key=lambda death: death.at)
        elif key in self._candidates and self._is_alone(key):
            deaths = self._of[key]
        else:
            deaths = []
        return deaths if len(deaths) >= LIMITS.get(key.kind, math.inf) else []

    def suspicion(self, key: Suspect) -> Suspicion | None:
        """Return the suspicion against a request, None without one or if it is in quarantine.

        A single death is enough if its tenant has another request, or an adapter, in quarantine. Deaths do not count if
        they have one of another tenant in quarantine.
        """
        if any(self.causes_of(each) for each in (key, Suspect(TENANT, key.tenant_id, ""))):
            return None
        deaths = [death.tenants for death in self.of(key) if not self._is_by_another(death, key.tenant_id)]
        if len(deaths) < (1 if self._quarantined(key.tenant_id) else LIMITS[key.kind]):
            return None
        others = set.intersection(*deaths) - {key.tenant_id}
        return Suspicion(others, len(deaths)) if others else None

    def _quarantined(self, tenant_id: str) -> list[Suspect]:
        """Return a tenant's requests and adapters in quarantine."""
        return [key for key in self._candidates if key.tenant_id == tenant_id and self._is_alone(key)]

    def is_innocent(self, key: Suspect) -> bool:
        """Return whether each death of a suspect has another tenant's request or adapter in quarantine."""
        deaths = self.of(key)
        return bool(deaths) and all(self._is_by_another(death, key.tenant_id) for death in deaths)

    def _is_by_another(self, death: Death, tenant_id: str) -> bool:
        return any(key.tenant_id != tenant_id and self.causes_of(key) for key in death.suspects)

    def _is_alone(self, key: Suspect) -> bool:
        return set.intersection(*(death.tenants for death in self._of[key])) == {key.tenant_id}
