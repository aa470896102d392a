"""Cache of compiled grammars by tenant. Grammars are compiled on threads that tenants share fairly.

Each tenant has its own cache: no other tenant can evict its grammars, or learn from compile times which grammars it
uses.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from adapters.fair_threads import FairThreads, TooManyPending, Yielding
from engine.errors import EngineUnavailable, QueueFull, TenantQueueFull
from engine.structured.compiler import Grammar, GrammarCompiler
from wire.bounded_dict import BoundedDict
from wire.errors import BadRequest
from wire.structured import GrammarSpec

logger = logging.getLogger(__name__)

# An ordinary grammar takes kilobytes; one with all the lexer states that `LIMITS` allows takes 10 MB.
MAX_CACHED, MAX_CACHED_PER_TENANT = 64, 16
# Compilation cannot be interrupted. A tenant uses at most one of the threads, so that one is free for the others.
COMPILE_THREADS = 2
COMPILE_SECONDS = 5.0
QUEUE_SECONDS = 5.0
# CPU time within COMPILE_SECONDS from which the grammar is too expensive. With less, the machine is too busy.
EXPENSIVE_CPU_SECONDS = COMPILE_SECONDS / 2
# Limit of the CPU time that a tenant's new grammars and expensive masks have used recently, with a half-life of 30 s.
# It allows 200 ordinary grammars of 5 ms at once and 5 a second after that, or two of the most expensive and one every
# 30 s. In the long run it is at most 2.3 % of a core.
TENANT_CPU_SECONDS = 1.0
# A tenant's first 0.1 s of thread time, about 20 ordinary grammars, is compiled at full speed. Further grammars take at
# most a fifth of a core at the lowest priority: at full speed they doubled the duration of other tenants' steps
# (docs/lab-notes.md).
YIELDING = Yielding(after_seconds=0.1, nice=19, rest=4.0)
MAX_PENDING, MAX_PENDING_PER_TENANT = 256, 16


@dataclass(eq=False, slots=True)
class _Pending:
    """A grammar that is queued or being compiled.

    waiting: number of requests that wait for it. started: time at which a thread began, None while it is queued.
    clock: that thread's CPU clock; None on systems without such clocks.
    """

    waiting: int = 0
    started: float | None = None
    clock: int | None = None
    job: "Future[Grammar]" = field(init=False)
    compiled: "asyncio.Future[Grammar]" = field(init=False)

    @property
    def is_expensive(self) -> bool:
        """Return whether the compilation, which still runs, has used much CPU time."""
        if self.started is None or self.clock is None:
            return self.started is not None
        with contextlib.suppress(OSError):  # the thread has just ended
            return time.clock_gettime(self.clock) > EXPENSIVE_CPU_SECONDS
        return False


class Grammars:
    """The grammar cache and its compile queue, for use on the event loop only. Bounds the cached and the queued
    grammars of each tenant and of all tenants.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = FairThreads(
            COMPILE_THREADS,
            "grammar",
            max_pending=MAX_PENDING,
            max_pending_per_tenant=MAX_PENDING_PER_TENANT,
            yielding=YIELDING,
            max_cpu_seconds=TENANT_CPU_SECONDS,
        )
        # Tenants and each one's grammars, least recently used first.
        self._compiled: OrderedDict[str, BoundedDict[GrammarSpec, Grammar]] = OrderedDict()
        self._pending: dict[tuple[str, GrammarSpec], _Pending] = {}
        # Tenant and CPU seconds of expensive masks, from the engine's thread, which must not wait for a lock.
        self._dear_masks = deque[tuple[str, float]]()

    async def get(self, spec: GrammarSpec, tenant_id: str = "") -> Grammar:
        """Return the tenant's compiled grammar.

        Raises BadRequest for a grammar that does not compile, or that is too expensive to compile within
        `COMPILE_SECONDS`. Raises TenantQueueFull if too many of the tenant's grammars wait, if its compilations have
        used up their CPU time, or if they delay this one beyond `QUEUE_SECONDS`. Raises QueueFull if other tenants'
        grammars or a busy machine delay it, or if too many wait.
        """
        self._charge_masks()
        grammar = self._cached(tenant_id, spec)
        if grammar is None:
            pending = self._pending.get((tenant_id, spec)) or self._start(tenant_id, spec)
            pending.waiting += 1
            try:
                await self._wait(pending, tenant_id, spec)
            finally:
                self._leave(pending, tenant_id, spec)
            grammar = self._result(pending, spec)
        return grammar.blaming(spec.param)

    def close(self) -> None:
        """Drop the grammars that wait; a running compilation ends by itself."""
        self._threads.close(wait=False)

    def _cached(self, tenant_id: str, spec: GrammarSpec) -> Grammar | None:
        own = self._compiled.get(tenant_id)
        if own is None or spec not in own:
            return None
        self._compiled.move_to_end(tenant_id)
        own.move_to_end(spec)
        return own[spec]

    def _charge_masks(self) -> None:
        """Charge tenants for the expensive masks of their grammars, also of those that the cache has evicted."""
        while self._dear_masks:
            self._threads.charge(*self._dear_masks.popleft())

    def _start(self, tenant_id: str, spec: GrammarSpec) -> _Pending:
        pending = _Pending()
        try:
            pending.job = self._threads.submit(tenant_id, partial(self._compile, pending, tenant_id, spec))
        except TooManyPending as exc:
            raise _full(exc, spec) from None
        pending.compiled = asyncio.wrap_future(pending.job)
        pending.compiled.add_done_callback(lambda done: self._keep(pending, tenant_id, spec, done))
        self._pending[tenant_id, spec] = pending
        return pending

    def _compile(self, pending: _Pending, tenant_id: str, spec: GrammarSpec) -> Grammar:
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            pending.clock = time.pthread_getcpuclockid(threading.get_ident())
        pending.started = time.monotonic()
        return self._compiler.compile(spec).charging(lambda seconds: self._dear_masks.append((tenant_id, seconds)))

    async def _wait(self, pending: _Pending, tenant_id: str, spec: GrammarSpec) -> None:
        queued_until = time.monotonic() + QUEUE_SECONDS
        while not pending.compiled.done():
            until = queued_until if pending.started is None else pending.started + COMPILE_SECONDS
            left = until - time.monotonic()
            if left > 0:
                await asyncio.wait([pending.compiled], timeout=left)
            elif pending.is_expensive:
                raise BadRequest.of(spec.param, f"it did not compile within {COMPILE_SECONDS:g} s.")
            elif tenant_id and self._threads.is_heavy(tenant_id):
                raise TenantQueueFull("This tenant's other grammars are still being compiled.", 1, spec.param)
            else:
                raise QueueFull("Other grammars are still being compiled.", retry_after=1)

    def _leave(self, pending: _Pending, tenant_id: str, spec: GrammarSpec) -> None:
        """Stop waiting for a grammar. The last request to leave takes it out of the queue."""
        pending.waiting -= 1
        if not pending.waiting and pending.job.cancel():
            self._forget(pending, tenant_id, spec)

    def _result(self, pending: _Pending, spec: GrammarSpec) -> Grammar:
        if pending.compiled.cancelled():
            raise EngineUnavailable("The engine is shutting down.", retry_after=1)
        error = pending.compiled.exception()
        if error is None:
            return pending.compiled.result()
        if isinstance(error, BadRequest):
            raise BadRequest.of(spec.param, error.reason) from None
        if isinstance(error, TooManyPending):
            raise _full(error, spec) from None
        if isinstance(error, OSError):
            raise QueueFull(f"Grammars to compile: {error.strerror}.", retry_after=1) from None
        # A panic in the library is not an Exception, and must not end the server.
        logger.error("the compiler failed on a grammar of kind %s: %s", spec.kind, type(error).__name__)
        raise BadRequest.of(spec.param, "it cannot be compiled: the compiler failed.") from None

    def _keep(self, pending: _Pending, tenant_id: str, spec: GrammarSpec, done: "asyncio.Future[Grammar]") -> None:
        self._forget(pending, tenant_id, spec)
        if done.cancelled() or done.exception() is not None:
            return
        own = self._compiled.setdefault(tenant_id, BoundedDict(MAX_CACHED_PER_TENANT))
        own.put(spec, done.result())
        self._compiled.move_to_end(tenant_id)
        if sum(map(len, self._compiled.values())) > MAX_CACHED:
            # Evict from the tenant with the most grammars; among equals, from the least recently used tenant.
            largest = max(self._compiled, key=lambda tenant_id: len(self._compiled[tenant_id]))
            self._compiled[largest].popitem(last=False)
            if not self._compiled[largest]:
                del self._compiled[largest]

    def _forget(self, pending: _Pending, tenant_id: str, spec: GrammarSpec) -> None:
        if self._pending.get((tenant_id, spec)) is pending:
            del self._pending[tenant_id, spec]


def _full(error: TooManyPending, spec: GrammarSpec) -> QueueFull:
    message = f"Grammars to compile: {error}."
    if error.is_tenants:
        # With `param`, the gateway refuses the tenant's new forms itself (api/requests/structured_output_forms.py).
        return TenantQueueFull(message, error.retry_after, spec.param)
    return QueueFull(message, error.retry_after)
