"""Requests to engines: sending, reading of reports and errors, and cancellation as soon as the client leaves."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import (
    ClientConnectorError,
    ClientOSError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
)

from gateway.errors import BadRequest, RankNotServed, UpstreamFailed
from gateway.fleet.calls.answers import EngineBroke, Incoming, read_error, read_report
from gateway.fleet.calls.call import Call, EngineGone, EngineRefused
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.health import network_reason
from gateway.fleet.kinds.kind import CONNECT_SECONDS
from gateway.fleet.kinds.table import Kinds
from wire.errors import BadRequest as ProtocolError
from wire.http_errors import HTTP_ERRORS
from wire.responses import REPORT_TYPE
from wire.service import ServiceElsewhere

log = logging.getLogger(__name__)

# Idle connections are kept for a little less time than uvicorn (the server of vLLM and SGLang) keeps them, so that no
# request is sent on a connection that the server is closing.
KEEP_SECONDS = 4.0


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
    """Sender of OpenAI requests to engines of all kinds."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds

    async def send_service(self, engine: EngineRecord, report: ServiceElsewhere) -> None:
        """Report the tenants' service at other engines. Raises ClientError, OSError, TimeoutError."""
        await self._kinds[engine.address.traits.name].send_service(engine, report)

    async def send_hint(self, engine: EngineRecord, digest: str, tenant_id: str) -> bool:
        """Tell an engine to load an adapter. Raises ClientError, OSError, TimeoutError, MsgspecError."""
        return await self._kinds[engine.address.traits.name].send_hint(engine, digest, tenant_id)

    async def send_pins(self, engine: EngineRecord, digests: Sequence[str]) -> int:
        """Tell an engine to keep adapters in host memory. Raises ClientError, OSError, TimeoutError, MsgspecError."""
        return await self._kinds[engine.address.traits.name].send_pins(engine, digests)

    @asynccontextmanager
    async def open(self, engine: EngineRecord, call: Call) -> AsyncIterator[Incoming]:
        """Yield the engine's answer of status 200, its body unread. A reported whole answer follows its report.

        Leaving the block before the answer's end closes the connection, which stops the engine's work. Raises
        EngineGone or EngineRefused.
        """
        if call.hold is not None:
            call.hold.raise_allowance = None
        kind = self._kinds[engine.address.traits.name]
        try:
            response = await kind.send(engine, call)
        except (ClientOSError, ServerDisconnectedError, ConnectionError) as error:
            reason = f"a request failed: {network_reason(error)}"
            raise EngineGone(may_have_read=not isinstance(error, ClientConnectorError), reason=reason) from error
        except HTTP_ERRORS as error:
            # A stream's response begins with its first token. A whole answer may take long without any fault.
            broken = not isinstance(error, TimeoutError) or call.is_stream
            log.warning("engine %s did not answer request %s: %s", engine.url, call.request_id, type(error).__name__)
            failure = UpstreamFailed("The engine did not answer.")
            raise EngineRefused(failure, broken=broken) from error
        except ProtocolError as error:
            # The kind does not support a field of the request.
            refusal = BadRequest(error.message, param=error.param, code=error.code)
            raise EngineRefused(refusal, 400, unsupported=True) from error
        except RankNotServed as error:
            raise EngineRefused(error, 400) from error
        except UpstreamFailed as error:
            raise EngineRefused(error) from error
        try:
            answer: Incoming = response
            if response.content_type == REPORT_TYPE and engine.address.traits.has_usage_log:
                answer = await _read_report(call, response)
            if answer.status != 200:
                raise kind.refusal(answer, await read_error(answer), call.model)
            yield answer
        finally:
            # A connection whose answer was read to its end returns to the pool; any other connection is closed.
            response.release()


async def _read_report(call: Call, response: ClientResponse) -> Incoming:
    """Read a report. Raises EngineGone if it breaks off, because the answer has not begun then."""
    try:
        return await read_report(response, call.on_progress)
    except EngineBroke as error:
        raise EngineGone(may_have_read=True, reason=error.message) from error
