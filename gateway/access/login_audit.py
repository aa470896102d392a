"""Audit entries of failed log-ins, at most PER_MINUTE a minute, so that guesses cannot fill the table.

Each log-in page, the operators' and the tenants', has a limit of its own, so that guesses on one do not hide those on
the other. A single actor gets half of it, so that guesses of unknown keys do not hide failed log-ins with a known key.
"""

import time
from collections import Counter

from gateway.errors import Unavailable
from gateway.records.audit import Audit

# Maximum entries per minute of a log-in page, and of an actor on it. All guesses together are the actor NOBODY.
PER_MINUTE, OF_ACTOR = 10, 5
# Actor of a log-in whose key or person is unknown.
NOBODY = "unknown"


class LoginAudit:
    """Writer of the entries of one process. An entry gives the number of entries left out before it for its page."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._minute = -1
        # Entries of the present minute by page, and by page and actor.
        self._written: Counter[tuple[str, str]] = Counter()
        self._left_out: Counter[str] = Counter()

    async def failed(self, home: str, reason: str, actor: str = NOBODY) -> None:
        """Record a failed log-in. home: the path of the pages. reason: fixed words, never a secret."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute = minute
            self._written.clear()
        of_page, of_actor = (home, ""), (home, actor)
        if self._written[of_page] >= PER_MINUTE or self._written[of_actor] >= OF_ACTOR:
            self._left_out[home] += 1
            return
        self._written.update((of_page, of_actor))
        left_out = self._left_out.pop(home, 0)
        detail = {"reason": reason, **({"left_out": left_out} if left_out else {})}
        try:
            await self._audit.add(actor, "login.failed", home, detail, own=True)
        except Unavailable:
            self._left_out[home] += left_out + 1
