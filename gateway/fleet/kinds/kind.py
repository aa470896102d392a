"""Interface of engine kinds, and their common HTTP code.

A kind reads an engine's state and sends it requests. Its `Traits` tell the rest of the gateway how to treat its
engines. `table.py` lists the kinds.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from aiohttp import BytesPayload, ClientError, ClientResponse, ClientResponseError, ClientSession, ClientTimeout
from aiohttp.abc import AbstractStreamWriter

from adapters.store import AdapterStore
from gateway.errors import BadRequest, GatewayError, Unavailable, UpstreamFailed
from gateway.fleet.calls.answers import JSON_ERRORS, REFUSED, Incoming, read_error
from gateway.fleet.calls.call import Call, EngineRefused
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.traits import Traits
from gateway.fleet.kinds.last_uses import LastUses
from wire.digests import digest_name
from wire.http_errors import HTTP_ERRORS
from wire.service import ServiceElsewhere

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model
    from gateway.records.tenants.tenants import Tenant

HEALTH_TIMEOUT = ClientTimeout(total=3.0)
CONNECT_SECONDS = 5.0
TOKENIZE_TIMEOUT = ClientTimeout(total=10.0)
WHOLE_TIMEOUT = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
OVERLOADED = "The engine is overloaded; try again shortly."
# Most bytes that are read of an answer of an engine's own routes, such as its list of models; not of its metrics.
MAX_BODY_BYTES = 8 * 2**20
# Errors of reading an engine's state, whatever a foreign server answers.
STATE_ERRORS = (*HTTP_ERRORS, msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError)
# Most digits of a Retry-After in seconds.
MAX_RETRY_DIGITS = 5


class BodyTooLarge(ClientError):
    """The answer of an engine's own route is larger than the gateway accepts."""


class FilesMissing(UpstreamFailed):
    """The adapter store that an engine reads has no files of the adapter."""

    code = "adapter_files_missing"


class Misconfigured(Exception):
    """The engine runs but must get no requests. The message gives the operator the reason and the remedy."""


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of this process that kinds use.

    base_names: returns the names of the base models.
    heartbeat_timeout: seconds without a line of state after which an engine that pushes one every second is down.
    """

    session: ClientSession
    internal_token: str
    base_names: Callable[[], Collection[str]]
    store: AdapterStore
    uses: LastUses
    heartbeat_timeout: float = 5.0


class EngineKind(ABC):
    """Base of the engine kinds. traits: its properties. health_path: a cheap route; 200 means that the engine runs."""

    traits: ClassVar[Traits]
    health_path: ClassVar[str] = "/health"

    def __init__(self, services: Services) -> None:
        self._services = services
        self._session = services.session

    @abstractmethod
    async def read_state(self, engine: EngineRecord) -> EngineState:
        """Return the engine's state. Raises Misconfigured, STATE_ERRORS."""

    async def follow(self, engine: EngineRecord) -> AsyncIterator[EngineState]:
        """Yield the states that the engine pushes, until its stream ends; nothing for an engine that is polled.

        Raises ClientError, OSError, TimeoutError, ValueError, MsgspecError.
        """
        return
        yield

    @abstractmethod
    async def send(self, engine: EngineRecord, call: Call) -> ClientResponse:
        """Send a request, with the adapter loaded if the kind needs that. Returns the response, its body unread.

        Raises the protocol's BadRequest for a field that the kind does not serve, UpstreamFailed, ClientError, OSError,
        TimeoutError.
        """

    async def send_service(self, engine: EngineRecord, report: ServiceElsewhere) -> None:
        """Report tenants' service at other engines to an engine that orders tenants (`Traits`).

        Raises ClientError, OSError, TimeoutError.
        """
        raise NotImplementedError

    async def tokenize(
        self, engine: EngineRecord, model: str, body: dict[str, Any], most: int, tenant: "Tenant"
    ) -> tuple[int, bytes]:
        """Return status and body of the answer to a text or a conversation for `/tokenize`. model: the base model's
        name, for an engine that has not reported its own. most: largest size of the answer in bytes. tenant: whose text
        it is.

        Raises BodyTooLarge for an answer of status 200, UpstreamFailed, ClientError, OSError, TimeoutError.
        """
        headers = {"Content-Type": "application/json", **self.headers(engine), **self.tenant_headers(tenant)}
        data = msgspec.json.encode({"model": engine.state.model or model, **body})
        async with self._session.post(
            f"{engine.url}/tokenize", data=data, headers=headers, timeout=TOKENIZE_TIMEOUT, allow_redirects=False
        ) as response:
            answer = await (read_body(response, most) if response.status == 200 else read_error(response))
            return response.status, answer

    async def probe(
        self, engine: EngineRecord, digest: str, tenant_id: str, on_sent: Callable[[], None]
    ) -> tuple[int, bytes]:
        """Return status and body of an adapter's probe, for an engine whose state has `probes`. on_sent: as in `Call`.

        Raises ClientError, OSError, TimeoutError.
        """
        raise NotImplementedError

    async def send_hint(self, engine: EngineRecord, digest: str, tenant_id: str) -> bool:
        """Tell an engine that takes hints (`Traits`) to load an adapter into host memory; return whether it has it.

        Raises ClientError, OSError, TimeoutError, MsgspecError.
        """
        raise NotImplementedError

    async def send_pins(self, engine: EngineRecord, digests: Sequence[str]) -> int:
        """Tell an engine that takes hints to keep adapters in host memory; return the number of those that it keeps.

        Raises ClientError, OSError, TimeoutError, MsgspecError.
        """
        raise NotImplementedError

    def headers(self, engine: EngineRecord) -> dict[str, str]:
        """Return the headers that authenticate the gateway. Each foreign server has a key of its own."""
        return engine.address.bearer

    def tenant_headers(self, tenant: "Tenant") -> dict[str, str]:
        """Return the headers that name a request's tenant, for an engine that serves tenants fairly. Foreign servers
        get none.
        """
        return {}

    def refusal(self, answer: Incoming, body: bytes, model: "Model") -> EngineRefused:
        """Return the exception for an answer with a status other than 200. It contains the error for the client."""
        return EngineRefused(self.error(answer, read_detail(body), model), answer.status)

    def error(self, answer: Incoming, detail: "ErrorDetail", model: "Model") -> GatewayError:
        """Return the error for the client.

        An error of the client's own request keeps the engine's message, with the client's names, unless the kind's
        messages are not for clients. An engine's failure has a fixed message, because the engine's may quote another
        request.
        """
        if answer.status in (400, 413, 422):
            if not self.traits.shows_messages:
                return BadRequest(REFUSED)
            message = with_clients_names(detail.message, model)
            return BadRequest(message or REFUSED, param=detail.param, code=detail.code)
        if answer.status in (429, 503):
            return Unavailable(OVERLOADED, retry_after=retry_after(answer))
        # 401 and 404 concern only the gateway and the engine, so their messages would mislead a client.
        return UpstreamFailed(f"The engine could not serve '{model.name}' (it answered {answer.status}).")

    async def get(self, engine: EngineRecord, path: str, url: str | None = None) -> bytes:
        """Return the body of one of the engine's own routes. url: its address, None for the engine's first.

        Raises ClientError, OSError, TimeoutError.
        """
        async with self.opened(engine, path, url) as response:
            return await read_body(response)

    @asynccontextmanager
    async def opened(
        self, engine: EngineRecord, path: str, url: str | None = None, timeout: ClientTimeout = HEALTH_TIMEOUT
    ) -> AsyncIterator[ClientResponse]:
        """Yield the answer of one of the engine's own routes, its body unread. url: as in `get`.

        Raises ClientError, OSError, TimeoutError.
        """
        async with self._session.get(
            (url or engine.url) + path, headers=self.headers(engine), timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                # Redirects are refused too: a server's secret is never sent to another server.
                raise ClientResponseError(response.request_info, response.history, status=response.status)
            yield response

    async def post(
        self, engine: EngineRecord, call: Call, body: dict[str, Any], headers: dict[str, str], url: str | None = None
    ) -> ClientResponse:
        """Post a request's body. url: as in `get`. Raises ClientError, OSError, TimeoutError."""
        headers = {"Content-Type": "application/json", "x-request-id": call.request_id, **call.trace, **headers}

        def note() -> None:
            call.on_sent()
            call.on_posted(True)

        data = NotedBytes(msgspec.json.encode(body), note)
        # The first byte of a whole answer arrives with its last, so no read time-out applies: the request's time limit
        # and the engine's health (`Registry`) bound the wait.
        timeout = self._session.timeout if body.get("stream") else WHOLE_TIMEOUT
        url = f"{url or engine.url}{call.path}"
        # A redirect would carry the prompt and the secret to another host.
        return await self._session.post(url, data=data, headers=headers, allow_redirects=False, timeout=timeout)


async def read_body(response: ClientResponse, most: int = MAX_BODY_BYTES) -> bytes:
    """Return the body of an answer of an engine's own route. A foreign server may send one without an end.

    Raises BodyTooLarge for more than `most` bytes, ClientError, OSError, TimeoutError.
    """
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            raise BodyTooLarge(f"the answer has more than {most} bytes")
    return bytes(body)


class NotedBytes(BytesPayload):
    """Body of a request. note: called before its first byte, with which the headers go, is sent."""

    def __init__(self, body: bytes, note: Callable[[], None]) -> None:
        super().__init__(body)
        self._note = note

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._note()
        await super().write_with_length(writer, content_length)


class ErrorDetail(msgspec.Struct):
    """Fields of OpenAI's error object. A param or code that is not a text, such as a repeated status, is None."""

    message: str = ""
    param: str | None = None
    code: str | None = None


def read_detail(body: bytes) -> ErrorDetail:
    """Return the error in a body in OpenAI's form, with or without the outer `error`; empty for another form."""
    try:
        whole = msgspec.json.decode(body, type=dict[str, Any])
        detail = whole.get("error", whole)
        param, code = (value if isinstance(value := detail.get(name), str) else None for name in ("param", "code"))
        return ErrorDetail(str(detail.get("message", "")), param, code)
    except (*JSON_ERRORS, AttributeError):
        return ErrorDetail()


def with_clients_names(message: str, model: "Model") -> str:
    """Return the message with the client's names of its adapters in place of the digests."""
    for named in (model, *model.parts):
        if named.digest:
            message = message.replace(digest_name(named.digest), named.name).replace(named.digest, named.name)
    return message


def retry_after(answer: Incoming) -> int:
    """Return the seconds of an answer's Retry-After; 1 without one of at most MAX_RETRY_DIGITS digits."""
    seconds = answer.headers.get("Retry-After", "1")
    return int(seconds) if seconds.isdecimal() and len(seconds) <= MAX_RETRY_DIGITS else 1
