"""Threads for a request's long work: reading its body, tokenizing, hashing, encoding log-probabilities.

Tenants share them fairly, so that no tenant's request waits behind many of another's.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from adapters.fair_threads import FairThreads
from engine.answering.caller import Caller

T = TypeVar("T")

# A tenant uses at most three, and all requests of an engine without a gateway are one tenant's. More would not help,
# whatever the number of cores: most of the work holds the interpreter lock. Only the tokenizer uses several cores, and
# one thread tokenizes 0.7 million tokens a second, more than an accelerator computes.
NUM_THREADS = 4
# Bytes of a body, or tokens, from which work on them runs on a thread; less takes less time than the hand-over.
LONG = 8192


class RequestThreads:
    """Threads of one engine. Call every method on the event loop."""

    def __init__(self) -> None:
        # The gateways' limits of bodies bound the jobs that wait. They keep their priority, because a client waits for
        # each of them. A job's thread ends with it, so nothing has to be closed.
        self._threads = FairThreads(NUM_THREADS, "request", max_pending=0, max_pending_per_tenant=0, yielding=None)

    async def run(self, caller: Caller, work: Callable[[], T], *, is_long: bool = True) -> T:
        """Run the work in the turn of the caller's tenant, or at once on the event loop if it is not long."""
        if not is_long:
            return work()
        job = self._threads.submit(caller.tenant_id, work, bounded=False, weight=caller.weight)
        return await asyncio.wrap_future(job)
