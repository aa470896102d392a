"""The engine's core as the server sees it: sequences in, outputs out, and questions between two steps.

Everything in this module is data or a message, so that a core need not be in the server's thread or process. The server
tokenizes, detokenizes, compiles grammars and speaks HTTP; the core schedules and steps. `core_thread.CoreThread` runs
it in a thread of this process; `in_flight.InFlight` keeps the server's side.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.engine import EngineFacts, EngineState
from engine.scheduling.request import NewRequest, RequestOutput


class CoreEvents(Protocol):
    """Receiver of a core's events. Every method is called on the event loop, in the order of the events."""

    def stepped(self, seconds: float, outputs: Sequence[RequestOutput]) -> None:
        """Take the outputs of a step that took `seconds`."""
        ...

    def refused(self, request_id: str, error: Exception) -> None:
        """Take the error of a sequence that could not be added. The core does not know it."""
        ...

    def released(self, request_id: str) -> None:
        """Take the end of an aborted sequence; no output of it follows."""
        ...

    def failed(self, reason: str) -> None:
        """Take the core's failure. No event follows, and every sequence in it is lost."""
        ...


class Core(Protocol):
    """A loaded engine's core. Call every method on the event loop.

    failure: the text for clients once the core has failed; set before `CoreEvents.failed` is called.
    """

    failure: str | None

    @property
    def facts(self) -> EngineFacts: ...

    def start(self, events: CoreEvents) -> None:
        """Begin to step. No method is called before."""
        ...

    def add(self, new: NewRequest) -> None:
        """Queue a sequence. Its outputs or its refusal follow as events."""
        ...

    def abort(self, request_id: str) -> None:
        """End a sequence before the next step; `released` follows. Outputs of the step in flight may come before."""
        ...

    async def state(self) -> EngineState:
        """Return the state between two steps. Raises EngineUnavailable, like the methods below."""
        ...

    async def is_on_device(self, digest: str) -> bool:
        """Return whether an adapter can be used without a load."""
        ...

    async def unload_adapter(self, digest: str) -> bool:
        """Free an adapter's device memory. Return False while a sequence uses it; see `Engine.unload_adapter`."""
        ...

    async def charge_elsewhere(self, tenants: Mapping[str, float]) -> int:
        """Charge tenants for service at other engines, in cost units. Return the number of those with requests here."""
        ...

    async def measure_roofline(self) -> None:
        """Measure the device's limits; see `Engine.measure_roofline`."""
        ...

    async def close(self) -> None:
        """End the steps and free the engine. Sequences must be aborted before."""
        ...
