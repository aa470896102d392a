"""Holds that grow with an answer. A hold starts with the expected completion, and requests more before it is used up.

An answer is ended when its limits have no more room. Our engines get the hold as an allowance and generate no token
beyond it. Other engines may generate more tokens, but those are not delivered.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from gateway.errors import RateLimited, Unavailable
from gateway.quota.local import Grown
from gateway.records.caches.tenant_cache import TenantCache
from wire.responses import ASK_TOKENS

# Share of a tenant's streams that should end within their first hold. Chosen by simulation, as are the constants below:
# docs/lab-notes.md, 2026-11-22.
QUANTILE = 0.9
# The estimate rises by 22 % with a longer completion and falls by 2 % with a shorter one.
GAIN = 1.25
# Estimate before the first completion. With 512, 7 % of the long streams of a tenant's first burst are ended.
FIRST = 1024.0
MIN_ESTIMATE, MAX_ESTIMATE = 64.0, 2.0**22
# Maximum number of estimates, and of a tenant's: each of its mixtures has one.
KNOWN, TENANTS_KNOWN = 10_000, 1000
# Time in which a limit a minute pays off all of its debt. The tokens that it pays off while a stream runs need no hold.
WINDOW_SECONDS = 60.0
# Tokens of each choice that are left when growth is requested.
MARGIN = ASK_TOKENS
# Minimum growth in tokens of each choice. A longer stream requests half of the tokens that it has used.
SLICE = 128
# Seconds until growth that was denied is requested again.
RETRY_SECONDS = 0.5


class Expectations:
    """Estimates of the completion that a stream should hold at first, by tenant and model, learnt from ended streams.

    An estimate follows a quantile by stochastic approximation (Robbins and Monro, 1951) of its logarithm: the steps up
    and down balance when a share of QUANTILE is shorter.
    """

    def __init__(self) -> None:
        self._estimates: TenantCache[str, float] = TenantCache(KNOWN, TENANTS_KNOWN)

    def expect(self, tenant_id: str, model: str) -> int:
        """Return the tokens that one choice holds at first, including the margin."""
        return round(self._estimates.get(tenant_id, model) or FIRST) + MARGIN

    def expect_after(self, tenant_id: str, model: str, completion: float, seconds: float) -> int:
        """Return the tokens that one choice would hold at first after `learn` with the same arguments."""
        return round(self._learnt(tenant_id, model, completion, seconds)) + MARGIN

    def learn(self, tenant_id: str, model: str, completion: float, seconds: float) -> None:
        """Update the estimate with the tokens and the duration of one choice that has ended."""
        self._estimates.put(tenant_id, model, self._learnt(tenant_id, model, completion, seconds))

    def _learnt(self, tenant_id: str, model: str, completion: float, seconds: float) -> float:
        needed = completion / (1 + seconds / WINDOW_SECONDS)
        estimate = self._estimates.get(tenant_id, model) or FIRST
        estimate *= GAIN ** (QUANTILE if needed > estimate else QUANTILE - 1)
        return min(MAX_ESTIMATE, max(MIN_ESTIMATE, estimate))


class Pace:
    """Arithmetic of a stream's growth, without a clock: when it requests more tokens, and how many.

    Counts are in tokens of the rates and include the prompt. used: prompt and generated tokens. allowed: tokens that
    are held or charged. most: tokens that are reserved.
    """

    def __init__(self, prompt: int, expected: int, most: int, choices: int) -> None:
        """choices: the cost in tokens of the rates of one token of each choice."""
        self.prompt, self.used, self.allowed, self.most = prompt, prompt, min(prompt + expected, most), most
        self._choices = choices
        self._again = 0.0

    @property
    def is_used_up(self) -> bool:
        """Return whether more tokens were generated than may be delivered."""
        return self.used > self.allowed < self.most

    @property
    def delivered(self) -> int:
        """Return the tokens that may have been delivered."""
        return min(self.used, self.allowed)

    @property
    def slice(self) -> int:
        """Return the tokens beyond the used ones that a growth requests."""
        return max(SLICE * self._choices, (self.used - self.prompt) // 2)

    def wanted(self, now: float) -> int:
        """Return the tokens to request now, 0 for none."""
        is_enough = self.allowed >= self.most or self.allowed - self.used >= MARGIN * self._choices
        return 0 if is_enough or now < self._again else self.slice

    def grown(self, grown: Grown, now: float) -> None:
        """Apply the answer to a growth."""
        self.allowed = max(self.allowed, grown.usable_tokens)
        self._again = now + RETRY_SECONDS if grown.field else 0.0


class Hold:
    """Tokens that one running request holds of its rates."""

    def __init__(
        self,
        pace: Pace,
        grow: Callable[[int, int], Awaitable[Grown]],
        refusal: Callable[[Grown], RateLimited],
        ended: Callable[[int], None],
    ) -> None:
        """grow: called with the tokens used and those wanted beyond them; raises Unavailable. refusal: returns the
        error for a denied growth. ended: called with the total of tokens used.
        """
        self.pace = pace
        self.ended = ended
        # Tokens that have become debt.
        self.charged = 0
        self.started = time.monotonic()
        # Tokens of the rates that a token of the completion costs.
        self.weight = 1
        # Sends the raised allowance to the engine; None for an engine without allowances.
        self.raise_allowance: Callable[[int], Awaitable[None]] | None = None
        self._grow = grow
        self._refusal = refusal
        self._denied: Grown | None = None
        self._asking: asyncio.Task[Grown] | None = None
        self._covering: asyncio.Task[None] | None = None

    @property
    def allowance(self) -> int | None:
        """Return the completion tokens that may be generated so far; None if the whole reservation is held."""
        return None if self.pace.allowed >= self.pace.most else self._completion

    @property
    def _completion(self) -> int:
        return (self.pace.allowed - self.pace.prompt) // self.weight

    def use(self, completion: int) -> None:
        """Record the completion tokens so far, and request growth in the background if it is needed."""
        pace = self.pace
        pace.used = max(pace.used, pace.prompt + self.weight * completion)
        if self._asking is None and (wanted := pace.wanted(time.monotonic())):
            self._ask(wanted)

    async def cover(self) -> None:
        """Wait until the generated tokens may be delivered: for the growth in progress, then for a last one.

        Raises RateLimited.
        """
        if self._asking is not None:
            await asyncio.wait({self._asking})
        if self.pace.is_used_up:
            await asyncio.shield(self._ask(self.pace.slice))
            if self.pace.is_used_up:
                raise self.refused()

    async def cover_all(self) -> None:
        """Hold the whole reservation, for an answer whose tokens are not counted while it runs. Raises RateLimited."""
        while self._asking is not None:
            await asyncio.wait({self._asking})
        if self.allowance is not None:
            await asyncio.shield(self._ask(self.pace.most - self.pace.delivered))
            if self.allowance is not None:
                raise self.refused()

    def start_cover_all(self, failed: Callable[[RateLimited], None]) -> None:
        """Start `cover_all` in the background. Only the first call has an effect."""
        if self._covering is None:
            self._covering = asyncio.create_task(self._cover_all(failed))

    def refused(self) -> RateLimited:
        """Return the error for the last denied growth."""
        return self._refusal(self._denied or Grown(self.pace.allowed, 0, ""))

    async def refused_at_end(self) -> RateLimited:
        """Charge the tokens of an answer that its engine ended, and return the error with the wait from now on."""
        while self._asking is not None:
            await asyncio.wait({self._asking})
        ended = await asyncio.shield(self._ask(0))
        field = "" if self._denied is None else self._denied.field
        return self._refusal(Grown(self.pace.allowed, ended.wait, field))

    async def _cover_all(self, failed: Callable[[RateLimited], None]) -> None:
        try:
            await self.cover_all()
        except RateLimited as error:
            failed(error)

    def _ask(self, wanted: int) -> "asyncio.Task[Grown]":
        self._asking = asyncio.create_task(self._ask_for(wanted))
        return self._asking

    async def _ask_for(self, wanted: int) -> Grown:
        delivered, before = self.pace.delivered, self.pace.allowed
        wanted += self.pace.used - delivered
        try:
            try:
                grown = await self._grow(delivered, wanted)
                self.charged = max(self.charged, delivered)
            except Unavailable:
                # While Redis is away, running requests continue. Their use is charged later; the wait is the last one.
                wait = 0 if self._denied is None else self._denied.wait
                grown = Grown(min(self.pace.most, delivered + wanted), wait, "")
            self.pace.grown(grown, time.monotonic())
            if grown.field:
                self._denied = grown
            if self.raise_allowance is not None and self.pace.allowed > before:
                await self.raise_allowance(self._completion)
        finally:
            self._asking = None
        return grown
