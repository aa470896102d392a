"""Speaking to one engine: open a request, read its events, and let go of it at once when nobody wants the rest."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
)

from engine.protocol import BadRequest as ProtocolError
from engine.tracing import NO_SPAN, Span
from gateway.errors import BadRequest, GatewayError, Unavailable, UpstreamFailed
from gateway.fleet.registry import EngineRecord
from gateway.fleet.vllm import VllmAdapters
from gateway.fleet.vllm_fields import vllm_request
from gateway.records.catalog import Model
from gateway.records.tenants import Tenant

CONNECT_SECONDS = 5.0
# The largest single event we hold in memory.
MAX_EVENT_BYTES = 16 * 2**20


# Connections are kept for the next request a little less long than uvicorn (vLLM's server) keeps them: a request must
# not meet one that is being closed.
KEEP_SECONDS = 4.0


class EngineGone(Exception):
    """The engine could not be reached, or left before it answered anything: another one may be tried.

    had_it: the engine may have read the request, which may be why it left.
    """

    def __init__(self, had_it: bool) -> None:
        super().__init__(had_it)
        self.had_it = had_it


class EngineRefused(Exception):
    """No engine began to answer. error: what the client is told. status: the last engine's own, None if it said
    nothing. broken: it is the engine that failed, whatever the request was."""

    def __init__(self, error: GatewayError, status: int | None = None, *, broken: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status
        self.broken = broken

    @property
    def failed(self) -> bool:
        """Whether its answer shows a fault of its own: a redirect, or a 5xx other than that it is too busy."""
        if self.status is None or isinstance(self.error, Unavailable):
            return False
        return self.status >= 500 or 300 <= self.status < 400


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it goes to an engine, whichever. body: OpenAI's; its model is replaced by what engines know.

    prompt_tokens: of all prompts together. span: what this is a part of. trace: W3C's headers that tell an engine so.
    """

    request_id: str
    path: str
    body: dict[str, Any]
    model: Model
    tenant: Tenant
    prompt_tokens: int
    span: Span = NO_SPAN
    trace: dict[str, str] = {}


def new_session(read_timeout: float) -> ClientSession:
    """One for the whole gateway. read_timeout: seconds without a byte until a request is given up."""
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read_timeout)
    connector = TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
    # Engines have nothing to say in cookies, and what they answer is not compressed.
    no_headers = ("Accept", "Accept-Encoding", "User-Agent")
    return ClientSession(
        connector=connector, timeout=timeout, cookie_jar=DummyCookieJar(), skip_auto_headers=no_headers
    )


class EngineClient:
    """Sends OpenAI requests with the headers that engines trust."""

    def __init__(self, session: ClientSession, internal_token: str, adapters: VllmAdapters) -> None:
        self._session = session
        self._token = internal_token
        self._adapters = adapters

    @asynccontextmanager
    async def open(self, engine: EngineRecord, call: Call) -> AsyncIterator[ClientResponse]:
        """The engine's answer of status 200, its body unread. Leaving early closes the connection, which is how the
        engine learns that it may stop.

        Raises EngineGone or EngineRefused.
        """
        post = self._post_to_vllm if engine.address.kind == "vllm" else self._post
        try:
            response = await post(engine, call)
        except (ClientConnectorError, ServerDisconnectedError, ConnectionError) as error:
            engine.mark_down(f"{type(error).__name__} at a request")
            raise EngineGone(had_it=not isinstance(error, ClientConnectorError)) from error
        except (ClientError, OSError, TimeoutError) as error:
            # A stream begins with its first token. A whole answer may be long in coming and nothing be wrong.
            broken = not isinstance(error, TimeoutError) or bool(call.body.get("stream"))
            failure = UpstreamFailed(f"The engine did not answer ({type(error).__name__}).")
            raise EngineRefused(failure, broken=broken) from error
        except ProtocolError as error:
            # No field of a request goes to vLLM that the allow-list does not name.
            raise EngineRefused(BadRequest(error.message, param=error.param, code=error.code), 400) from error
        except UpstreamFailed as error:
            raise EngineRefused(error) from error
        try:
            if response.status != 200:
                raise EngineRefused(await _refusal(response, call.model), response.status)
            yield response
        finally:
            # A connection whose answer was read to its end goes back to the pool; else it is closed.
            response.release()

    async def _post(self, engine: EngineRecord, call: Call) -> ClientResponse:
        headers = {
            "x-loraplex-internal-token": self._token,
            "x-loraplex-tenant": call.tenant.id,
            "x-loraplex-weight": repr(call.tenant.weight),
            # There a higher number goes first.
            "x-loraplex-priority": str(-call.tenant.priority),
        }
        return await self._send(engine, call, call.body, headers)

    async def _post_to_vllm(self, engine: EngineRecord, call: Call) -> ClientResponse:
        body, headers = vllm_request(call.body, call.path, call.tenant.id, call.model.digest), engine.address.bearer
        digest = call.model.digest
        if digest is None:
            return await self._send(engine, call, body, headers)
        await self._adapters.ensure(engine, digest)
        response = await self._send(engine, call, body, headers)
        if response.status == 404:
            response.release()
            await self._adapters.ensure(engine, digest, again=True)
            response = await self._send(engine, call, body, headers)
        return response

    async def _send(
        self, engine: EngineRecord, call: Call, body: dict[str, Any], headers: dict[str, str]
    ) -> ClientResponse:
        headers = {"Content-Type": "application/json", "x-request-id": call.request_id, **call.trace, **headers}
        digest = call.model.digest
        wire = msgspec.json.encode({**body, "model": f"sha256:{digest}" if digest else call.model.name})
        # A redirect would take the prompt and the engine's secret elsewhere.
        return await self._session.post(f"{engine.url}{call.path}", data=wire, headers=headers, allow_redirects=False)


async def read_json(response: ClientResponse) -> dict[str, Any]:
    """A whole JSON answer. Raises UpstreamFailed."""
    try:
        answer = msgspec.json.decode(b"".join([chunk async for chunk in _chunks(response)]))
    except msgspec.DecodeError as error:
        raise UpstreamFailed("The engine's answer is not valid JSON.") from error
    if not isinstance(answer, dict):
        raise UpstreamFailed("The engine's answer is not a JSON object.")
    return answer


async def read_events(response: ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to `[DONE]`. Reads no further than it is asked for.

    Raises UpstreamFailed if the stream ends before `[DONE]` or holds something else.
    """
    buffer = bytearray()
    async for chunk in _chunks(response):
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end]).rstrip(b"\r")
            del buffer[: end + 1]
            # Comments, event names and blank lines carry nothing here: each of our events is one data line.
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = msgspec.json.decode(data)
            except msgspec.DecodeError as error:
                raise UpstreamFailed("The engine sent an event that is not valid JSON.") from error
            if not isinstance(event, dict):
                raise UpstreamFailed("The engine sent an event that is not a JSON object.")
            yield event
        if len(buffer) > MAX_EVENT_BYTES:
            raise UpstreamFailed("The engine sent an event larger than this gateway accepts.")
    raise UpstreamFailed("The engine's stream ended before its end.")


async def _chunks(response: ClientResponse) -> AsyncIterator[bytes]:
    """The body as it arrives. Only reading is guarded here: what fails while a client is written to is not the
    engine's fault."""
    parts = response.content.iter_any()
    while True:
        try:
            chunk = await anext(parts)
        except StopAsyncIteration:
            return
        except (ClientError, OSError, TimeoutError) as error:
            raise UpstreamFailed(f"The engine's answer broke off ({type(error).__name__}).") from error
        yield chunk


async def _refusal(response: ClientResponse, model: Model) -> GatewayError:
    """The engine's error as ours: what the client did wrong is passed on in the client's own terms."""
    body = b"".join([chunk async for chunk in _chunks(response)])
    try:
        detail = msgspec.json.decode(body)["error"]
        message, param, code = str(detail["message"]), detail.get("param"), detail.get("code")
        if not isinstance(code, str):
            code = None  # vLLM repeats the status there
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, param, code = "", None, None
    if model.digest:
        message = message.replace(f"sha256:{model.digest}", model.name).replace(model.digest, model.name)
    if response.status in (400, 413, 422):
        return BadRequest(message or "The engine refused the request.", param=param, code=code)
    if response.status in (429, 503):
        retry_after = response.headers.get("Retry-After", "1")
        seconds = int(retry_after) if retry_after.isdecimal() else 1
        return Unavailable(message or "The engine is overloaded; try again shortly.", code=code, retry_after=seconds)
    # 401 and 404 are between the gateway and the engine; their words would only confuse a client.
    return UpstreamFailed(f"The engine could not serve '{model.name}' (it answered {response.status}).")
