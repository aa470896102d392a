"""Runner of attempts: one sends a request to one engine, and is recorded in its breakers and the quarantine."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from aiohttp import ClientConnectionError
from msgspec.structs import replace

from gateway.fleet.calls.answers import Incoming
from gateway.fleet.calls.call import Call, EngineGone, EngineRefused, EngineWithdrew
from gateway.fleet.client import EngineClient
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.own_requests import InFlight, count_less
from gateway.fleet.failures.quarantine import Quarantine
from wire.telemetry.spans import OPERATIONS, Span, Value

T = TypeVar("T")


class AttemptRunner:
    """Sends requests to engines. quarantine: where deaths are recorded. in_progress: requests on engines, by adapter
    (None: the base model).
    """

    def __init__(self, registry: Registry, client: EngineClient, quarantine: Quarantine) -> None:
        self._registry = registry
        self._client = client
        self.quarantine = quarantine
        self.in_progress: Counter[str | None] = Counter()

    @asynccontextmanager
    async def open(
        self, engine: EngineRecord, call: Call, limit: asyncio.Timeout | None = None
    ) -> AsyncIterator[tuple[Incoming, InFlight]]:
        """Send the request to an engine, and record the outcome. Yield the answer that has begun, its body unread."""
        tenant_id, digest, breaker, started = call.tenant.id, call.model.digest, engine.breaker, time.monotonic()
        attempt, record = breaker.sent(tenant_id), breaker.gave_up
        self.in_progress[digest] += 1
        try:
            with (
                _upstream_span(call, engine) as span,
                self._counted(engine, call) as in_flight,
                in_flight.ending_with(EngineGone, EngineRefused),
                _on_present_instance(engine, in_flight),
            ):
                sent = replace(call, trace=span.headers() or call.trace, on_sent=partial(engine.note_sent, in_flight))
                async with AsyncExitStack() as held:
                    opened = held.enter_async_context(self._client.open(engine, sent))
                    response = await _until_abandoned(engine, in_flight, opened)
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
                                    cut_off = await self.check_cut_off(engine, in_flight)
                                finally:
                                    # A cancellation during the check must not hide a death.
                                    if not cut_off:
                                        record = breaker.failed
                                        in_flight.end()
                                        self._died(engine, call, in_flight)
            if ended is None:
                record = breaker.succeeded
                if in_flight.is_counted:
                    # Otherwise the client took longer to read than the engine took to answer.
                    engine.observe_request(time.monotonic() - started)
        except (asyncio.CancelledError, EngineGone) as error:
            # A cancellation means that the client has left, or that the engine did not begin to answer in time.
            if isinstance(error, EngineGone) or (limit is not None and limit.expired()):
                record = breaker.failed
            if isinstance(error, EngineGone) and error.may_have_read:
                self._died(engine, call, in_flight)
            raise
        except EngineRefused as refusal:
            if refusal.broken or refusal.failed:
                record = breaker.failed
            elif refusal.status is not None and in_flight.is_sent:  # A refusal that was known already shows nothing.
                record = breaker.succeeded
            raise
        finally:
            count_less(self.in_progress, digest)
            record(attempt)

    def _counted(self, engine: EngineRecord, call: Call) -> AbstractContextManager[InFlight]:
        tenant_id, digest = call.tenant.id, call.model.digest
        loads = digest is not None and not engine.holds(digest)
        suspects = partial(self.quarantine.suspects, tenant_id, call.model.suspects, call.named)
        return engine.requests.count(
            digest, tenant_id, sequences=call.sequences, loads=loads, is_sent=False, suspects=suspects
        )

    def _died(self, engine: EngineRecord, call: Call, in_flight: InFlight) -> None:
        names = self.quarantine.suspects(call.tenant.id, call.model.suspects, call.named)
        self.quarantine.died(engine, call.tenant.id, names, in_flight.instance)

    async def check_cut_off(self, engine: EngineRecord, in_flight: InFlight) -> bool:
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


@contextmanager
def _on_present_instance(engine: EngineRecord, in_flight: InFlight) -> Iterator[None]:
    """Note the instance that gets the request. Mark the engine as down if that instance is gone or withdraws."""
    in_flight.instance = engine.state.instance
    try:
        yield
    except (EngineGone, EngineWithdrew) as error:
        if error.reason is not None:
            engine.mark_gone(in_flight.instance, error.reason)
        raise


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
        raise EngineGone(may_have_read=in_flight.is_sent) from error


def _upstream_span(call: Call, engine: EngineRecord) -> AbstractContextManager[Span]:
    """Return the span of one engine's work on the request, from the call to the end of the answer."""
    if not call.span.is_recording:
        return call.span.child("upstream", "client")
    operation, url = OPERATIONS[call.path], urlsplit(engine.url)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": engine.address.traits.name,
        "gen_ai.request.model": call.model.shown,
        "server.address": url.hostname or "",
        "server.port": url.port or (443 if url.scheme == "https" else 80),
    }
    return call.span.child(f"{operation} {call.model.shown}", "client", attributes)
