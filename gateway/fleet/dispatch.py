"""Dispatch of a request: a place at the gate, an engine, and another engine if the first is not available."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
from aiohttp import ClientConnectionError
from msgspec.structs import replace

from gateway.errors import EngineDied, NoEngine, NoEngineOfBase, Overloaded, UpstreamFailed
from gateway.fleet.answers import Incoming
from gateway.fleet.base_engines import BaseEngines
from gateway.fleet.call import Call, EngineGone, EngineRefused, EngineWithdrew
from gateway.fleet.candidates import Usable, choose_in
from gateway.fleet.client import EngineClient
from gateway.fleet.engine import EngineRecord
from gateway.fleet.engine_service import EngineService
from gateway.fleet.gates import Gates
from gateway.fleet.own_requests import InFlight, NamedBody, count_less
from gateway.fleet.prefetch import Prefetch
from gateway.fleet.quarantine import Quarantine, Quarantined
from gateway.fleet.queue import Place
from gateway.fleet.registry import Registry
from gateway.fleet.routing import LONG_PROMPT, Conversations, Rates, RoutedRequest, prefix_key
from gateway.records.bases.registry import Bases
from gateway.spans import upstream
from wire.costs import PROMPT_TOKEN
from wire.deadlines import deadline

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model

# Deaths and failures of engines after which a request is sent to no further engine: it may be the cause.
MAX_FAILURES = 2
ENGINES_DIED = (
    "The engines died while they worked on this request. You are not billed for it, but the tokens computed for it "
    "count against your limits of tokens per minute and per day."
)
NO_ADAPTERS = "The available engines serve the base model only, no adapters."
ONLY_ADAPTERS = (
    "The available engines serve adapters only, because they may answer a base-model request with an adapter's weights."
)

T = TypeVar("T")
Begun = tuple[EngineRecord, Incoming, InFlight]


class Bill(Protocol):
    """Record of the engine that has the request; `gateway/billing/charges.py` decides who pays."""

    completion_tokens: int

    def queued(self, seconds: float) -> None:
        """Record the wait for an engine, even if the request got none."""

    def sent(self, engine: EngineRecord, prompt_tokens: int) -> None:
        """Note that the request is sent to the engine. The last engine noted serves the request."""

    def unsent(self) -> None:
        """Undo the last `sent`: the request did not reach that engine."""

    def lost(self) -> None:
        """Note that the engine of the last `sent` died with the request, perhaps after work."""


class Answering(msgspec.Struct, frozen=True):
    """A response of status 200, its body unread.

    release: frees the engine's places before the answer's end, because the engine has finished its part. Only the first
    call has an effect. end: notes that the answer was read to its end. check_cut_off: returns whether a broken answer's
    client read too slowly; it may ask the engine.
    """

    engine: EngineRecord
    response: Incoming
    release: Callable[[], None]
    end: Callable[[], None]
    check_cut_off: Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class _Tries:
    """Attempts to serve one request. prefix: key of its conversation. engines: those tried, in order. refusal: the last
    engine's. unserving: the engine kinds that do not serve such requests. died: number of engines that died with the
    request. failed: number of engines that failed it otherwise.
    """

    prefix: bytes
    engines: list[EngineRecord] = field(default_factory=list)
    refusal: EngineRefused | None = None
    unserving: set[str] = field(default_factory=set)
    died: int = 0
    failed: int = 0

    @property
    def are_enough(self) -> bool:
        """Return whether the request may be the cause of the failures, so that no further engine gets it."""
        return self.died + self.failed >= MAX_FAILURES


class Fleet:
    """Dispatcher to all engines. first_byte_seconds: time limit for the first byte, over all engines that are tried."""

    def __init__(
        self,
        registry: Registry,
        client: EngineClient,
        gates: Gates,
        first_byte_seconds: float,
        quarantine: Quarantine,
        service: EngineService,
        prefetch: Prefetch,
        bases: Bases,
    ) -> None:
        self._registry = registry
        self._service = service
        self.prefetch = prefetch
        self._quarantine = quarantine
        self._client = client
        self._gates = gates
        self._first_byte_seconds = first_byte_seconds
        self._conversations = Conversations()
        self._bases = bases
        self.rates = Rates()
        # This process's requests on engines, by adapter (None: the base model).
        self._in_progress: Counter[str | None] = Counter()

    def keeps_allowances(self, base: str) -> bool:
        """Return whether every engine of a base model limits requests by an allowance, so that a whole answer's hold
        may grow. base: its id.
        """
        return self._registry.of_base(base).keeps_allowances

    async def check(self, tenant_id: str, model: "Model", body: NamedBody) -> None:
        """Raise Quarantined for a request or adapter with which engines died."""
        await self._quarantine.check(tenant_id, model.suspects, body)

    @asynccontextmanager
    async def open(self, call: Call, bill: Bill) -> AsyncIterator[Answering]:
        """Yield an engine that has begun to answer. Raises EngineRefused."""
        tenant, gate = call.tenant, self._gates.of(call.model.base)
        place = Place(
            tenant.id, tenant.weight, tenant.priority, call.prompt_tokens, lambda: bill.completion_tokens, tenant.name
        )
        if call.model.digest is not None and call.engine is None:
            self.rates.count(call.model.digest)
            place.on_wait = partial(self._hint, call)
        target = call.body.get("ttft_target") or tenant.ttft_target
        place.deadline = deadline(place.arrived, target, call.body.get("priority") or 0)
        async with AsyncExitStack() as held:
            try:
                with call.span.child("routing"):
                    await held.enter_async_context(gate.enter(place))
            except Overloaded as error:
                raise EngineRefused(error) from error
            finally:
                bill.queued(time.monotonic() - place.arrived)
            try:
                engine, response, in_flight = await self._begin(call, bill, place, held)
            except EngineRefused as refused:
                if type(refused.error) is not NoEngine or call.engine is not None:
                    raise
                raise EngineRefused(await self._registry.absence(call.model.base, refused.error)) from refused

            def release() -> None:
                in_flight.free()
                gate.free(place)

            yield Answering(engine, response, release, in_flight.end, partial(self._check_cut_off, engine, in_flight))

    async def _begin(self, call: Call, bill: Bill, place: Place, held: AsyncExitStack) -> Begun:
        """Try engines in turn until one begins to answer; `held` closes the response.

        A stream must begin within `first_byte_seconds`. The first byte of a whole answer arrives with its last, so it
        may use all of the request's time while its engine lives. Raises EngineRefused.
        """
        tries = _Tries(self._prefix(call))
        try:
            async with asyncio.timeout(self._first_byte_seconds if call.is_stream else None) as limit:
                while True:
                    engine = self._choose(call, tries)
                    tries.engines.append(engine)
                    await self._check_again(call)
                    if call.hold is not None and not (engine.keeps_allowances or call.is_stream):
                        await call.hold.cover_all()
                    bill.sent(engine, call.prompt_tokens)
                    place.count_service = partial(self._service.served, engine, call.tenant.id)
                    begun = await self._try(engine, call, bill, tries, held, limit)
                    if begun is not None:
                        self._conversations.served(tries.prefix, engine)
                        place.count_service(call.prompt_tokens * PROMPT_TOKEN)
                        return begun
        except TimeoutError:
            late = UpstreamFailed(f"No engine began to answer within {self._first_byte_seconds:g} s.")
            raise EngineRefused(late) from None

    def _choose(self, call: Call, tries: _Tries) -> EngineRecord:
        """Return the next engine to try. Raises EngineRefused with the last engine's reason if none is left."""
        model = call.model
        fleet, digest = self._registry.of_base(model.base), model.digest
        request = RoutedRequest(
            digest,
            tries.prefix,
            self._conversations.engine(tries.prefix),
            self.rates.of(digest),
            reuses_base=call.prompt_tokens >= LONG_PROMPT and digest in fleet.activated,
        )
        choice = None
        for usable in self._conditions(call, tries, fleet):
            choice = choice or choose_in(fleet, request, self._in_progress[digest], usable)
        if choice is None:
            raise tries.refusal or EngineRefused(self._absence(model, fleet, tries))
        # The homes of a popular adapter load it before requests go there.
        for home in choice.homes if call.engine is None else ():
            if home is not choice.engine:
                self.prefetch.hint(home, model.adapters, call.tenant.id)
        return choice.engine

    def _conditions(self, call: Call, tries: _Tries, fleet: BaseEngines) -> Iterator[Usable]:
        """Generate the conditions for an engine to get the request, the preferred one first."""

        def usable(engine: EngineRecord) -> bool:
            return (
                engine not in tries.engines
                and call.engine in (None, engine)
                and engine.address.traits.name not in tries.unserving
                and engine.breaker.allows(call.tenant.id)
                and engine.takes(call.model)
            )

        known = self._bases.get(call.model.base)
        present = None, None if known is None else known.digest
        if call.model.digest is None and present[1] is not None and not fleet.digests.isdisjoint(present):
            # Requests of the base model itself stay on its former weights only until an engine has the present ones.
            yield lambda engine: engine.state.base_digest in present and usable(engine)
        yield usable

    def _absence(self, model: "Model", fleet: BaseEngines, tries: _Tries) -> NoEngine:
        """Return the error of a request for the model that no engine can serve."""
        if tries.died:
            return EngineDied()
        available = [engine for engine in fleet.engines if engine.available]
        if not available or any(engine.takes(model) for engine in available):
            return NoEngine()
        if not any(engine.serves(model.binding) for engine in available):
            return NoEngineOfBase()
        return NoEngine(NO_ADAPTERS if model.adapters else ONLY_ADAPTERS)

    def _prefix(self, call: Call) -> bytes:
        """Return the key of the call's conversation. An activated LoRA shares the base model's cached blocks."""
        digest = call.model.digest
        if digest is None or digest in self._registry.of_base(call.model.base).activated:
            digest = call.model.base
        return prefix_key(call.tenant.id, digest, call.body)

    def _hint(self, call: Call) -> None:
        """Send hints for the adapters of a request that waits at the gate, to the engine that would get it now."""
        try:
            engine = self._choose(call, _Tries(self._prefix(call)))
        except EngineRefused:
            return
        self.prefetch.hint(engine, call.model.adapters, call.tenant.id)

    async def _try(
        self, engine: EngineRecord, call: Call, bill: Bill, tries: _Tries, held: AsyncExitStack, limit: asyncio.Timeout
    ) -> Begun | None:
        """Send the request to the engine. Returns None if the next engine is to be tried. Raises EngineRefused."""
        try:
            response, in_flight = await held.enter_async_context(self._attempt(engine, call, limit))
        except EngineGone as error:
            # The dead engine may have done work; its counts are requested when it is back.
            if not error.had_it:
                bill.unsent()
                return None
            bill.lost()
            self._quarantine.died(engine, call.tenant.id, call.model.suspects, call.named)
            await self._quarantine.reported()
            tries.died += 1
            if tries.are_enough:
                raise EngineRefused(UpstreamFailed(ENGINES_DIED)) from error
        except EngineWithdrew:
            # The engine counts as absent. Its message, such as "shutting down", is not for the client.
            bill.unsent()
            engine.mark_down("it refused a request, because it accepts none at present")
        except EngineRefused as error:
            tries.failed += isinstance(error.error, UpstreamFailed)
            if tries.are_enough or not error.may_succeed_elsewhere:
                raise
            if error.unserved:
                bill.unsent()
                tries.unserving.add(engine.address.traits.name)
            tries.refusal = error
        else:
            return engine, response, in_flight
        return None

    @staticmethod
    async def _until_abandoned(engine: EngineRecord, in_flight: InFlight, answer: Awaitable[T]) -> T:
        """Await an answer's first byte. Raises EngineGone if the registry ends the wait for a silent engine."""
        try:
            async with asyncio.timeout(None) as wait:
                engine.requests.unanswered.add(wait)
                try:
                    return await answer
                finally:
                    engine.requests.unanswered.discard(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise EngineGone(had_it=in_flight.is_sent) from error

    async def _check_again(self, call: Call) -> None:
        """Raise EngineRefused for a request that was quarantined after it was admitted."""
        try:
            await self.check(call.tenant.id, call.model, call.named)
        except Quarantined as error:
            raise EngineRefused(error) from error

    @asynccontextmanager
    async def _attempt(
        self, engine: EngineRecord, call: Call, limit: asyncio.Timeout | None = None
    ) -> AsyncIterator[tuple[Incoming, InFlight]]:
        """Send the request to an engine, and record the outcome in its breakers and the quarantine."""
        tenant_id, digest, breaker, started = call.tenant.id, call.model.digest, engine.breaker, time.monotonic()
        attempt, record = breaker.sent(tenant_id), breaker.gave_up
        self._in_progress[digest] += 1
        try:
            loads = digest is not None and not engine.holds(digest)
            suspects = partial(self._quarantine.suspects, tenant_id, call.model.suspects, call.named)
            with (
                upstream(call, engine) as span,
                engine.requests.count(digest, tenant_id, loads=loads, is_sent=False, suspects=suspects) as in_flight,
                in_flight.ending_with(EngineGone, EngineRefused),
            ):
                in_flight.instance = engine.state.instance
                sent = replace(call, trace=span.headers() or call.trace, on_sent=in_flight.sent)
                async with AsyncExitStack() as held:
                    opened = held.enter_async_context(self._client.open(engine, sent))
                    response = await self._until_abandoned(engine, in_flight, opened)
                    breaker.began(attempt)
                    try:
                        yield response, in_flight
                    finally:
                        # The client has already received the broken answer's error; here it only counts as a failure.
                        ended = response.content.exception()
                        if ended is not None and type(ended) is not ClientConnectionError:
                            # Exactly that type means that the gateway closed it, for example for a revoked key.
                            if isinstance(ended, TimeoutError):
                                # The time for a read stops while the client holds the engine back.
                                record = breaker.failed
                            else:
                                cut_off = False
                                try:
                                    cut_off = await self._check_cut_off(engine, in_flight)
                                finally:
                                    # A cancellation during the check must not hide a death.
                                    if not cut_off:
                                        record = breaker.failed
                                        in_flight.end()
                                        self._quarantine.died(engine, tenant_id, call.model.suspects, call.named)
            if ended is None:
                record = breaker.succeeded
                if in_flight.is_counted:
                    # Otherwise the client took longer to read than the engine took to answer.
                    engine.observe_request(time.monotonic() - started)
        except (asyncio.CancelledError, EngineGone) as error:
            # A cancellation means that the client has left, or that the engine did not begin to answer in time.
            if isinstance(error, EngineGone) or (limit is not None and limit.expired()):
                record = breaker.failed
            raise
        except EngineRefused as refusal:
            if refusal.broken or refusal.failed:
                record = breaker.failed
            elif refusal.status is not None and not refusal.unserved:
                record = breaker.succeeded
            raise
        finally:
            count_less(self._in_progress, digest)
            record(attempt)

    async def _check_cut_off(self, engine: EngineRecord, in_flight: InFlight) -> bool:
        """Return whether a broken answer was cut off because its client read too slowly, so that no engine failed.

        Engines and proxies limit the time of a write. The client must have held the engine back, and the engine must
        report now that it is still the instance that had the request: otherwise a request that kills engines could hide
        behind a slow client. The first call decides, for all callers.
        """
        if in_flight.cut_off is None:
            if in_flight.is_counted or in_flight.instance is None:
                in_flight.cut_off = asyncio.get_running_loop().create_future()
                in_flight.cut_off.set_result(False)
            else:
                in_flight.cut_off = asyncio.create_task(self._registry.still_runs(engine, in_flight.instance))
        return await asyncio.shield(in_flight.cut_off)
