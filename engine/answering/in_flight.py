"""The sequences in flight, on the event loop: their places, their groups, and their end when the core fails or stops.

Knows the core only as `engine.core.client.CoreClient`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from engine.answering.sequence_group import SequenceGroup
from engine.core.client import CoreClient
from engine.core.messages import NO_RULES, TokenRules
from engine.errors import EngineFailed, EngineUnavailable, QueueFull, TenantQueueFull
from engine.scheduling.outputs import next_output, without_arrays
from engine.scheduling.request import NewRequest, RequestOutput
from wire.shared_capacity import SharedCapacity

logger = logging.getLogger(__name__)

# Divisor for the part of all places that a tenant's further sequences leave free, for the first ones of other tenants.
FIRST_PLACES = 32


class InFlight:
    """Sequences in a core. Call every method on the event loop."""

    def __init__(
        self,
        core: CoreClient,
        *,
        max_requests: int,
        on_step: Callable[[float, Sequence[RequestOutput]], None] = lambda *_: None,
    ) -> None:
        """max_requests: limit of sequences in flight, running and waiting. on_step: called with each step's seconds and
        outputs.
        """
        self._core = core
        self._on_step = on_step
        self._accepting = True
        # Sequence id -> group of its HTTP request, and its index in the group.
        self._groups: dict[str, tuple[SequenceGroup, int]] = {}
        # Last output of each sequence that has had one, without its arrays: `next_output` needs none of them.
        self._last: dict[str, RequestOutput] = {}
        # Reserved places: sequences whose request handler runs, from waiting for an adapter or a grammar to sending the
        # answer.
        self._places = SharedCapacity(max_requests, max(1, max_requests // 2))
        # Set while nothing is in flight, and by `stop_waiting`.
        self._drained = asyncio.Event()
        self._drained.set()
        self.core_failed = asyncio.Event()
        core.start(self)

    @property
    def number(self) -> int:
        return len(self._groups)

    async def wait_idle(self) -> None:
        """Wait until no sequence is in flight."""
        await self._drained.wait()

    def max_requests(self, tenant_id: str) -> int:
        """Return the limit of sequences in flight for one tenant: half of all, so that other tenants find a place.

        A tenant with more than one sequence also leaves as many places free as it holds, and some for the first
        sequences of others (`_check_room`). Callers without a tenant do not come from a gateway and may use all places.
        """
        return self._places.share if tenant_id else self._places.total

    @contextmanager
    def place(self, count: int, tenant_id: str = "") -> Iterator[None]:
        """Reserve places for a request's sequences until the client has received the answer.

        Raises QueueFull if not enough places are free, TenantQueueFull if the tenant would have more than its limit or
        leave others too few, EngineUnavailable after a failure or while closing.
        """
        self._check_open()
        self._check_room(count, tenant_id)
        self._places.change(tenant_id, count)
        try:
            yield
        finally:
            self._places.change(tenant_id, -count)

    def submit(self, sequences: list[NewRequest], rules: TokenRules = NO_RULES) -> SequenceGroup:
        """Queue the sequences of one HTTP request. Their places must be reserved. rules: token rules of all of them.

        Raises EngineUnavailable after a failure or while closing.
        """
        self._check_open()
        group = SequenceGroup(self, [new.request_id for new in sequences])
        self._core.add(sequences, rules)  # sent at the end of this iteration, so no event of theirs comes before
        for i, new in enumerate(sequences):
            self._groups[new.request_id] = (group, i)
        self._drained.clear()
        return group

    def _check_open(self) -> None:
        if self._core.failure is not None:
            raise EngineUnavailable(self._core.failure)
        if not self._accepting:
            raise EngineUnavailable("The engine is shutting down.", retry_after=1)

    def _check_room(self, count: int, tenant_id: str) -> None:
        placed, total, own = self._places.held, self._places.total, self._places.held_by(tenant_id)
        if placed + count > total:
            message = f"{placed} of {total} places are in use, and the request needs {count}."
            raise QueueFull(message, retry_after=1)
        # A tenant's only sequence may take the last place.
        is_only = own + count == 1
        kept = 0 if is_only or not tenant_id else total // FIRST_PLACES
        if placed + count > total - kept:
            message = f"{placed} of {total} places are in use; {kept} are for tenants' first sequences."
            raise QueueFull(message, retry_after=1)
        if tenant_id and not self._places.has_room(tenant_id, count, leaves_room=not is_only):
            message = (
                f"{own} of your requests are in flight here already; {count} more would leave too few places to other "
                "tenants."
            )
            raise TenantQueueFull(message, retry_after=1)

    def abort(self, request_id: str, *, is_complete: bool = False) -> None:
        """Abort a sequence before the next step. It may receive outputs of the in-flight step until it is released.

        is_complete: see `messages.Abort`.
        """
        if self._core.failure is not None:
            self.released(request_id)
            return
        self._core.abort(request_id, is_complete=is_complete)

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, wait at most `drain_s` seconds for those in flight, abort the rest, close the core."""
        self._accepting = False
        if self._groups and self._core.failure is None:
            started = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._drained.wait()
            if self._groups:
                seconds = time.monotonic() - started
                logger.warning("aborting %d requests still in flight after %.1f s", len(self._groups), seconds)
        for request_id, (group, _) in list(self._groups.items()):
            self.abort(request_id)
            group.fail(EngineUnavailable("The engine is shutting down.", retry_after=1))
        await self._core.close()

    def stop_waiting(self) -> None:
        """Make a `close` that has begun abort the requests in flight at once."""
        self._drained.set()

    # The methods below are the core's events.

    def stepped(self, seconds: float, outputs: Sequence[RequestOutput], plain: Iterable[tuple[str, int]]) -> None:
        groups, last, every = self._groups, self._last, [*outputs]
        for output in outputs:
            if (found := groups.get(output.request_id)) is not None:
                last[output.request_id] = without_arrays(output)
                found[0].deliver(found[1], output)
        for id_, token in plain:
            # A released sequence has no group. Any other one has had an output.
            if (found := groups.get(id_)) is not None:
                last[id_] = output = next_output(last[id_], token)
                every.append(output)
                found[0].deliver(found[1], output)
        self._on_step(seconds, every)

    def refused(self, request_id: str, error: Exception) -> None:
        found = self._groups.get(request_id)
        if found is not None:
            found[0].fail(error)
            self.released(request_id)

    def released(self, request_id: str) -> None:
        found = self._groups.pop(request_id, None)
        self._last.pop(request_id, None)
        if not self._groups:
            self._drained.set()
        if found is not None:
            found[0].released(request_id)

    def failed(self, reason: str) -> None:
        self.core_failed.set()
        for group in {id(t): t for t, _ in self._groups.values()}.values():
            group.fail(EngineFailed(reason))
        for request_id in list(self._groups):
            self.released(request_id)
