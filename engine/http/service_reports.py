"""Numbers of the reports of service elsewhere that the engine has applied, so that a repeated report counts once."""

from wire.bounded_dict import BoundedDict
from wire.service import ServiceElsewhere

# Gateway processes whose last number is known. Further ones forget that of the process that reported longest ago.
MAX_REPORTERS = 10_000


class ServiceReports:
    """Last number of each gateway process."""

    def __init__(self) -> None:
        self._last = BoundedDict[str, int](MAX_REPORTERS)

    def is_new(self, report: ServiceElsewhere) -> bool:
        """Return whether the report has not arrived before, and remember it."""
        if not report.reporter:
            return True
        if report.number <= self._last.get(report.reporter, -1):
            return False
        self._last.put(report.reporter, report.number)
        return True
