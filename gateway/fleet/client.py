"""Requests to an engine: open one, read its events, and cancel it at once when its client has left."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
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

from gateway.errors import BadRequest, GatewayError, Unavailable, UpstreamFailed
from gateway.fleet.answers import FAILURES, EngineBroke, Incoming, read_error, read_report
from gateway.fleet.registry import EngineRecord
from gateway.fleet.vllm.adapters import VllmAdapters
from gateway.fleet.vllm.fields import vllm_request
from gateway.quota.growth import Hold
from gateway.records.catalog import Model
from gateway.records.tenants import Tenant
from wire.errors import BadRequest as ProtocolError
from wire.requests import AllowanceRequest
from wire.responses import ALLOWANCE_HEADER, REPORT_TYPE
from wire.telemetry.spans import NO_SPAN, Span

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# A body with more prompt tokens is rebuilt on a thread.
INLINE_TOKENS = 4096
WHOLE_TIMEOUT = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
RAISE_TIMEOUT = ClientTimeout(total=CONNECT_SECONDS)

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
    """No engine began to answer. error: for the client. status: the last engine's response, None without one. broken:
    the engine failed, whatever the request was.
    """

    def __init__(self, error: GatewayError, status: int | None = None, *, broken: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status
        self.broken = broken

    @property
    def failed(self) -> bool:
        """Return whether the response is the engine's own fault: a redirect, or a 5xx not about load or an adapter."""
        if self.status is None or isinstance(self.error, Unavailable | BadRequest):
            return False
        return self.status >= 500 or 300 <= self.status < 400


def _ignore(_: int) -> None:
    pass


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request for any engine. body: OpenAI's; its model is replaced by a name that engines know.

    prompt_tokens: of all prompts. span: the parent of the engine's spans. trace: W3C's headers that carry it. hold: the
    tokens that may be generated for now. heard: called with the completion tokens so far of a whole answer.
    """

    request_id: str
    path: str
    body: dict[str, Any]
    model: Model
    tenant: Tenant
    prompt_tokens: int
    span: Span = NO_SPAN
    trace: dict[str, str] = {}
    hold: Hold | None = None
    heard: Callable[[int], None] = _ignore

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


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
    async def open(self, engine: EngineRecord, call: Call) -> AsyncIterator[Incoming]:
        """Yield the engine's answer of status 200, its body unread; a whole answer that is reported, after its report.
        Leaving early closes the connection, which is how the engine learns that it may stop.

        Raises EngineGone or EngineRefused.
        """
        if call.hold is not None:
            call.hold.raise_allowance = None
        post = self._post_to_vllm if engine.address.kind == "vllm" else self._post
        try:
            response = await post(engine, call)
        except (ClientConnectorError, ServerDisconnectedError, ConnectionError) as error:
            engine.mark_down(f"{type(error).__name__} at a request")
            raise EngineGone(had_it=not isinstance(error, ClientConnectorError)) from error
        except (ClientError, OSError, TimeoutError) as error:
            # A stream begins with its first token. A whole answer may be long in coming and nothing be wrong.
            broken = not isinstance(error, TimeoutError) or call.is_stream
            log.warning("engine %s did not answer request %s: %s", engine.url, call.request_id, type(error).__name__)
            failure = UpstreamFailed("The engine did not answer.")
            raise EngineRefused(failure, broken=broken) from error
        except ProtocolError as error:
            # No field of a request goes to vLLM that the allow-list does not name.
            raise EngineRefused(BadRequest(error.message, param=error.param, code=error.code), 400) from error
        except UpstreamFailed as error:
            raise EngineRefused(error) from error
        try:
            answer: Incoming = response
            if response.content_type == REPORT_TYPE:
                answer = await self._read_report(engine, call, response)
            if answer.status != 200:
                raise EngineRefused(await _refusal(answer, call.model), answer.status)
            yield answer
        finally:
            # A connection whose answer was read to its end goes back to the pool; else it is closed.
            response.release()

    async def _read_report(self, engine: EngineRecord, call: Call, response: ClientResponse) -> Incoming:
        """Read a report. An engine that leaves within it has not begun to answer. Raises EngineGone."""
        try:
            return await read_report(response, call.heard)
        except EngineBroke as error:
            engine.mark_down(error.message)
            raise EngineGone(had_it=True) from error

    async def _raise_allowance(self, engine: EngineRecord, request_id: str, tokens: int) -> None:
        """Tell the engine that a request may generate more. If that fails, the answer ends at the allowance before."""
        body = msgspec.json.encode(AllowanceRequest(request_id, tokens))
        headers = {"Content-Type": "application/json", "x-loraplex-internal-token": self._token}
        try:
            async with self._session.post(
                f"{engine.url}/allowances", data=body, headers=headers, timeout=RAISE_TIMEOUT, allow_redirects=False
            ) as response:
                response.raise_for_status()
        except (ClientError, OSError, TimeoutError) as error:
            log.warning(
                "request %s: its allowance at %s was not raised: %s", request_id, engine.url, type(error).__name__
            )

    async def _post(self, engine: EngineRecord, call: Call) -> ClientResponse:
        headers = {
            "x-loraplex-internal-token": self._token,
            "x-loraplex-tenant": call.tenant.id,
            "x-loraplex-weight": repr(call.tenant.weight),
            # There a higher number goes first.
            "x-loraplex-priority": str(-call.tenant.priority),
        }
        if call.hold is not None and engine.keeps_allowances:
            call.hold.raise_allowance = partial(self._raise_allowance, engine, call.request_id)
            if call.hold.allowance is not None:
                headers[ALLOWANCE_HEADER] = str(call.hold.allowance)
        return await self._send(engine, call, call.body, headers)

    async def _post_to_vllm(self, engine: EngineRecord, call: Call) -> ClientResponse:
        digest, headers = call.model.digest, engine.address.bearer
        build = partial(vllm_request, call.body, call.path, call.tenant.id, digest)
        # The work grows with the messages, so long conversations are processed off the event loop.
        body = await asyncio.to_thread(build) if call.prompt_tokens > INLINE_TOKENS else build()
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
        # The first byte of a whole answer comes with its last, so silence does not bound its time: the request's time
        # limit and the engine's health (`Registry`) do.
        timeout = self._session.timeout if call.is_stream else WHOLE_TIMEOUT
        url = f"{engine.url}{call.path}"
        # A redirect would carry the prompt and the secret to another host.
        return await self._session.post(url, data=wire, headers=headers, allow_redirects=False, timeout=timeout)


async def _refusal(response: Incoming, model: Model) -> GatewayError:
    """Return the engine's error as ours. A client's error keeps the client's own names; of a failure of the engine only
    the code is passed on, for its words may quote another request.
    """
    body = await read_error(response)
    try:
        detail = msgspec.json.decode(body)["error"]
        message, param, code = str(detail["message"]), detail.get("param"), detail.get("code")
        if not isinstance(code, str):
            code = None  # vLLM repeats the status there
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, param, code = "", None, None
    if model.digest:
        message = message.replace(f"sha256:{model.digest}", model.name).replace(model.digest, model.name)
    # An adapter's error is no failure of the engine, whatever its status; its files may be missing on this engine only.
    is_adapters = code is not None and code.startswith("adapter_") and response.status != 404
    if response.status in (400, 413, 422) or is_adapters:
        if response.status >= 500:
            message, param = "The engine could not load the adapter.", "model"
        return BadRequest(message or "The engine refused the request.", param=param, code=code)
    if response.status in (429, 503):
        retry_after = response.headers.get("Retry-After", "1")
        seconds = int(retry_after) if retry_after.isdecimal() else 1
        code = code if code in FAILURES else None
        return Unavailable(FAILURES[code or "engine_overloaded"], code=code, retry_after=seconds)
    # 401 and 404 are between the gateway and the engine; their words would only confuse a client.
    return UpstreamFailed(f"The engine could not serve '{model.name}' (it answered {response.status}).")
