"""Time limit of a request, and its end once its key is invalid."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.errors import OutOfTime


@asynccontextmanager
async def while_allowed(
    auth: Authenticator, principal: TenantPrincipal | None, arrived: float, seconds: float
) -> AsyncIterator[None]:
    """End the block when the key becomes invalid, or `seconds` after the request's arrival.

    principal: None for a request without a key. arrived: monotonic time of its arrival. Raises InvalidKey, Forbidden,
    OutOfTime.
    """
    valid = nullcontext() if principal is None else auth.while_valid(principal)
    try:
        async with asyncio.timeout(arrived + seconds - time.monotonic()) as deadline, valid:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise OutOfTime(f"The request exceeded the time limit of {seconds:g} s.") from error
