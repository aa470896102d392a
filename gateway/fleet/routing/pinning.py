"""Pinned adapters: engines keep the versions that the operator pinned in host memory.

Every SECONDS, each gateway process sends the pins of an adapter to its homes, or to the first engine in its order if it
has no homes. Engines that do not serve the base model of a pinned version get no pin. Engines forget a pin that no
gateway repeats (`PIN_SECONDS`), so a removed pin or engine needs no message.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from msgspec import MsgspecError

from gateway.errors import Unavailable
from gateway.fleet.discovery.base_engines import BaseEngines
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.problems import EngineProblems
from gateway.fleet.routing.candidates import engines_for
from gateway.fleet.routing.choice import Rates
from gateway.records.bases.base import Binding
from wire.http_errors import HTTP_ERRORS

log = logging.getLogger(__name__)

# Interval of the pins. It is shorter than `Prefetched.SECONDS` and PIN_SECONDS, so that no pin ends between two.
SECONDS = 5.0


class SendPins(Protocol):
    async def __call__(self, engine: EngineRecord, digests: Sequence[str]) -> int:
        """Send pins and return the number of adapters kept. Raises ClientError, OSError, TimeoutError, MsgspecError."""


class Pinning:
    """Pins of one process.

    fleet_of: returns the engines of a base model, given its id. read: returns the pinned digests with the bindings of
    their versions; raises Unavailable. rates: request rates, which determine the number of an adapter's homes.
    """

    def __init__(
        self,
        fleet_of: Callable[[str], BaseEngines],
        read: Callable[[], Awaitable[Mapping[str, Collection[Binding]]]],
        send: SendPins,
        rates: Rates,
    ) -> None:
        self._fleet_of = fleet_of
        self._read = read
        self._send = send
        self._rates = rates
        # Engines with too little room or without an answer.
        self._problems = EngineProblems(log)

    async def watch(self) -> None:
        """Send the pins until cancelled."""
        while True:
            # `Database` logs an outage. Engines keep the adapters for `PIN_SECONDS`.
            with suppress(Unavailable):
                await self.send()
            await asyncio.sleep(SECONDS)

    async def send(self) -> None:
        """Send each engine its pins once. Raises Unavailable."""
        by_engine: defaultdict[EngineRecord, list[str]] = defaultdict(list)
        for digest, bindings in (await self._read()).items():
            keeps = partial(_keeps, bindings)
            for base in {binding.base for binding in bindings}:
                for engine in engines_for(self._fleet_of(base), digest, self._rates.of(digest), keeps):
                    by_engine[engine].append(digest)
        await asyncio.gather(*(self._send_to(engine, digests) for engine, digests in by_engine.items()))

    async def _send_to(self, engine: EngineRecord, digests: Sequence[str]) -> None:
        try:
            kept = await self._send(engine, digests)
        except (*HTTP_ERRORS, MsgspecError) as error:
            self._problems.found(engine, f"takes no pins of adapters: {type(error).__name__}")
            return
        if missing := len(digests) - kept:
            self._problems.found(engine, f"lacks the room or the files for {missing} of {len(digests)} pins")
            return
        self._problems.ended(engine)
        for digest in digests:
            engine.prefetched.add(digest)


def _keeps(bindings: Collection[Binding], engine: EngineRecord) -> bool:
    """Return whether the engine keeps pinned adapters and serves one of the bindings."""
    return engine.is_up and engine.address.traits.takes_hints and any(engine.serves(each) for each in bindings)
