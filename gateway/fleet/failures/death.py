"""An engine's death, and the tenants whose requests the engine had."""

from collections.abc import Iterable

import msgspec

from gateway.fleet.engines.suspects import Suspect

# Broken connections to an engine within this time (seconds) count as a single death. A process that stood still reports
# a death later. Its first report counts towards a death of the same instance of the engine; if the instance is unknown,
# towards a death less than LATE_SECONDS before, because a foreign server takes longer to start again.
ONE_DEATH_SECONDS, LATE_SECONDS = 2.0, 20.0
# Stands for tenants that are unknown.
UNKNOWN_TENANTS = "?"


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


def one_of_each_instance(deaths: Iterable[Death]) -> list[Death]:
    """Return the first death of each instance of an engine, and each death of an unknown instance, in their order."""
    found: dict[object, Death] = {}
    for death in deaths:
        found.setdefault(death if death.instance is None else (death.engine, death.instance), death)
    return list(found.values())


def has_others(death: Death, tenant_id: str) -> bool:
    """Return whether another tenant is known to have had requests at a death."""
    return bool(death.reported - {tenant_id, UNKNOWN_TENANTS})


def at_each(deaths: Iterable[Death]) -> set[str]:
    """Return the tenants with requests at each complete death, UNKNOWN_TENANTS alone if none is complete."""
    complete = [death.reported for death in deaths if death.is_complete]
    return set.intersection(*complete) if complete else {UNKNOWN_TENANTS}
