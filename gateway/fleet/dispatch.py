"""One request's way to an engine: a place at the gate, the choice, and another engine if that one has not begun."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from aiohttp import ClientConnectionError, ClientResponse
from msgspec.structs import replace

from gateway.admission.overload import Gate, Place
from gateway.errors import Overloaded, Unavailable, UpstreamFailed
from gateway.fleet.client import Call, EngineClient, EngineGone, EngineRefused
from gateway.fleet.registry import EngineRecord, Registry
from gateway.fleet.routing import Conversations, choose, prefix_key
from gateway.tracing import upstream

# Engines that may go away or fail with a request in hand before it is given to no other: it may be the request's fault.
MAX_DEATHS = 2


class Bill(Protocol):
    """Who pays, as far as an engine's choice has to do with it."""

    completion_tokens: int

    def sent(self, engine: EngineRecord, prompt_tokens: int) -> None:
        """The engine is being asked; the last one that this is called with serves the request."""

    def unsent(self) -> None:
        """It did not come to that engine."""

    def refused(self) -> None:
        """That engine did nothing with it."""


class Fleet:
    """first_byte_seconds: how long a request may take to be begun, over all engines that are tried."""

    def __init__(self, registry: Registry, client: EngineClient, gate: Gate, first_byte_seconds: float) -> None:
        self._registry = registry
        self._client = client
        self._gate = gate
        self._first_byte_seconds = first_byte_seconds
        self._conversations = Conversations()

    @asynccontextmanager
    async def open(self, call: Call, bill: Bill) -> AsyncIterator[ClientResponse]:
        """An engine's answer of status 200, its body unread. Raises EngineRefused."""
        tenant = call.tenant
        place = Place(tenant.id, tenant.weight, tenant.priority, call.prompt_tokens)
        async with AsyncExitStack() as held:
            try:
                with call.span.child("routing"):
                    await held.enter_async_context(self._gate.enter(place, lambda: bill.completion_tokens))
            except Overloaded as error:
                raise EngineRefused(error) from error
            yield await self._begin(call, bill, held)

    async def _begin(self, call: Call, bill: Bill, held: AsyncExitStack) -> ClientResponse:
        """Tries one engine after the other until one begins to answer; what it takes is given to `held`."""
        digest = call.model.digest
        prefix = prefix_key(call.tenant.id, digest, call.body)
        refusal: EngineRefused | None = None
        tried: set[EngineRecord] = set()
        deaths = 0
        engine: EngineRecord | None = None
        try:
            async with asyncio.timeout(self._first_byte_seconds):
                while True:
                    left = [candidate for candidate in self._registry.engines if candidate not in tried]
                    engine = choose(left, digest, prefix, self._conversations.engine(prefix, left))
                    if engine is None:
                        raise refusal or EngineRefused(
                            Unavailable(
                                "No engine is available to serve this request; try again shortly.", code="no_engine"
                            )
                        )
                    tried.add(engine)
                    bill.sent(engine, call.prompt_tokens)
                    try:
                        async with _while_it_speaks(engine):
                            response = await held.enter_async_context(self._attempt(engine, call))
                    except EngineGone as error:
                        # One that died with it may have worked, and is asked once it is back.
                        if error.had_it:
                            bill.refused()
                        else:
                            bill.unsent()
                        deaths += error.had_it
                        if deaths == MAX_DEATHS:
                            raise EngineRefused(UpstreamFailed("The engine left before it answered.")) from error
                    except EngineRefused as error:
                        bill.refused()
                        # Another may do better: this one failed, or lacks the adapter's files, say.
                        deaths += isinstance(error.error, UpstreamFailed)
                        if deaths == MAX_DEATHS or not isinstance(error.error, UpstreamFailed | Unavailable):
                            raise
                        if error.error.code == "engine_unavailable":
                            # As good as not there: its own words, "shutting down" say, are none of the client's.
                            bill.unsent()
                            engine.mark_down("it takes no requests")
                        else:
                            refusal = error
                    else:
                        self._conversations.served(prefix, engine)
                        return response
        except TimeoutError:
            if engine is not None and call.body.get("stream"):
                engine.breaker.failed()
            late = UpstreamFailed(f"No engine began to answer within {self._first_byte_seconds:g} s.")
            raise EngineRefused(late) from None

    @asynccontextmanager
    async def _attempt(self, engine: EngineRecord, call: Call) -> AsyncIterator[ClientResponse]:
        """One engine asked, and what is to be learnt from that."""
        started = time.monotonic()
        engine.breaker.sent()
        learn = engine.breaker.gave_up
        try:
            with upstream(call, engine) as span, engine.busy(call.model.digest):
                told = span.headers()
                sent = replace(call, trace=told) if told else call
                async with self._client.open(engine, sent) as response:
                    engine.breaker.began()
                    yield response
                    # An answer that broke off has been told to the client by now; here it only counts.
                    ended = response.content.exception()
            if ended is None:
                learn = engine.breaker.succeeded
                engine.observe_request(time.monotonic() - started)
            elif type(ended) is not ClientConnectionError:
                # That very type is left by closing it ourselves, because a key was revoked say: no fault of the engine.
                learn = engine.breaker.failed
        except EngineGone:
            learn = engine.breaker.failed
            raise
        except EngineRefused as refusal:
            if refusal.broken or refusal.failed:
                learn = engine.breaker.failed
            elif refusal.status is not None:
                learn = engine.breaker.succeeded
            raise
        finally:
            learn()


@asynccontextmanager
async def _while_it_speaks(engine: EngineRecord) -> AsyncIterator[None]:
    """For the wait until an engine begins to answer. Raises EngineGone when it is let go of for its silence."""
    try:
        async with asyncio.timeout(None) as wait:
            engine.unanswered.add(wait)
            try:
                yield
            finally:
                engine.unanswered.discard(wait)
    except TimeoutError as error:
        if not wait.expired():
            raise
        raise EngineGone(had_it=True) from error
