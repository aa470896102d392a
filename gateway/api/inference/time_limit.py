"""Time limit of a request, and its end once its key is invalid."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.errors import TimeLimitExceeded
from gateway.process.drain import Drain, ShuttingDown


@asynccontextmanager
async def while_allowed(
    auth: Authenticator,
    principal: TenantPrincipal | None,
    arrived: float,
    seconds: float,
    drain: Drain | None = None,
) -> AsyncIterator[None]:
    """End the block when the key becomes invalid, `seconds` after the request's arrival, or at the end of the drain.

    principal: None for a request without a key. arrived: monotonic time of its arrival. Raises InvalidKey, Forbidden,
    TimeLimitExceeded, ShuttingDown.
    """
    keys = () if principal is None else principal.watched
    try:
        async with asyncio.timeout(arrived + seconds - time.monotonic()) as limit:
            with auth.running.add(keys, limit) as running, nullcontext() if drain is None else drain.limiting(limit):
                yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        if running.is_ended:
            raise await auth.problem_of(keys) from error
        if drain is not None and drain.is_over:
            raise ShuttingDown from error
        raise TimeLimitExceeded(f"The request exceeded the time limit of {seconds:g} s.") from error


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Limit of inference requests. seconds: the limit, counted from a request's arrival."""

    auth: Authenticator
    seconds: float
    drain: Drain

    def of(self, principal: TenantPrincipal, arrived: float) -> AbstractAsyncContextManager[None]:
        """Return the block that ends as `while_allowed` does."""
        return while_allowed(self.auth, principal, arrived, self.seconds, self.drain)
