"""Common part of the kinds for foreign servers, such as vLLM: requests, adapters, releases, the list of models."""

import asyncio
import re
from abc import abstractmethod
from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar, NamedTuple

import msgspec
from aiohttp import ClientResponse
from msgspec import Struct

from adapters.fair_threads import FairThreads
from gateway.fleet.calls.call import Call
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.kinds.kind import EngineKind, Services
from gateway.fleet.kinds.runtime_adapters import AdapterApi, RuntimeAdapters
from wire.errors import BadRequest

# A body with more prompt tokens is built on a thread, because the work grows with the messages. Tenants take turns.
INLINE_TOKENS = 4096
_THREADS = FairThreads(2, "foreign-bodies", max_pending=0, max_pending_per_tenant=0, yielding=None)
# `0.26.0`, `0.26.0+cpu`, `0.26.1rc2.dev5+g0123abc`, `0.5.10.post1`; a pre-release may lack changes of its release.
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(a|b|rc|dev)\d*)?(?:\D.*)?")


class ForeignKind(EngineKind):
    """Base of the kinds for foreign servers. adapter_api: the server's routes for adapters."""

    adapter_api: ClassVar[AdapterApi]

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.adapters = RuntimeAdapters(services, self.adapter_api)

    @abstractmethod
    def request_body(self, engine: EngineRecord, call: Call) -> dict[str, Any]:
        """Return the body for the server, with the server's names. Raises the protocol's BadRequest."""

    @abstractmethod
    async def lacks_adapter(self, response: ClientResponse, call: Call) -> bool:
        """Return whether the server refused the request because the adapter is not loaded.

        Raises EngineRefused if the response had to be read and has another reason.
        """

    async def send(self, engine: EngineRecord, call: Call) -> ClientResponse:
        if call.model.mixture is not None:
            raise BadRequest("model", f"model: {self.traits.title} does not serve mixtures of adapters.")
        build = partial(self.request_body, engine, call)
        is_long = call.prompt_tokens > INLINE_TOKENS
        body = await asyncio.wrap_future(_THREADS.submit(call.tenant.id, build, bounded=False)) if is_long else build()
        digest, headers = call.model.digest, self.headers(engine)
        if digest is None:
            return await self.deliver(engine, call, body, headers)
        await self.prepare_adapter(engine, digest, call)
        response = await self.deliver(engine, call, body, headers)
        if engine.address.prefill is None and await self.lacks_adapter(response, call):
            response.release()
            call.on_posted(False)
            await self.adapters.ensure(engine, digest, call.on_sent, call.tenant.id, again=True)
            response = await self.deliver(engine, call, body, headers)
        return response

    async def prepare_adapter(self, engine: EngineRecord, digest: str, call: Call) -> None:
        """Prepare the server for a request's adapter. Raises the protocol's BadRequest for an activated LoRA,
        UpstreamFailed, ClientError, OSError, TimeoutError.
        """
        await self.adapters.ensure(engine, digest, call.on_sent, call.tenant.id)

    async def deliver(
        self, engine: EngineRecord, call: Call, body: dict[str, Any], headers: dict[str, str]
    ) -> ClientResponse:
        """Send the server's body, and return its answer, unread. Raises UpstreamFailed, ClientError, OSError,
        TimeoutError.
        """
        return await self.post(engine, call, body, headers)


def reported_state(state: dict[str, Any], **others: Any) -> EngineState:
    """Return a server's state, which operators see as reported. others: fields that only they see."""
    return EngineState(**state, reported={**state, **others})


class Models(NamedTuple):
    """Names in a server's `/v1/models`. bases: names of its base model. adapters: names of the loaded adapters."""

    bases: list[str]
    adapters: list[str]

    def base_name(self, known: Collection[str]) -> str:
        """Return the server's name that is a base model's on record, else the list of its names, for messages."""
        return next((name for name in self.bases if name in known), ", ".join(self.bases))


def read_models(answer: bytes) -> Models:
    """Decode the body of `/v1/models`. Raises MsgspecError."""
    models = msgspec.json.decode(answer, type=_Models).data
    return Models(
        [model.id for model in models if model.parent is None],
        [model.id for model in models if model.parent is not None],
    )


def is_release(version: str, least: tuple[int, int, int]) -> bool:
    """Return whether a version is the release `least` or a later one."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return False
    numbers = tuple(int(part or 0) for part in match.groups()[:3])
    is_early = match[4] is not None and numbers == least
    return numbers >= least and not is_early


def describe_version(version: str) -> str:
    """Return a phrase about a server's version, for messages."""
    return f"is of version {version[:40]!r}" if version else "does not report its version"


class _Model(Struct):
    id: str
    parent: str | None = None


class _Models(Struct):
    data: list[_Model]
