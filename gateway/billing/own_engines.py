"""Our own engines: only their usage logs are read, because the request has the internal token."""

import time
from collections.abc import Callable, Iterable, Mapping

# Time for which an engine that left the list may still be asked: the default time limit of a request.
FORMER_SECONDS = 3600.0


class OwnEngines:
    """URLs that this process knows to be engines of ours, from its own list of engines.

    Leases in Redis also name foreign servers. A URL from a lease is asked only if it was on the list as an engine of
    ours within FORMER_SECONDS, and is not on it as a foreign server now.
    """

    def __init__(self, listed: Callable[[], Mapping[str, bool]]) -> None:
        """listed: returns the URLs of the listed engines, and whether each has a usage log, as ours have."""
        self._listed = listed
        # URL -> when it was last on the list (monotonic).
        self._seen: dict[str, float] = {}

    def refresh(self) -> set[str]:
        """Read the list and return our engines on it. Call it periodically, so that removed engines are remembered."""
        now, listed = time.monotonic(), self._listed()
        former = {url: at for url, at in self._seen.items() if now - at < FORMER_SECONDS and url not in listed}
        own = {url for url, has_usage_log in listed.items() if has_usage_log}
        self._seen = former | dict.fromkeys(own, now)
        return own

    def to_ask(self, named: Iterable[str]) -> set[str]:
        """Return our engines on the list, and those of `named` that were on it."""
        return self.refresh() | (self._seen.keys() & set(named))
