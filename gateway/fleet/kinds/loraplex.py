"""Our own engine: it pushes its state, orders tenants fairly, keeps allowances and loads adapters by itself."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import ClientResponse, ClientTimeout

from gateway.errors import BadRequest, EngineShareUsed, GatewayError, Unavailable
from gateway.fleet.calls.answers import FAILURES, REFUSED, Incoming
from gateway.fleet.calls.call import Call, EngineRefused, EngineWithdrew
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.traits import LORAPLEX
from gateway.fleet.kinds.kind import (
    CONNECT_SECONDS,
    HEALTH_TIMEOUT,
    EngineKind,
    ErrorDetail,
    FilesMissing,
    NotedBytes,
    Services,
    read_detail,
    retry_after,
    with_clients_names,
)
from wire.digests import digest_name
from wire.error_codes import ENGINE_SHARE_USED, ENGINE_UNAVAILABLE, MODEL_NOT_FOUND
from wire.headers import (
    AGE_HEADER,
    ALLOWANCE_HEADER,
    BASE_HEADER,
    INTERNAL_TOKEN_HEADER,
    PRIORITY_HEADER,
    TENANT_HEADER,
    TTFT_HEADER,
    WEIGHT_HEADER,
)
from wire.http_errors import HTTP_ERRORS
from wire.prefetch import PinRequest, PinResult, Prefetched, PrefetchRequest
from wire.probes import ProbeRequest
from wire.requests import AllowanceRequest
from wire.service import ServiceElsewhere

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model
    from gateway.records.tenants.tenants import Tenant

log = logging.getLogger(__name__)

STATE_STREAM = "application/x-ndjson"
# Maximum length of a line in a state stream; an adapter takes 70 bytes.
MAX_LINE_BYTES = 8 * 2**20
RAISE_TIMEOUT = ClientTimeout(total=CONNECT_SECONDS)
SERVICE_TIMEOUT = ClientTimeout(total=1.0)
# Longer than the engine's own time limit of a probe.
ADAPTER_TIMEOUT = ClientTimeout(total=75.0, sock_connect=CONNECT_SECONDS)
# A hint is answered after the load.
PREFETCH_TIMEOUT = ClientTimeout(total=30.0)
# Prefix of an engine's error codes for faults of an adapter.
ADAPTER_FAULT = "adapter_"


class Loraplex(EngineKind):
    traits = LORAPLEX

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._token = {INTERNAL_TOKEN_HEADER: services.internal_token}
        self._stream_timeout = ClientTimeout(
            total=None, sock_connect=HEALTH_TIMEOUT.total, sock_read=services.heartbeat_timeout
        )

    def headers(self, engine: EngineRecord) -> dict[str, str]:
        return self._token

    def tenant_headers(self, tenant: "Tenant") -> dict[str, str]:
        return {TENANT_HEADER: tenant.id, WEIGHT_HEADER: repr(tenant.weight)}

    async def read_state(self, engine: EngineRecord) -> EngineState:
        return parse_state(await self.get(engine, "/state"))

    async def follow(self, engine: EngineRecord) -> AsyncIterator[EngineState]:
        async with self._session.get(
            f"{engine.url}/state",
            params={"watch": "true"},
            headers=self._token,
            timeout=self._stream_timeout,
            allow_redirects=False,
            read_bufsize=MAX_LINE_BYTES,
        ) as response:
            # A proxy that buffers streams may answer with another type. The engine is then polled.
            if response.status == 200 and response.content_type == STATE_STREAM:
                async for line in response.content:
                    yield parse_state(line)

    async def send(self, engine: EngineRecord, call: Call) -> ClientResponse:
        headers = {
            **self._token,
            **self.tenant_headers(call.tenant),
            PRIORITY_HEADER: str(call.tenant.priority),
            AGE_HEADER: f"{max(0.0, time.monotonic() - call.arrived):.6f}",
        }
        if engine.state.base_digest is not None:
            # Another engine may have taken its address since its last report.
            headers[BASE_HEADER] = engine.state.base_digest
        if call.tenant.ttft_target is not None:
            headers[TTFT_HEADER] = repr(call.tenant.ttft_target)
        if call.hold is not None and engine.keeps_allowances:
            call.hold.raise_allowance = partial(self._raise_allowance, engine, call.request_id)
            if call.hold.allowance is not None:
                headers[ALLOWANCE_HEADER] = str(call.hold.allowance)
        # Engines of one base model may serve it under different names.
        name = call.model.engine_name if call.model.digest is not None else engine.state.model or call.model.name
        return await self.post(engine, call, {**call.body, "model": name}, headers)

    def refusal(self, answer: Incoming, body: bytes, model: "Model") -> EngineRefused:
        detail = read_detail(body)
        error = self.error(answer, detail, model)
        withdrew = isinstance(error, Unavailable) and detail.code == ENGINE_UNAVAILABLE
        return (EngineWithdrew if withdrew else EngineRefused)(error, answer.status)

    def error(self, answer: Incoming, detail: ErrorDetail, model: "Model") -> GatewayError:
        if answer.status in (429, 503) and detail.code in FAILURES:
            return Unavailable(FAILURES[detail.code], code=detail.code, retry_after=retry_after(answer))
        # An adapter's error is not the engine's failure, except for 404: the files may be missing on this engine only.
        if detail.code is not None and detail.code.startswith(ADAPTER_FAULT) and answer.status != 404:
            if answer.status >= 500:
                return BadRequest("The engine could not load the adapter.", param="model", code=detail.code)
            message = with_clients_names(detail.message, model)
            return BadRequest(message or REFUSED, param=detail.param, code=detail.code)
        if answer.status == 404 and detail.code == MODEL_NOT_FOUND and model.adapters:
            what = "the adapter" if model.mixture is None else "an adapter of"
            return FilesMissing(f"The files of {what} '{model.name}' are missing from the adapter store.")
        if answer.status in (429, 503) and detail.code == ENGINE_SHARE_USED:
            return EngineShareUsed(
                f"Your share of the engine is used up: {detail.message.rstrip('.')}.",
                param=detail.param,
                retry_after=retry_after(answer),
            )
        return super().error(answer, detail, model)

    async def send_service(self, engine: EngineRecord, report: ServiceElsewhere) -> None:
        await self._post_json(engine, "/service", report, SERVICE_TIMEOUT)

    async def probe(
        self, engine: EngineRecord, digest: str, tenant_id: str, on_sent: Callable[[], None]
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", TENANT_HEADER: tenant_id, **self._token}
        data = NotedBytes(msgspec.json.encode(ProbeRequest(digest_name(digest))), on_sent)
        async with self._session.post(
            engine.url + "/probe", data=data, headers=headers, timeout=ADAPTER_TIMEOUT, allow_redirects=False
        ) as response:
            return response.status, await response.read()

    async def send_hint(self, engine: EngineRecord, digest: str, tenant_id: str) -> bool:
        body = PrefetchRequest(digest_name(digest), tenant_id)
        return msgspec.json.decode(
            await self._post_json(engine, "/prefetch", body, PREFETCH_TIMEOUT), type=Prefetched
        ).is_loaded

    async def send_pins(self, engine: EngineRecord, digests: Sequence[str]) -> int:
        body = PinRequest([digest_name(digest) for digest in digests])
        answer = await self._post_json(engine, "/pins", body, PREFETCH_TIMEOUT)
        return msgspec.json.decode(answer, type=PinResult).num_kept

    async def _post_json(self, engine: EngineRecord, path: str, body: msgspec.Struct, timeout: ClientTimeout) -> bytes:
        """Post to one of the engine's own routes and return the answer. Raises ClientError, OSError, TimeoutError."""
        headers = {"Content-Type": "application/json", **self._token}
        data = msgspec.json.encode(body)
        async with self._session.post(
            engine.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            response.raise_for_status()
            return await response.read()

    async def _raise_allowance(self, engine: EngineRecord, request_id: str, tokens: int) -> None:
        """Raise a request's allowance on its engine. If that fails, the answer ends at the previous allowance."""
        try:
            await self._post_json(engine, "/allowances", AllowanceRequest(request_id, tokens), RAISE_TIMEOUT)
        except HTTP_ERRORS as error:
            log.warning(
                "raising the allowance of request %s on %s failed: %s", request_id, engine.url, type(error).__name__
            )


def parse_state(line: bytes) -> EngineState:
    """Decode an engine's report. Raises MsgspecError."""
    reported = msgspec.json.decode(line, type=dict[str, Any])
    state = msgspec.convert({**reported, "reported": {}}, EngineState)
    reported.pop("adapters_host", None)
    state.reported = reported
    return state
