"""Holds that follow an answer: it holds the completion that is expected of it, and asks for more before it needs more.

An answer for which its limits have no more room is ended. Our engines keep an allowance: they generate no token beyond
the hold. Of other engines' streams no token is delivered beyond it.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from gateway.errors import RateLimited, Unavailable
from gateway.quota.local import Grown
from wire.responses import ASK_TOKENS

# Streams that need no growth at their tenant's usual length, as a share. Chosen by simulation, as are the figures
# below: docs/lab-notes.md, 2026-11-22.
QUANTILE = 0.9
# The estimate rises by 22 % with a longer completion and falls by 2 % with a shorter one.
GAIN = 1.25
# The estimate before the first completion: with 512, a tenant's first burst of long streams has 7 % of them ended.
FIRST = 1024.0
LEAST, MOST = 64.0, 2.0**22
# Tenants and models of which completions are remembered.
KNOWN = 10_000
# The share of its use that a stream's limit pays off while it runs is not held: so much time pays off all.
WINDOW_SECONDS = 60.0
# Tokens of each choice that are left when more are asked for.
MARGIN = ASK_TOKENS
# The fewest tokens of each choice that are asked for; a longer stream asks for half of what it has used.
SLICE = 128
# Seconds until a growth that was not granted is asked for again.
RETRY_SECONDS = 0.5


class Expectations:
    """The completion that a stream of each tenant and model needs to hold at first, learnt from those that ended.

    An estimate follows a quantile by stochastic approximation (Robbins and Monro, 1951) of the logarithm: the steps up
    and down balance where a share of QUANTILE is shorter.
    """

    def __init__(self) -> None:
        self._estimates: OrderedDict[tuple[str, str], float] = OrderedDict()

    def expect(self, tenant_id: str, model: str) -> int:
        """Return the tokens that one choice holds at first, the margin included."""
        return round(self._estimates.get((tenant_id, model), FIRST)) + MARGIN

    def learn(self, tenant_id: str, model: str, completion: float, seconds: float) -> None:
        """Note that one choice had so many tokens within so many seconds."""
        needed = completion / (1 + seconds / WINDOW_SECONDS)
        estimate = self._estimates.pop((tenant_id, model), FIRST)
        estimate *= GAIN ** (QUANTILE if needed > estimate else QUANTILE - 1)
        self._estimates[tenant_id, model] = min(MOST, max(LEAST, estimate))
        if len(self._estimates) > KNOWN:
            self._estimates.popitem(last=False)


class Pace:
    """When a stream asks for more, and for how much: arithmetic without a clock.

    used, allowed, most: tokens of the rates, the prompt's included: generated so far; held or charged; reserved.
    """

    def __init__(self, prompt: int, expected: int, most: int, choices: int) -> None:
        """choices: tokens of the rates that one token of each choice costs."""
        self.prompt, self.used, self.allowed, self.most = prompt, prompt, min(prompt + expected, most), most
        self._choices = choices
        self._again = 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether more was generated than may be delivered."""
        return self.used > self.allowed < self.most

    @property
    def delivered(self) -> int:
        """Tokens that may have been delivered."""
        return min(self.used, self.allowed)

    @property
    def slice(self) -> int:
        """Tokens beyond the used ones that a growth asks for."""
        return max(SLICE * self._choices, (self.used - self.prompt) // 2)

    def wanted(self, now: float) -> int:
        """Return the tokens to ask for now, 0 for none."""
        is_enough = self.allowed >= self.most or self.allowed - self.used >= MARGIN * self._choices
        return 0 if is_enough or now < self._again else self.slice

    def grown(self, grown: Grown, now: float) -> None:
        """Note what was granted."""
        self.allowed = max(self.allowed, grown.allowed)
        self._again = now + RETRY_SECONDS if grown.field else 0.0


class Hold:
    """The tokens that one running stream holds of its rates."""

    def __init__(
        self,
        pace: Pace,
        grow: Callable[[int, int], Awaitable[Grown]],
        refusal: Callable[[Grown], RateLimited],
        ended: Callable[[int], None],
    ) -> None:
        """grow: asked with the tokens used and those wanted beyond them; raises Unavailable. refusal: the error for a
        growth that was not granted. ended: called with the tokens used in all."""
        self.pace = pace
        self.ended = ended
        # Tokens that are debt.
        self.charged = 0
        self.started = time.monotonic()
        # Tokens of the rates that a token of the completion costs.
        self.weight = 1
        # Tells the engine its raised allowance; None for an engine that keeps none.
        self.raise_allowance: Callable[[int], Awaitable[None]] | None = None
        self._grow = grow
        self._refusal = refusal
        self._denied: Grown | None = None
        self._asking: asyncio.Task[Grown] | None = None
        self._covering: asyncio.Task[None] | None = None

    @property
    def allowance(self) -> int | None:
        """Return the tokens of completion that may be generated for now; None if all that were asked for may."""
        return None if self.pace.allowed >= self.pace.most else self._completion

    @property
    def _completion(self) -> int:
        return (self.pace.allowed - self.pace.prompt) // self.weight

    def use(self, completion: int) -> None:
        """Note the completion's tokens so far and ask for more in the background."""
        pace = self.pace
        pace.used = max(pace.used, pace.prompt + self.weight * completion)
        if self._asking is None and (wanted := pace.wanted(time.monotonic())):
            self._ask(wanted)

    async def cover(self) -> None:
        """Wait until what was generated may be delivered: for the growth that was asked for, then for a last one.

        Raises RateLimited.
        """
        if self._asking is not None:
            await asyncio.wait({self._asking})
        if self.pace.is_used_up:
            await asyncio.shield(self._ask(self.pace.slice))
            if self.pace.is_used_up:
                raise self.refused()

    async def cover_all(self) -> None:
        """Hold all that was asked for, because nobody counts while it is generated. Raises RateLimited."""
        while self._asking is not None:
            await asyncio.wait({self._asking})
        if self.allowance is not None:
            await asyncio.shield(self._ask(self.pace.most - self.pace.delivered))
            if self.allowance is not None:
                raise self.refused()

    def cover_all_behind(self, failed: Callable[[RateLimited], None]) -> None:
        """Do `cover_all` in the background, the first time that this is called."""
        if self._covering is None:
            self._covering = asyncio.create_task(self._cover_all(failed))

    def refused(self) -> RateLimited:
        """Return the error for the growth that was last denied."""
        return self._refusal(self._denied or Grown(self.pace.allowed, 0, ""))

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
                # While Redis is away, or has lost the lease, what runs goes on. Its use is charged later.
                grown = Grown(min(self.pace.most, delivered + wanted), 0, "")
            self.pace.grown(grown, time.monotonic())
            if grown.field:
                self._denied = grown
            if self.raise_allowance is not None and self.pace.allowed > before:
                await self.raise_allowance(self._completion)
        finally:
            self._asking = None
        return grown
