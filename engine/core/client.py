"""The front's side of the messages: a client of a loaded engine's core.

Commands of one iteration of the event loop leave in one frame. A link carries frames to the core, which may run in a
thread of this process or in a process of its own; everything else is the same.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from adapters.tiers.state import LoadResult
from engine.core import messages
from engine.core.messages import AdapterFacts, Inspection, Question, StateReading, TokenRules
from engine.errors import FAILED, EngineFailed, EngineUnavailable
from engine.progress import StartProgress
from engine.scheduling.request import NewRequest, RequestOutput
from engine.state import EngineFacts
from wire.mixtures import Mixture

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CoreEvents(Protocol):
    """Receiver of a core's events. Every method is called on the event loop, in the order of the events."""

    def stepped(self, seconds: float, outputs: Sequence[RequestOutput], plain: Iterable[tuple[str, int]]) -> None:
        """Handle the outputs of a step that took `seconds`. plain: id and new token of each sequence that has nothing
        else to report; its output equals its last one except for the token and the number of tokens.
        """
        ...

    def refused(self, request_id: str, error: Exception) -> None:
        """Handle the error of a sequence that the core could not add."""
        ...

    def released(self, request_id: str) -> None:
        """Handle the end of an aborted sequence; no output of it follows."""
        ...

    def failed(self, reason: str) -> None:
        """Handle the core's failure. No event follows, and every sequence in it is lost."""
        ...


class Link(Protocol):
    """Connection to a core. Delivers the core's frames to `CoreClient.receive`. Calls `CoreClient.lost` if it breaks.

    pid: the core's process, None if it is this one.
    """

    @property
    def pid(self) -> int | None: ...

    def send(self, frame: bytes) -> None:
        """Send a frame of commands. Never blocks."""
        ...

    async def close(self) -> None:
        """End the core, which has closed its engine."""
        ...


class CoreClient:
    """Client of a core behind a link. Call every method on the event loop.

    facts: constants of the engine, set by `load`. failure: the text for clients once the core has failed; set before
    `CoreEvents.failed` is called.
    """

    facts: EngineFacts

    def __init__(
        self,
        *,
        load_ended: Callable[[LoadResult, float], object] = lambda *_: None,
        progress: StartProgress = lambda *_: None,
    ) -> None:
        """load_ended: called with each load into host memory: its result and seconds."""
        self._load_ended, self._progress = load_ended, progress
        self._event_loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._is_lost = False
        self._events: CoreEvents | None = None
        self._commands: list[msgspec.Raw] = []
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._num_calls = 0
        self.failure: str | None = None

    async def load(self, link: Link, load: messages.LoadModel) -> None:
        """Load the model. Raises ConfigError, OSError."""
        self._link = link
        try:
            self.facts = await self._ask(load, EngineFacts)
        except EngineUnavailable as error:
            raise OSError("the engine's core ended while it loaded the model") from error

    async def prepare_grammars(self, tokenizer: str) -> None:
        """Read the vocabulary of grammars, before the first request. tokenizer: text of a tokenizer.json."""
        await self._ask(messages.PrepareGrammars(tokenizer), type(None))

    def start(self, events: CoreEvents) -> None:
        """Deliver events to `events` from now on. Add no sequence before."""
        self._events = events
        if self.failure is not None:
            events.failed(self.failure)

    def add(self, new_requests: Sequence[NewRequest], rules: TokenRules = messages.NO_RULES) -> None:
        """Queue the sequences of one request. Their outputs or refusals follow as events."""
        self._send(messages.Add.of(new_requests, rules))

    def abort(self, request_id: str, *, is_complete: bool = False) -> None:
        """End a sequence before the next step; `released` follows. Outputs of the step in flight may come before.

        is_complete: see `messages.Abort`.
        """
        self._send(messages.Abort(request_id, is_complete))

    async def state(self, host_version: int = -1) -> StateReading:
        """Return the state between two steps. Raises EngineUnavailable, like the methods below.

        host_version: version of the caller's list of adapters.
        """
        return await self._ask(messages.ReadState(host_version), StateReading)

    async def load_adapter(
        self, digest: str, tenant_id: str, *, weight: float | None = None, may_be_on_device: bool = False
    ) -> AdapterFacts | None:
        """Load an adapter into host memory, in the tenant's turn. Return None without a load if `may_be_on_device` and
        it is there.

        weight: the tenant's share of the loading threads; None if unknown.
        Raises AdapterError, OSError, QueueFull, TenantQueueFull.
        """
        question = messages.LoadAdapter(digest, tenant_id, weight, may_be_on_device)
        return await self._ask(question, AdapterFacts | None)  # type: ignore[arg-type]

    async def inspect_adapter(self, digest: str, tenant_id: str) -> Inspection:
        """Load an adapter and inspect its weights. Raises AdapterError, OSError, QueueFull, TenantQueueFull."""
        return await self._ask(messages.InspectAdapter(digest, tenant_id), Inspection)

    async def register_folder(self, path: str) -> str:
        """Register an adapter's folder and return its digest. Raises AdapterError, OSError."""
        return await self._ask(messages.RegisterFolder(path), str)

    async def forget_adapter(self, digest: str) -> None:
        """Free an adapter in both tiers; see `Engine.unload_adapter`."""
        await self._ask(messages.ForgetAdapter(digest), bool)

    def add_mixture(self, mixture: Mixture) -> None:
        """Make a mixture loadable by its digest until `remove_mixture`."""
        self._send(messages.AddMixture(mixture.parts))

    def remove_mixture(self, digest: str) -> None:
        """Free a mixture's host memory."""
        self._send(messages.RemoveMixture(digest))

    async def prefetch(self, digest: str, tenant_id: str) -> bool:
        """Load an adapter ahead of its request. Return whether it is in host memory."""
        return await self._ask(messages.Prefetch(digest, tenant_id), bool)

    async def pin_adapters(self, digests: Sequence[str]) -> int:
        """Pin the operator's adapters in host memory for a time. Return the number of those pinned."""
        return await self._ask(messages.PinAdapters(list(digests)), int)

    async def add_service_elsewhere(self, tenants: Mapping[str, float]) -> int:
        """Charge tenants for service at other engines, in cost units. Return the number of those with requests here."""
        return await self._ask(messages.ChargeElsewhere(dict(tenants)), int)

    async def measure_roofline(self) -> None:
        """Measure the device's limits; see `Engine.measure_roofline`."""
        await self._ask(messages.MeasureRoofline(), type(None))

    async def close(self) -> None:
        """End the steps and free the engine. Sequences must be aborted before."""
        if self._link is None:
            return
        # A core that is lost has nothing to free. Its link still reports how the process ended.
        with suppress(EngineUnavailable):
            await self._ask(messages.Close(), type(None), of_failed=True)
        await self._link.close()

    async def _ask(self, question: Question, answer: type[T], *, of_failed: bool = False) -> T:
        """Return the core's answer. of_failed: also ask a core whose engine has failed."""
        if self.failure is not None and (self._is_lost or not of_failed):
            raise EngineUnavailable(self.failure)
        self._num_calls += 1
        call = self._num_calls
        self._send(messages.Ask(call, question))
        future = self._calls[call] = self._event_loop.create_future()
        try:
            return msgspec.msgpack.decode(await future, type=answer)
        except asyncio.CancelledError:
            self._send(messages.Cancel(call))
            raise
        finally:
            self._calls.pop(call, None)

    def _send(self, command: messages.Command) -> None:
        """Queue a command for this iteration's frame. Encoded here, so that an error is the caller's own."""
        encoded = msgspec.Raw(messages.encode(command))
        if not self._commands:
            self._event_loop.call_soon(self._flush)
        self._commands.append(encoded)

    def _flush(self) -> None:
        frame, self._commands = messages.encode(self._commands), []
        if self._link is not None and not self._is_lost:
            self._link.send(frame)

    # The methods below are called by the link.

    def receive(self, frame: bytes | memoryview) -> None:
        """Take a frame of the core."""
        event = messages.decode_event(frame)
        events = self._events
        match event:
            case messages.Stepped(seconds, outputs, plain_ids, token_ids):
                if events is not None:
                    events.stepped(seconds, outputs, zip(plain_ids, token_ids, strict=True))
            case messages.Reply(call, value, fault):
                future = self._calls.get(call)
                if future is not None and not future.done():
                    # The value is copied, because the frame's memory is reused.
                    future.set_result(value.copy()) if fault is None else future.set_exception(fault.error())
            case messages.Released(request_id):
                if events is not None:
                    events.released(request_id)
            case messages.Refused(request_id, fault):
                if events is not None:
                    events.refused(request_id, fault.error())
            case messages.AdapterLoaded(result, seconds):
                self._load_ended(result, seconds)
            case messages.Loading(phase, done, total):
                self._progress(phase, done, total)
            case messages.Failed(reason):
                self._fail(reason)

    def lost(self) -> None:
        """Fail every call and sequence after the end of the core's process."""
        self._is_lost = True
        self._fail(FAILED)

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            if self._events is not None:
                self._events.failed(reason)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineFailed(reason))
