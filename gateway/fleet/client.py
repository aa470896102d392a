"""Requests to engines: sending, reading of reports and errors, and cancellation as soon as the client leaves."""

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

from gateway.errors import BadRequest, EngineShareUsed, GatewayError, Unavailable, UpstreamFailed
from gateway.fleet.answers import FAILURES, EngineBroke, Incoming, read_error, read_report
from gateway.fleet.health import network_reason
from gateway.fleet.registry import EngineRecord
from gateway.fleet.vllm.adapters import VllmAdapters
from gateway.fleet.vllm.fields import vllm_request
from gateway.quota.growth import Hold
from gateway.records.catalog import Model
from gateway.records.tenants import Tenant
from wire.digests import digest_name
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

# Idle connections are kept for a little less time than uvicorn (vLLM's server) keeps them, so that no request is sent
# on a connection that the server is closing.
KEEP_SECONDS = 4.0


class EngineGone(Exception):
    """The engine could not be reached, or closed the connection before it answered. Another engine may be tried.

    had_it: whether the engine may have read the request, so that the request may be the cause.
    """

    def __init__(self, had_it: bool) -> None:
        super().__init__(had_it)
        self.had_it = had_it


class EngineRefused(Exception):
    """No engine began to answer.

    error: for the client. status: the last engine's response status, None without a response. broken: whether the
    engine failed independently of the request.
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
    """A request for any engine. body: in OpenAI's form; its model is replaced by `sha256:<digest>` when it is sent.

    prompt_tokens: of all prompts. span: the parent of the engine's spans. trace: W3C's headers that carry the span.
    hold: the tokens that may be generated for now. heard: called with the completion tokens so far of a whole answer.
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
    """Return the session for all requests to engines. read_timeout: seconds without a byte until a request fails."""
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read_timeout)
    connector = TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
    # Engines set no cookies and do not compress answers.
    no_headers = ("Accept", "Accept-Encoding", "User-Agent")
    return ClientSession(
        connector=connector, timeout=timeout, cookie_jar=DummyCookieJar(), skip_auto_headers=no_headers
    )


class EngineClient:
    """Sender of OpenAI requests, with the headers that engines trust."""

    def __init__(self, session: ClientSession, internal_token: str, adapters: VllmAdapters) -> None:
        self._session = session
        self._token = internal_token
        self._adapters = adapters

    @asynccontextmanager
    async def open(self, engine: EngineRecord, call: Call) -> AsyncIterator[Incoming]:
        """Yield the engine's answer of status 200, its body unread. A reported whole answer follows its report.

        Leaving the block before the answer's end closes the connection, which stops the engine's work. Raises
        EngineGone or EngineRefused.
        """
        if call.hold is not None:
            call.hold.raise_allowance = None
        post = self._post_to_vllm if engine.address.kind == "vllm" else self._post
        try:
            response = await post(engine, call)
        except (ClientConnectorError, ServerDisconnectedError, ConnectionError) as error:
            engine.mark_down(f"a request failed: {network_reason(error)}")
            raise EngineGone(had_it=not isinstance(error, ClientConnectorError)) from error
        except (ClientError, OSError, TimeoutError) as error:
            # A stream's response begins with its first token. A whole answer may take long without any fault.
            broken = not isinstance(error, TimeoutError) or call.is_stream
            log.warning("engine %s did not answer request %s: %s", engine.url, call.request_id, type(error).__name__)
            failure = UpstreamFailed("The engine did not answer.")
            raise EngineRefused(failure, broken=broken) from error
        except ProtocolError as error:
            # The request has a field that the allow-list for vLLM does not contain.
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
            # A connection whose answer was read to its end returns to the pool; any other connection is closed.
            response.release()

    async def _read_report(self, engine: EngineRecord, call: Call, response: ClientResponse) -> Incoming:
        """Read a report. Raises EngineGone if it breaks off, because the answer has not begun then."""
        try:
            return await read_report(response, call.heard)
        except EngineBroke as error:
            engine.mark_down(error.message)
            raise EngineGone(had_it=True) from error

    async def _raise_allowance(self, engine: EngineRecord, request_id: str, tokens: int) -> None:
        """Raise a request's allowance on its engine. If that fails, the answer ends at the previous allowance."""
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
            "x-loraplex-priority": str(call.tenant.priority),
        }
        if call.hold is not None and engine.keeps_allowances:
            call.hold.raise_allowance = partial(self._raise_allowance, engine, call.request_id)
            if call.hold.allowance is not None:
                headers[ALLOWANCE_HEADER] = str(call.hold.allowance)
        return await self._send(engine, call, call.body, headers)

    async def _post_to_vllm(self, engine: EngineRecord, call: Call) -> ClientResponse:
        digest, headers = call.model.digest, engine.address.bearer
        build = partial(vllm_request, call.body, call.path, call.tenant.id, digest)
        # The work grows with the messages, so long conversations are processed on a thread.
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
        wire = msgspec.json.encode({**body, "model": digest_name(digest) if digest else call.model.name})
        # The first byte of a whole answer arrives with its last, so no read time-out applies: the request's time limit
        # and the engine's health (`Registry`) bound the wait.
        timeout = self._session.timeout if call.is_stream else WHOLE_TIMEOUT
        url = f"{engine.url}{call.path}"
        # A redirect would carry the prompt and the secret to another host.
        return await self._session.post(url, data=wire, headers=headers, allow_redirects=False, timeout=timeout)


async def _refusal(response: Incoming, model: Model) -> GatewayError:
    """Return the engine's error as a gateway error.

    An error of the client's own request keeps the client's names. Of an engine's failure only the code is passed on,
    because its message may quote another request.
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
        message = message.replace(digest_name(model.digest), model.name).replace(model.digest, model.name)
    # An adapter's error is not the engine's failure, except for 404: the files may be missing on this engine only.
    is_adapters = code is not None and code.startswith("adapter_") and response.status != 404
    if response.status in (400, 413, 422) or is_adapters:
        if response.status >= 500:
            message, param = "The engine could not load the adapter.", "model"
        return BadRequest(message or "The engine refused the request.", param=param, code=code)
    if response.status in (429, 503):
        retry_after = response.headers.get("Retry-After", "1")
        seconds = int(retry_after) if retry_after.isdecimal() else 1
        if code == EngineShareUsed.code:
            return EngineShareUsed(f"Your share of the engine is used up: {message}.", retry_after=seconds)
        code = code if code in FAILURES else None
        return Unavailable(FAILURES[code or "engine_overloaded"], code=code, retry_after=seconds)
    # 401 and 404 concern the gateway and the engine only; their messages would confuse a client.
    return UpstreamFailed(f"The engine could not serve '{model.name}' (it answered {response.status}).")
