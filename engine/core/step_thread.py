"""The thread that steps an engine.

Commands run between two steps, for a bounded time: in the order of their arrival, and before the sequences that wait
are added in the turns of their tenants. The outputs of a step are one event. Only this thread touches the engine. It
sleeps when there is no work.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from engine.core.messages import Event, Failed, Refused, Released, Stepped
from engine.errors import CLOSED, FAILED, EngineUnavailable, Fault
from engine.scheduling.outputs import StepOutputs
from engine.scheduling.request import NewRequest
from engine.state import EngineFacts, EngineState

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Poll interval while every request waits for its adapter to load.
ADAPTER_POLL_S = 0.002
# Time limit for commands between two steps; a command that has begun is finished. Adding a request of 128k tokens takes
# 3 ms.
COMMANDS_S = 0.01
# The thread sleeps before it plans the next step only if more than MIN_SPARE_S is left, because a sleep may last 0.1 ms
# too long. It wakes after at most SPARE_POLL_S to check whether the device has ended its step early.
MIN_SPARE_S, SPARE_POLL_S = 0.0003, 0.002


class StepEngine(Protocol):
    """The part of `engine.engine.Engine` that the thread uses."""

    @property
    def facts(self) -> EngineFacts: ...
    def add_request(self, new: NewRequest) -> None: ...
    def abort(self, request_id: str, *, is_complete: bool) -> None: ...
    def has_work(self) -> bool: ...
    @property
    def is_waiting_for_adapters(self) -> bool: ...
    @property
    def spare_seconds(self) -> float: ...
    def step(self) -> StepOutputs: ...
    def state(self) -> EngineState: ...
    def adapter_ready(self, digest: str) -> bool: ...
    def unload_adapter(self, digest: str) -> bool: ...
    def add_service_elsewhere(self, tenants: Mapping[str, float]) -> int: ...
    def measure_roofline(self) -> None: ...
    def close(self) -> None: ...


class Arrivals:
    """Sequences that wait to be added. Tenants take turns: hundreds of long prompts of a tenant take more than a second
    to add. Not thread-safe.
    """

    def __init__(self) -> None:
        # By tenant; the first tenant has the turn.
        self._queues: dict[str, deque[NewRequest]] = {}
        # By id, the number of sequences in the queues that were not dropped.
        self._waiting: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def num_waiting(self) -> int:
        return self._waiting.total()

    def put(self, new: NewRequest) -> None:
        self._queues.setdefault(new.tenant_id, deque()).append(new)
        self._waiting[new.request_id] += 1

    def drop(self, request_id: str) -> None:
        """Let no `take` return the sequence, if it waits."""
        self._waiting.pop(request_id, None)

    def take(self) -> NewRequest | None:
        """Return the next sequence of the tenant whose turn it is, None without any."""
        while self._queues:
            tenant_id = next(iter(self._queues))
            queue = self._queues.pop(tenant_id)
            new = queue.popleft()
            if queue:
                self._queues[tenant_id] = queue
            if self._waiting[new.request_id]:
                self._waiting[new.request_id] -= 1
                if not self._waiting[new.request_id]:
                    del self._waiting[new.request_id]
                return new
        return None


class StepThread:
    """The thread of one engine. `send` is called with its events, in their order, on this thread."""

    def __init__(self, engine: StepEngine, send: Callable[[Event], None]) -> None:
        self._engine, self._send = engine, send
        self._commands: deque[Callable[[], None]] = deque()
        self._arrivals = Arrivals()
        self._work = threading.Condition()
        self._stopping = False
        self._calls: set[Future[Any]] = set()
        # Set by the thread before it ends, so that no more work is accepted.
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def add(self, new: NewRequest) -> None:
        """Queue a sequence. `Refused` follows if it cannot be added."""
        with self._work:
            self._arrivals.put(new)
            self._work.notify()

    def abort(self, request_id: str, *, is_complete: bool = False) -> None:
        """End a sequence before the next step, or never add it; `Released` follows.

        is_complete: see `messages.Abort`.
        """

        def abort() -> None:
            self._engine.abort(request_id, is_complete=is_complete)
            self._send(Released(request_id))

        with self._work:
            # The command runs before the sequences that wait are added, so it would not end one of them.
            self._arrivals.drop(request_id)
            self._push(abort)

    async def state(self) -> EngineState:
        """Return the engine's state between two steps; its waiting sequences include those that are not added yet.
        Raises EngineUnavailable.
        """

        def read() -> EngineState:
            state = self._engine.state()
            with self._work:
                return replace(state, num_waiting=state.num_waiting + self._arrivals.num_waiting)

        return await self.call(read)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on this thread between two steps, and return its result. Raises EngineUnavailable."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as exc:  # noqa: BLE001 - handed to the caller
                future.set_exception(exc if isinstance(exc, Exception) else RuntimeError(repr(exc)))

        if self.failure is not None or not self._thread.is_alive():
            raise EngineUnavailable(self.failure or CLOSED)
        self._calls.add(future)
        self._push(run)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    def fail_calls(self, reason: str) -> None:
        """End the calls that wait, with EngineUnavailable. Call it once no step follows."""
        for future in list(self._calls):
            # A call that has run is listed until its caller's task continues.
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(EngineUnavailable(reason))

    async def close(self) -> None:
        """End the thread after its step and the queued commands."""
        with self._work:
            self._stopping = True
            self._work.notify()
        await asyncio.to_thread(self._thread.join)
        self.fail_calls(CLOSED)

    def _push(self, command: Callable[[], None]) -> None:
        with self._work:
            self._commands.append(command)
            self._work.notify()

    # The methods below run in the engine's thread.

    @property
    def _has_commands(self) -> bool:
        return bool(self._commands or self._arrivals)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._run_commands()
                self._run_commands_in_spare_time()
                if self._engine.has_work():
                    self._step()
            while self._has_commands:
                self._run_commands()
        except BaseException:  # a Rust panic is no Exception, and would end the thread silently
            # Every tenant's requests receive this text. The exception goes to the log only, because it may quote one of
            # them.
            self.failure = FAILED
            logger.exception("the engine failed and refuses all requests until it is restarted")
            self._send(Failed(FAILED))

    def _wait_for_work(self) -> bool:
        """Sleep until there is work. Return False if the thread should end."""
        with self._work:
            while not (self._has_commands or self._stopping or self._engine.has_work()):
                self._work.wait()
            return not self._stopping

    def _run_commands(self, seconds: float = COMMANDS_S) -> None:
        """Run the commands in order, then add the sequences that wait, for at most `seconds`; the rest runs later.

        A command that arrives during this waits for at most one sequence to be added.
        """
        end = time.perf_counter() + seconds
        while self._has_commands and time.perf_counter() < end:
            command = self._commands.popleft() if self._commands else self._add_next
            command()

    def _run_commands_in_spare_time(self) -> None:
        """Run commands as they come until the next step has to be planned, so that it includes their requests."""
        while (spare := self._engine.spare_seconds) > MIN_SPARE_S:
            with self._work:
                if self._stopping:
                    return
                if not self._has_commands:
                    self._work.wait(min(spare, SPARE_POLL_S))
            self._run_commands(min(self._engine.spare_seconds, COMMANDS_S))

    def _add_next(self) -> None:
        with self._work:
            new = self._arrivals.take()
        if new is None:  # those that waited were dropped
            return
        try:
            self._engine.add_request(new)
        except BaseException as exc:  # noqa: BLE001 - a panic ends this request only
            self._send(Refused(new.request_id, Fault.of(exc)))

    def _step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        self._send(Stepped.of(time.perf_counter() - start, outputs))
        if self._engine.is_waiting_for_adapters:
            with self._work:
                if not self._has_commands and not self._stopping:
                    self._work.wait(ADAPTER_POLL_S)
