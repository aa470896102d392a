"""Log, metric and events of new quarantines: each is counted once, by the process that reports its last death."""

import logging
from collections.abc import Callable, Iterable
from itertools import chain

from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import TENANT, Deaths, QuarantinePeriod
from gateway.fleet.failures.shared_deaths import Entry

log = logging.getLogger(__name__)

# Most quarantines of a tenant and kind that are kept for events, of which an hour has as many.
MAX_BEGUN = 20


class QuarantineLog:
    """Announces each new quarantine once, in the process that reports its last death. count: called with its kind."""

    def __init__(self, deaths: Deaths, count: Callable[[str], None]) -> None:
        self._deaths = deaths
        self._count = count
        # Suspects that this process reported last, with the entry's id (None until it is sent), and those whose
        # quarantine it has logged.
        self._unannounced: dict[Suspect, tuple[int, ...] | None] = {}
        self._announced: set[Suspect] = set()
        # Ids of other processes' last entries with suspects of which this process's own entry is not known to be sent.
        self._others: dict[Suspect, tuple[int, ...]] = {}
        # Quarantines that it has logged, by tenant and kind, until they are taken.
        self._begun: dict[tuple[str, str], list[QuarantinePeriod]] = {}

    def note_own(self, suspects: Iterable[Suspect]) -> None:
        """Note that this process reports suspects, so that it announces their quarantines."""
        self._unannounced.update(dict.fromkeys(suspects))

    def note_sent(self, suspects: Iterable[Suspect], entry_id: tuple[int, ...]) -> None:
        """Note the entry with a report of this process."""
        for key in suspects:
            if key in self._unannounced:
                self._unannounced[key] = entry_id
                self._yield_to_later_entry(key, self._others.pop(key, ()))

    def note_other(self, entry: Entry) -> None:
        """Let the process of an entry announce its quarantines, if the entry is later than this process's own."""
        for key in entry.report.suspects:
            if self._unannounced.get(key, ()) is None:
                self._others[key] = entry.id
            else:
                self._yield_to_later_entry(key, entry.id)

    def _yield_to_later_entry(self, key: Suspect, other_id: tuple[int, ...]) -> None:
        """Let another process announce a suspect if its entry is later than this process's own."""
        own_id = self._unannounced.get(key)
        if own_id is not None and own_id < other_id:
            del self._unannounced[key]

    def announce(self) -> None:
        """Count and log new quarantines, in the process that reports the last death only.

        Another process may have reported a death later, so its answer is awaited.
        """
        self._announced = {key for key in self._announced if self._deaths.causes_of(key)}
        self._unannounced = {key: own_id for key, own_id in self._unannounced.items() if self._deaths.of(key)}
        self._others = {key: other_id for key, other_id in self._others.items() if key in self._unannounced}
        causes = {key: self._deaths.causes_of(key) for key in self._unannounced}
        found = [key for key, deaths in causes.items() if deaths and self._deaths.are_answered(deaths)]
        for key in found:
            del self._unannounced[key]
        # A tenant's last death may be complete only after its last request's quarantine is announced.
        tenants = dict.fromkeys(each.tenant_id for each in (*found, *self._announced))
        for key in [*found, *(Suspect(TENANT, each, "") for each in tenants)]:
            if key not in self._announced and (period := self._deaths.quarantine_of(key)) is not None:
                self._announced.add(key)
                self._count(key.kind)
                begun = self._begun.setdefault((key.tenant_id, key.kind), [])
                if len(begun) < MAX_BEGUN:
                    begun.append(period)
                what = key.kind, len(period.deaths), key.tenant_id
                log.error("quarantine: the %s is refused, because engines died with it %d times: tenant %s", *what)

    def take_begun(self) -> list[QuarantinePeriod]:
        """Return the quarantines that this process has logged since the last call, MAX_BEGUN of a tenant and kind."""
        begun, self._begun = self._begun, {}
        return list(chain(*begun.values()))
