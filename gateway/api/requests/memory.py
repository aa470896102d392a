"""Memory and threads of request bodies, shared fairly between tenants.

A large body holds its part of a common capacity from before its first byte is read until its request ends. Small bodies
hold no memory, but a tenant may have only SMALL_AT_ONCE of them before its quota is checked. Beyond either limit a
request is refused unread.
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import web

from adapters.decaying_sums import DecayingSums
from adapters.fair_threads import FairThreads
from gateway.errors import EngineDied, NoEngine, TooLarge, TooManyBodies, TooMuchRefused, Unavailable
from gateway.process.gil_priority import lower_gil_priority
from wire.shared_capacity import SharedCapacity

T = TypeVar("T")

FREE_BYTES = 2**16
# Small bodies of one tenant that may be read, parsed and counted in tokens at the same time.
SMALL_AT_ONCE = 256
# Owner of the bodies of operators and engines, which have a capacity of their own.
OPERATOR = ""
# Memory of decoded JSON, measured on 64-bit CPython: for each value in a list, and for each list or object.
VALUE_BYTES, CONTAINER_BYTES = 40, 300
# Threads that parse, tokenize and decompress. A single tenant's work leaves one of them free for other tenants.
NUM_THREADS = 2
# CPU time that a tenant's refused requests may have used recently, and its half-life, in seconds: an attacker gets 14 %
# of a core. Admitted requests are not counted, because the quota limits their rate.
REFUSED_SECONDS, REFUSED_HALF_LIFE_S = 2.0, 10.0
# CPU time of refused requests after which the threads rest for the tenant, and the length of a rest as a multiple of a
# refused request's CPU time. Otherwise a thread would be busy until REFUSED_SECONDS are used up, and each second chat
# of other tenants would take longer meanwhile.
FREE_REFUSED_SECONDS, REFUSED_REST = 0.2, 6.0


def weigh(num_bytes: int, containers: int, values: int, *, is_narrow: bool) -> int:
    """Return the most memory that a decoded body takes, in bytes. containers: lists and objects; values: commas.

    is_narrow: whether all characters are ASCII, escaped ones too. A text with a single wide character takes 4 bytes for
    every character.
    """
    return (1 if is_narrow else 4) * num_bytes + VALUE_BYTES * values + CONTAINER_BYTES * containers


class RefusedWork:
    """CPU time of parsing and token counting for requests that were then refused, by tenant. Thread-safe.

    Requests are parsed and counted before the quota is checked, so the quota does not bound this work.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = DecayingSums(REFUSED_HALF_LIFE_S)

    def add(self, owner: str, seconds: float) -> None:
        with self._lock:
            self._seconds.add(owner, seconds)

    def of(self, owner: str) -> float:
        """Return the CPU time of the owner's recently refused requests, in seconds."""
        with self._lock:
            return self._seconds.of(owner)

    def check(self, owner: str) -> None:
        """Raise TooMuchRefused if the owner's refused requests have used up its CPU time."""
        if (used := self.of(owner)) >= REFUSED_SECONDS:
            raise TooMuchRefused(max(1, math.ceil(REFUSED_HALF_LIFE_S * math.log2(used / REFUSED_SECONDS))))


class BodyShare:
    """A request's share of body memory and of the threads. owner: the tenant's id, or OPERATOR."""

    def __init__(self, memory: "BodyMemory", owner: str) -> None:
        self.owner = owner
        self._memory = memory
        self._bytes = 0
        self._undecoded = 0
        self._has_place = False
        # CPU time of the request, here and on engines that count its tokens, until it is admitted or refused; and the
        # part of it that was used here.
        self._seconds = self._own_seconds = 0.0
        self._is_admitted = self._is_refused = False

    def take(self, size: int) -> None:
        """Set the held memory to `size` bytes, more or fewer than before. Raises TooManyBodies, TooLarge."""
        if size <= FREE_BYTES and not self._bytes:
            if not self._has_place:
                self._memory.take(self._memory.places, self.owner, 1)
                self._has_place = True
            return
        capacity = self._memory.capacity_of(self.owner)
        if size > max(capacity.share, self._bytes):
            raise TooLarge(f"The request body takes {size} bytes decoded; this gateway gives it {capacity.share}.")
        self._memory.take(capacity, self.owner, size - self._bytes)
        self._bytes = size

    def decode(self, num_bytes: int, weight: int) -> None:
        """Hold the memory for decoding a body: its own bytes and those of `weigh`. Raises TooManyBodies, TooLarge."""
        if num_bytes > FREE_BYTES:
            self._undecoded = num_bytes
            self.take(num_bytes + weight)

    def admitted(self) -> None:
        """Release the undecoded body's memory and the place: the tenant's quota counts the request from now on."""
        self._is_admitted = True
        self._give_place_back()
        if self._undecoded:
            self.take(self._bytes - self._undecoded)
            self._undecoded = 0

    def refused(self) -> None:
        """Count the request's CPU time against its tenant's limit for refused requests."""
        if not self._is_admitted:
            self._is_refused = True
            self._count_refused(self._seconds)
            self._rest(self._own_seconds)

    def had_no_engine(self) -> None:
        """Count the CPU time of a request for which there was no engine: no limit of its tenant counts the request.

        The time that an engine took to count its tokens is left out, because it may have been a wait for that engine.
        """
        self._count_refused(self._own_seconds)
        self._rest(self._own_seconds)

    def close(self) -> None:
        self._give_place_back()
        if self._bytes:
            self._memory.capacity_of(self.owner).change(self.owner, -self._bytes)
            self._bytes = 0

    def _give_place_back(self) -> None:
        if self._has_place:
            self._memory.places.change(self.owner, -1)
            self._has_place = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on a thread, in the owner's turn. Raises TooMuchRefused."""

        def job() -> T:
            lower_gil_priority()
            return self.run_here(work)

        return await asyncio.wrap_future(self._memory.threads.submit(self.owner, job, bounded=False))

    def run_here(self, work: Callable[[], T]) -> T:
        """Run work on this thread, and count its CPU time. Raises TooMuchRefused."""
        before = self._seconds
        try:
            with self._counted(time.thread_time):
                return work()
        finally:
            self._own_seconds += self._seconds - before

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await an engine's work for the request, and count its duration as CPU time. Raises TooMuchRefused."""
        with self._counted(time.monotonic):
            return await work()

    @contextmanager
    def _counted(self, clock: Callable[[], float]) -> Iterator[None]:
        # Other requests may have been refused while this request waited for its turn.
        self._memory.refused_work.check(self.owner)
        started = clock()
        try:
            yield
        finally:
            seconds = clock() - started
            self._seconds += seconds
            # The client may have left during the work.
            if self._is_refused:
                self._count_refused(seconds)

    def _count_refused(self, seconds: float) -> None:
        if self.owner != OPERATOR:
            self._memory.refused_work.add(self.owner, seconds)

    def _rest(self, seconds: float) -> None:
        """Let the threads rest for the CPU time that a refused request took here."""
        if self.owner != OPERATOR and self._memory.refused_work.of(self.owner) > FREE_REFUSED_SECONDS:
            self._memory.threads.rest(self.owner, REFUSED_REST * seconds)


class BodyMemory:
    """The memory of all request bodies in this process.

    total_bytes: room for the large bodies of all tenants together. A tenant gets at most half, and no more than it
    leaves free.
    """

    def __init__(self, total_bytes: int) -> None:
        self._tenants = SharedCapacity(total_bytes)
        self._operators = SharedCapacity(total_bytes, total_bytes)
        self.places = SharedCapacity(sys.maxsize, SMALL_AT_ONCE)
        # The capacities bound the jobs that wait for a thread.
        self.threads = FairThreads(NUM_THREADS, "bodies", max_pending=0, max_pending_per_tenant=0, yielding=None)
        self.refused_work = RefusedWork()

    @property
    def held(self) -> int:
        return self._tenants.held + self._operators.held

    def capacity_of(self, owner: str) -> SharedCapacity:
        return self._operators if owner == OPERATOR else self._tenants

    @contextmanager
    def share(self, owner: str) -> Iterator[BodyShare]:
        """Hold a request's share for the block. Raises TooMuchRefused.

        A block that raises before `admitted` counts as a refused request, unless it raises Unavailable. A block that
        finds no engine counts by `had_no_engine`.
        """
        self.refused_work.check(owner)
        share = BodyShare(self, owner)
        try:
            yield share
        except Unavailable as error:
            if isinstance(error, NoEngine) and not isinstance(error, EngineDied):
                share.had_no_engine()
            raise
        except BaseException:
            share.refused()
            raise
        finally:
            share.close()

    def take(self, capacity: SharedCapacity, owner: str, more: int) -> None:
        """Add to an owner's use of a capacity. Raises TooManyBodies."""
        if more > 0 and not capacity.has_room(owner, more, leaves_room=owner != OPERATOR):
            raise TooManyBodies
        capacity.change(owner, more)


BODY_MEMORY = web.AppKey("body_memory", BodyMemory)
