"""Dispatch of a request: a place in the queue, an engine, and another engine if the first is not available."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from gateway.errors import BadRequest, EngineDied, NoEngine, Overloaded, RankNotServed, UpstreamFailed
from gateway.fleet.absence import no_engine_error, too_many_sequences_error
from gateway.fleet.attempt_runner import AttemptRunner
from gateway.fleet.calls.answers import Incoming
from gateway.fleet.calls.call import Call, EngineGone, EngineRefused, EngineWithdrew
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.own_requests import InFlight, NamedBody
from gateway.fleet.failures.deaths import UNKNOWN_TENANTS, Suspicion
from gateway.fleet.failures.isolation import Isolation, NotAlone
from gateway.fleet.failures.quarantine import Quarantined
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.fleet.queueing.engine_service import EngineService
from gateway.fleet.queueing.queue import Place
from gateway.fleet.queueing.service_meter import Reported, ServiceMeter
from gateway.fleet.retry_state import MAX_FAILURES, RetryState
from gateway.fleet.routing.candidates import Usable, choose_in
from gateway.fleet.routing.choice import LONG_PROMPT, Choice, Conversations, Rates, RoutedRequest, prefix_key
from gateway.fleet.routing.prefetch import Prefetch
from gateway.records.bases.registry import Bases
from wire.deadlines import deadline

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model

ENGINES_DIED = (
    "The engines died while they worked on this request. You are not billed for it, but the tokens computed for it "
    "count against your limits of tokens per minute and per day."
)

Begun = tuple[EngineRecord, Incoming, InFlight]


class AttemptLog(Protocol):
    """Record of the engine that has the request; `gateway/billing/charges.py` decides who pays."""

    @property
    def reported(self) -> Reported:
        """Return the tokens that the engine of the last `sent` has computed, by its reports."""

    def queued(self, seconds: float) -> None:
        """Record the wait in the gateway's queue, even if the request got no engine."""

    def sent(self, engine: EngineRecord, prompt_tokens: int) -> None:
        """Note that the request is sent to the engine. The last engine noted serves the request."""

    def unsent(self) -> None:
        """Undo the last `sent`: the request did not reach that engine."""

    def lost(self) -> None:
        """Note that the engine of the last `sent` died with the request, perhaps after work."""


class Answering(msgspec.Struct, frozen=True):
    """A response of status 200, its body unread.

    instance: the engine's instance that answers. release: frees the engine's places before the answer's end, because
    the engine has finished its part. Only the first call has an effect. end: notes that the answer was read to its end.
    check_cut_off: returns whether a broken answer's client read too slowly; it may ask the engine.
    """

    engine: EngineRecord
    instance: str | None
    response: Incoming
    release: Callable[[], None]
    end: Callable[[], None]
    check_cut_off: Callable[[], Awaitable[bool]]


class Dispatcher:
    """Dispatcher of requests to all engines.

    first_byte_seconds: time limit for the first byte, over all engines that are tried. isolation: the isolation of the
    same registry.
    """

    def __init__(
        self,
        registry: Registry,
        attempt_runner: AttemptRunner,
        queues: BaseQueues,
        first_byte_seconds: float,
        isolation: Isolation,
        service: EngineService,
        prefetch: Prefetch,
        bases: Bases,
    ) -> None:
        self._registry = registry
        self._service = service
        self.prefetch = prefetch
        self._attempt_runner = attempt_runner
        self._quarantine = attempt_runner.quarantine
        self._isolation = isolation
        self._queues = queues
        self._first_byte_seconds = first_byte_seconds
        self._conversations = Conversations()
        self._bases = bases
        self.rates = Rates()

    def keeps_allowances(self, base: str) -> bool:
        """Return whether every engine of a base model limits requests by an allowance, so that a whole answer's hold
        may grow. base: its id.
        """
        return self._registry.of_base(base).keeps_allowances

    async def check(self, tenant_id: str, model: "Model", body: NamedBody, sequences: int) -> None:
        """Refuse a request that no engine may get, before it costs anything.

        Raises Quarantined for a request or adapter with which engines died, BadRequest for too many sequences.
        """
        await self._quarantine.check(tenant_id, model.suspects, body)
        if sequences > 1:
            engines = self._registry.of_base(model.base).engines
            if (error := too_many_sequences_error(engines, model, body.body, sequences)) is not None:
                raise error

    @asynccontextmanager
    async def open(self, call: Call, record: AttemptLog) -> AsyncIterator[Answering]:
        """Yield an engine that has begun to answer. Raises EngineRefused."""
        tenant, queue = call.tenant, self._queues.of(call.model.base)
        meter = ServiceMeter(call.prompt_tokens, lambda: record.reported)
        place = Place(tenant.id, tenant.weight, tenant.priority, meter, tenant.name, call.sequences)
        if call.model.digest is not None and call.engine is None:
            self.rates.count(call.model.digest)
            place.on_wait = partial(self._hint, call)
        target = call.body.get("ttft_target") or tenant.ttft_target
        place.deadline = deadline(call.arrived, target, call.body.get("priority") or 0)
        async with AsyncExitStack() as held:
            try:
                with call.span.child("routing"):
                    await held.enter_async_context(queue.enter(place))
            except Overloaded as error:
                raise EngineRefused(error) from error
            finally:
                record.queued(time.monotonic() - place.arrived_at)
            try:
                engine, response, in_flight = await self._begin(call, record, place, held)
            except EngineRefused as refused:
                if type(refused.error) is not NoEngine or call.engine is not None:
                    raise
                raise EngineRefused(await self._registry.absence(call.model.base, refused.error)) from refused

            def release() -> None:
                in_flight.free()
                queue.free(place)

            check_cut_off = partial(self._attempt_runner.check_cut_off, engine, in_flight)
            yield Answering(engine, in_flight.instance, response, release, in_flight.end, check_cut_off)

    async def _begin(self, call: Call, record: AttemptLog, place: Place, held: AsyncExitStack) -> Begun:
        """Try engines in turn until one begins to answer; `held` closes the response.

        A stream must begin within `first_byte_seconds`. The first byte of a whole answer arrives with its last, so it
        may use all of the request's time while its engine lives. Raises EngineRefused.
        """
        retry = RetryState(self._prefix(call), passes=place.passes)
        try:
            async with asyncio.timeout(self._first_byte_seconds if call.is_stream else None) as limit:
                while True:
                    await self._check_again(call)
                    async with AsyncExitStack() as attempt:
                        begun = await self._next(call, record, place, retry, attempt, limit)
                        if begun is not None:
                            held.push_async_exit(attempt.pop_all())
                            return begun
        except TimeoutError:
            late = UpstreamFailed(f"No engine began to answer within {self._first_byte_seconds:g} s.")
            raise EngineRefused(late) from None

    async def _next(
        self,
        call: Call,
        record: AttemptLog,
        place: Place,
        retry: RetryState,
        held: AsyncExitStack,
        limit: asyncio.Timeout,
    ) -> Begun | None:
        """Send the request to the next engine. Returns None if another attempt is needed. Raises EngineRefused."""
        engine = await self._next_engine(call, retry, place, held)
        if engine is None:
            return None
        retry.engines.append(engine)
        if call.hold is not None and not (engine.keeps_allowances or call.is_stream):
            await call.hold.cover_all()
        record.sent(engine, call.prompt_tokens)
        begun = await self._try(engine, call, record, place.meter, retry, held, limit)
        if begun is not None:
            if retry.is_apart:
                held.push_async_callback(self._note_survived, call, begun[2])
            self._conversations.served(retry.prefix, engine)
        return begun

    async def _next_engine(
        self, call: Call, retry: RetryState, place: Place, held: AsyncExitStack
    ) -> EngineRecord | None:
        """Return the next engine to try. A suspected request may try each engine a second time.

        At first, it gets an engine without the tenants of its deaths. If there is none, or an engine died with it and
        such tenants once more, it leaves the queue and waits for an engine that is kept for it. Returns None if it is
        no longer suspected, after it has waited in the queue again. Raises EngineRefused.
        """
        suspicion = await self._suspicion(call)
        retry.is_apart = suspicion is not None
        if suspicion is None:
            return self._choose(call, retry)
        if not retry.was_suspected:
            retry.was_suspected = True
            retry.engines.clear()
        if self._best(call, retry, self._conditions(call, retry)) is None:
            raise self._none_left(call, retry)

        def usable(engine: EngineRecord) -> bool:
            return retry.allow(call, engine) and not self._quarantine.died_lately(engine)

        def is_without_them(engine: EngineRecord) -> bool:
            if UNKNOWN_TENANTS in suspicion.others:
                has_none = engine.serves_only(call.tenant.id)
            else:
                has_none = not engine.other_processes_load and engine.requests.tenants.isdisjoint(suspicion.others)
            is_spare = self._isolation.allows(engine) and not self._isolation.is_last(call.model.base, engine)
            return has_none and is_spare and usable(engine)

        if suspicion.deaths <= MAX_FAILURES and (choice := self._best(call, retry, [is_without_them])) is not None:
            return choice.engine
        queue = self._queues.of(call.model.base)
        queue.free(place)
        name = await self._quarantine.name(call.tenant.id, call.model.suspects, call.named)
        alone = self._isolation.engine(call.model.base, name, usable, lambda: self._suspicion(call))
        try:
            if (engine := await held.enter_async_context(alone)) is None:
                await self._check_again(call)
                await queue.enter_again(place)
        except (NotAlone, Overloaded) as error:
            raise EngineRefused(error) from error
        return engine

    async def _suspicion(self, call: Call) -> Suspicion | None:
        return await self._quarantine.suspicion(call.tenant.id, call.model.suspects, call.named)

    async def _note_survived(self, call: Call, in_flight: InFlight) -> None:
        """Clear a suspected request once its engine has answered it to the end."""
        if in_flight.has_ended:
            await self._quarantine.note_survived(call.tenant.id, call.model.suspects, call.named)

    def _choose(self, call: Call, retry: RetryState) -> EngineRecord:
        """Return the next engine to try. Raises EngineRefused with the last engine's reason if none is left."""
        choice = self._best(call, retry, self._conditions(call, retry))
        if choice is None:
            raise self._none_left(call, retry)
        # The homes of a popular adapter load it before requests go there.
        for home in choice.homes if call.engine is None else ():
            if home is not choice.engine:
                self.prefetch.hint(home, call.model.adapters, call.tenant.id)
        return choice.engine

    def _best(self, call: Call, retry: RetryState, conditions: Iterable[Usable]) -> Choice | None:
        """Return the choice by the first condition that any engine meets."""
        digest, fleet = call.model.digest, self._registry.of_base(call.model.base)
        request = RoutedRequest(
            digest,
            retry.prefix,
            self._conversations.engine(retry.prefix),
            self.rates.of(digest),
            reuses_base=call.prompt_tokens >= LONG_PROMPT and digest in fleet.activated,
            sequences=call.sequences,
        )
        in_progress = self._attempt_runner.in_progress[digest]
        found = (choose_in(fleet, request, in_progress, usable) for usable in conditions)
        return next((choice for choice in found if choice is not None), None)

    def _conditions(self, call: Call, retry: RetryState) -> Iterator[Usable]:
        """Generate the conditions for an engine to get the request, the preferred one first."""
        usable = partial(retry.allow, call)

        def is_free(engine: EngineRecord) -> bool:
            return self._isolation.allows(engine) and usable(engine)

        if retry.passes:
            kept = self._registry.of_base(call.model.base).kept_free(retry.passes)
            yield lambda engine: engine is not kept and not engine.fullness(call.sequences) and is_free(engine)
        known, digests = self._bases.get(call.model.base), self._registry.of_base(call.model.base).digests
        present = None, None if known is None else known.digest
        if call.model.digest is None and present[1] is not None and not digests.isdisjoint(present):
            # Requests of the base model itself stay on its former weights only until an engine has the present ones.
            yield lambda engine: engine.state.base_digest in present and is_free(engine)
        yield is_free
        if self._isolation.is_active:
            # The kept engine serves a request that no other one can serve.
            yield usable

    def _none_left(self, call: Call, retry: RetryState) -> EngineRefused:
        """Return the error of a request that no further engine can serve now.

        It is the last engine's refusal. A refusal of the adapter's rank counts only if no absent engine may serve it.
        """
        fleet, refusal = self._registry.of_base(call.model.base), retry.refusal
        if refusal is not None:
            is_for_good = isinstance(refusal.error, RankNotServed)
            if not is_for_good or not any(retry.may_serve(call, engine) for engine in fleet.engines):
                return refusal
        if retry.died:
            return EngineRefused(EngineDied())
        return EngineRefused(no_engine_error(fleet.engines, fleet.available, call.model))

    def _prefix(self, call: Call) -> bytes:
        """Return the key of the call's conversation. An activated LoRA shares the base model's cached blocks."""
        digest = call.model.digest
        if digest is None or digest in self._registry.of_base(call.model.base).activated:
            digest = call.model.base
        return prefix_key(call.tenant.id, digest, call.body)

    def _hint(self, call: Call) -> None:
        """Send hints for the adapters of a request that waits in the queue, to the engine that would get it now."""
        try:
            engine = self._choose(call, RetryState(self._prefix(call)))
        except EngineRefused:
            return
        self.prefetch.hint(engine, call.model.adapters, call.tenant.id)

    async def _try(
        self,
        engine: EngineRecord,
        call: Call,
        record: AttemptLog,
        meter: ServiceMeter,
        retry: RetryState,
        held: AsyncExitStack,
        limit: asyncio.Timeout,
    ) -> Begun | None:
        """Send the request to the engine. Returns None if the next engine is to be tried. Raises EngineRefused."""
        try:
            with meter.attempt(partial(self._service.served, engine, call.tenant.id)):
                posted = msgspec.structs.replace(call, on_posted=meter.note_posted)
                response, in_flight = await held.enter_async_context(self._attempt_runner.open(engine, posted, limit))
        except EngineGone as error:
            # The dead engine may have done work; its counts are requested when it is back.
            if not error.may_have_read:
                record.unsent()
                return None
            record.lost()
            await self._quarantine.wait_until_reported()
            retry.died += 1
            if retry.is_exhausted and not await self._may_go_on(call, retry):
                raise EngineRefused(UpstreamFailed(ENGINES_DIED)) from error
        except EngineWithdrew:
            # The engine counts as absent. Its message, such as "shutting down", is not for the client.
            record.unsent()
        except EngineRefused as error:
            has_failed = isinstance(error.error, UpstreamFailed)
            retry.failed += has_failed
            if (has_failed and retry.is_exhausted) or not error.may_succeed_elsewhere:
                raise
            if error.unsupported:
                record.unsent()
                retry.unsupported_on.add(engine.address.traits.name)
            if isinstance(error.error, BadRequest):
                retry.refusing.append(engine)
            retry.refusal = error
        else:
            return engine, response, in_flight
        return None

    async def _may_go_on(self, call: Call, retry: RetryState) -> bool:
        """Return whether another tenant's request may be, or was, the cause of the deaths."""
        if await self._suspicion(call) is not None:
            return not retry.was_suspected
        return await self._quarantine.is_innocent(call.tenant.id, call.model.suspects, call.named)

    async def _check_again(self, call: Call) -> None:
        """Raise EngineRefused for a request that was quarantined after it was admitted."""
        try:
            await self._quarantine.check(call.tenant.id, call.model.suspects, call.named)
        except Quarantined as error:
            raise EngineRefused(error) from error
