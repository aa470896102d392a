"""The engine's thread, and the messages between it and the event loop.

Commands enter through one queue and run between two steps, for a bounded time. The outputs of a step are delivered in
one call to the event loop. Only this thread touches the engine. It sleeps when there is no work.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from engine.answering.ticket import EngineUnavailable, QueueFull, TenantQueueFull, Ticket
from engine.scheduling.request import NewRequest, RequestOutput
from wire.errors import BadRequest

logger = logging.getLogger(__name__)

FAILED = "the engine failed; send the request again"
T = TypeVar("T")

# Poll interval while every request waits for its adapter to load.
ADAPTER_POLL_S = 0.002
# Time limit for commands between two steps; a command that has begun is finished. Adding a request of 128k tokens takes
# 3 ms.
COMMANDS_S = 0.01


class StepEngine(Protocol):
    """The part of `engine.engine.Engine` that the thread uses."""

    def add_request(self, new: NewRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    @property
    def is_waiting_for_adapters(self) -> bool: ...
    def step(self) -> list[RequestOutput]: ...


class EngineThread:
    """The engine's thread and its command queue. Call every method on the event loop, except those marked as the
    thread's.
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        max_requests: int,
        on_step: Callable[[float, list[RequestOutput]], None] | None = None,
    ) -> None:
        """max_requests: limit of sequences in flight, running and waiting. on_step(seconds, outputs): called in the
        thread.
        """
        self._engine = engine
        self._max_requests = max_requests
        self._on_step = on_step
        self._event_loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[], None]] = deque()
        self._work = threading.Condition()
        self._stopping = False
        self._accepting = True
        self._calls: set[Future[Any]] = set()
        # Sequence id -> ticket of its HTTP request, and its index in the ticket.
        self._tickets: dict[str, tuple[Ticket, int]] = {}
        # Reserved places: sequences whose request handler runs, from waiting for an adapter or a grammar to sending the
        # answer.
        self._placed: Counter[str] = Counter()  # by tenant
        # Set while nothing is in flight, and by `stop_waiting`.
        self._drained = asyncio.Event()
        self._drained.set()
        # Set by the thread before it ends, so that no more work is accepted.
        self.failure: str | None = None
        self.failed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        return len(self._tickets)

    async def wait_idle(self) -> None:
        """Wait until no sequence is in flight."""
        await self._drained.wait()

    def max_requests(self, tenant_id: str) -> int:
        """Return the limit of sequences in flight for one tenant: half of all, so that other tenants find a place.
        Callers without a tenant do not come from a gateway and may use all places.
        """
        return max(1, self._max_requests // 2) if tenant_id else self._max_requests

    @contextmanager
    def place(self, count: int, tenant_id: str = "") -> Iterator[None]:
        """Reserve places for a request's sequences until the client has received the answer.

        Raises QueueFull if no place is free, TenantQueueFull if the tenant uses all of its places, EngineUnavailable
        after a failure or while closing.
        """
        self._check_room(count, tenant_id)
        self._placed[tenant_id] += count
        try:
            yield
        finally:
            self._placed[tenant_id] -= count
            if not self._placed[tenant_id]:
                del self._placed[tenant_id]

    def submit(self, sequences: list[NewRequest]) -> Ticket:
        """Queue the sequences of one HTTP request. Their places must be reserved.

        Raises EngineUnavailable after a failure or while closing.
        """
        self._check_room(0, "")
        ticket = Ticket(self, [new.request_id for new in sequences])
        for i, new in enumerate(sequences):
            self._tickets[new.request_id] = (ticket, i)
            self._push(self._adding(new))
        self._drained.clear()
        return ticket

    def _check_room(self, count: int, tenant_id: str) -> None:
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        if not self._accepting:
            raise EngineUnavailable("the engine is shutting down", retry_after=1)
        placed = self._placed.total()
        if placed + count > self._max_requests:
            raise QueueFull(f"{placed} requests are in flight, which is the limit", retry_after=1)
        if self._placed[tenant_id] + count > self.max_requests(tenant_id):
            message = f"{self._placed[tenant_id]} of your requests are in flight here already"
            raise TenantQueueFull(message, retry_after=1)

    def abort(self, request_id: str) -> None:
        """Abort a sequence before the next step. It may receive outputs of the in-flight step until it is released."""
        if self.failure is not None:
            self.release(request_id)
            return

        def abort() -> None:
            self._engine.abort(request_id)
            self._to_event_loop(self.release, request_id)

        self._push(abort)

    def release(self, request_id: str) -> None:
        """Remove a sequence that the engine has dropped."""
        found = self._tickets.pop(request_id, None)
        if not self._tickets:
            self._drained.set()
        if found is not None:
            found[0].released(request_id)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps, and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as exc:  # noqa: BLE001 - handed to the caller
                future.set_exception(exc if isinstance(exc, Exception) else RuntimeError(repr(exc)))

        if self.failure is not None or not self._thread.is_alive():
            raise EngineUnavailable(self.failure or "the engine is shut down")
        self._calls.add(future)
        self._push(run)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, wait at most `drain_s` seconds for those in flight, abort the rest, end the thread."""
        self._accepting = False
        if self._tickets and self.failure is None:
            started = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._drained.wait()
            if self._tickets:
                seconds = time.monotonic() - started
                logger.warning("aborting %d requests still in flight after %.1f s", len(self._tickets), seconds)
        for request_id, (ticket, _) in list(self._tickets.items()):
            self.abort(request_id)
            ticket.fail(EngineUnavailable("the engine is shutting down", retry_after=1))
        with self._work:
            self._stopping = True
            self._work.notify()
        await asyncio.to_thread(self._thread.join)
        self._fail_calls("the engine is shut down")

    def stop_waiting(self) -> None:
        """Make a `close` that has begun abort the requests in flight at once."""
        self._drained.set()

    def _push(self, command: Callable[[], None]) -> None:
        with self._work:
            self._commands.append(command)
            self._work.notify()

    def _adding(self, new: NewRequest) -> Callable[[], None]:
        def add() -> None:
            try:
                self._engine.add_request(new)
            except BadRequest as exc:
                self._to_event_loop(self._refuse, new.request_id, exc)
            except BaseException as exc:
                logger.exception("a request could not be added")
                error = exc if isinstance(exc, Exception) else RuntimeError(repr(exc))
                self._to_event_loop(self._refuse, new.request_id, error)

        return add

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._engine.has_work():
                    self._step()
            while self._commands:
                self._run_commands()
        except BaseException:  # a Rust panic is no Exception, and would end the thread silently
            # Every tenant's requests receive this text. The exception goes to the log only, because it may quote one of
            # them.
            self.failure = FAILED
            logger.exception("the engine failed and refuses all requests until it is restarted")
            self._to_event_loop(self._fail)

    def _wait_for_work(self) -> bool:
        """Sleep until there is work. Return False if the thread should end."""
        with self._work:
            while not (self._commands or self._stopping or self._engine.has_work()):
                self._work.wait()
            return not self._stopping

    def _run_commands(self) -> None:
        """Run queued commands in order for `COMMANDS_S`. The rest run after the next step."""
        end = time.perf_counter() + COMMANDS_S
        while self._commands and time.perf_counter() < end:
            self._commands.popleft()()

    def _step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        if outputs:
            self._to_event_loop(self._deliver, outputs)
        if self._on_step is not None:
            self._on_step(seconds, outputs)
        if self._engine.is_waiting_for_adapters:
            with self._work:
                if not self._commands and not self._stopping:
                    self._work.wait(ADAPTER_POLL_S)

    def _to_event_loop(self, callback: Callable[..., object], *args: Any) -> None:
        self._event_loop.call_soon_threadsafe(callback, *args)

    # The thread schedules the methods below on the event loop.

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            found = self._tickets.get(output.request_id)
            if found is not None:
                ticket, index = found
                ticket.deliver(index, output)

    def _refuse(self, request_id: str, error: Exception) -> None:
        found = self._tickets.get(request_id)
        if found is not None:
            found[0].fail(error)
            self.release(request_id)

    def _fail(self) -> None:
        reason = self.failure or ""
        self.failed.set()
        for ticket in {id(t): t for t, _ in self._tickets.values()}.values():
            ticket.fail(EngineUnavailable(reason))
        for request_id in list(self._tickets):
            self.release(request_id)
        self._fail_calls(reason)

    def _fail_calls(self, reason: str) -> None:
        for future in self._calls:
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
