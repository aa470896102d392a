"""Limit of the requests that begin in one round of the event loop; clients take turns.

Without it, 500 requests that arrive at once take their first steps in one round, and nothing else runs for 100 ms. The
same holds wherever many requests wait for one event: the look-up of their key, or the end of their tenant's delay.
"""

import asyncio
from collections import OrderedDict, deque

# The first steps of a request (middlewares, key, body) take 0.2 ms, those up to a refusal 1 ms.
REQUESTS_EACH = 16


class Rounds:
    """Counter of the requests that begin in each round of the running event loop."""

    def __init__(self, each: int = REQUESTS_EACH) -> None:
        self._each = each
        self._begun = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def begin(self, owner: str) -> None:
        """Wait for a round in which a request of the owner may begin."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next)
        if self._begun < self._each:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _next(self) -> None:
        """Start a round: release waiting requests, one of each owner in turn."""
        self._begun = 0
        while self._waiting and self._begun < self._each:
            owner, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                self._begun += 1
                turn.set_result(None)
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
