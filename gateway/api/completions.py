"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: the path of an inference request, once for both."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import ClientError, ClientResponse, web

from engine.tracing import NO_SPAN, SPAN
from gateway.admission.auth import Authenticator
from gateway.admission.quota import Quota
from gateway.api.accounting import Account, Accounting, ClientGone, lease_note
from gateway.api.bodies import json_response, read_raw
from gateway.api.prompts import CHAT, COMPLETIONS, Endpoint, InferenceRequest, PromptReader
from gateway.errors import (
    REQUEST_ID,
    BadRequest,
    Forbidden,
    InvalidKey,
    ModelNotFound,
    OutOfTime,
    RateLimited,
    error_body,
    translate,
)
from gateway.fleet.client import Call, EngineRefused, read_events, read_json
from gateway.fleet.dispatch import Fleet
from gateway.metrics import Metrics
from gateway.records.catalog import Adapter, Catalog
from gateway.records.prices import PriceList
from gateway.records.tenants import Tenant
from gateway.tracing import describe_request

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Asks nginx and its kin to pass events on as they come.
    "X-Accel-Buffering": "no",
}
# W3C's Trace Context, level 1; what does not look like it is not passed on.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Completions:
    """Raises what its parts raise; `gateway.errors` makes it HTTP."""

    def __init__(
        self,
        *,
        auth: Authenticator,
        catalog: Catalog,
        prompts: PromptReader,
        quota: Quota,
        prices: PriceList,
        fleet: Fleet,
        accounting: Accounting,
        metrics: Metrics,
        base_model: str,
        client_timeout: float,
        request_timeout: float,
    ) -> None:
        self._auth = auth
        self._catalog = catalog
        self._prompts = prompts
        self._quota = quota
        self._prices = prices
        self._fleet = fleet
        self._accounting = accounting
        self._metrics = metrics
        self._base_model = base_model
        self._client_timeout = client_timeout
        self._request_timeout = request_timeout
        self._started = int(time.time())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, COMPLETIONS)

    async def _serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        span = request.get(SPAN, NO_SPAN)
        with span.child("admission"):
            asked, account = await self._admit(request, endpoint)
        try:
            with self._accounting.open(account):
                return await self._forward(request, endpoint, asked, account)
        finally:
            if span.is_recording:
                describe_request(span, endpoint.path, account)

    async def _admit(self, request: web.Request, endpoint: Endpoint) -> tuple[InferenceRequest, Account]:
        """What is asked for, as far as it is granted, and on whose account."""
        arrived = time.monotonic()
        principal = await self._auth.tenant(request.headers.get("Authorization"), "inference")
        tenant = principal.tenant
        raw = await read_raw(request)
        parsed = await self._prompts.parse(raw, endpoint)
        principal.check_model(parsed.model)
        model = await self._catalog.resolve(tenant, parsed.model)
        asked = await self._prompts.measure(parsed, raw)
        self._accounting.check_room()
        price = self._prices.price(tenant.name, model)
        try:
            reservation = await self._quota.acquire(
                principal,
                model,
                request[REQUEST_ID],
                asked.prompt_tokens,
                asked.max_tokens,
                choices=asked.choices,
                price=price,
                lease=lease_note(principal, endpoint.name, model, price),
            )
        except RateLimited as refusal:
            self._metrics.refused(tenant.name, refusal.kind)
            raise
        if reservation.max_tokens < asked.max_tokens:
            asked.shorten(reservation.max_tokens)
        return asked, Account(principal, reservation, endpoint.name, model, price, arrived)

    async def _forward(
        self, request: web.Request, endpoint: Endpoint, asked: InferenceRequest, account: Account
    ) -> web.StreamResponse:
        """Sends it to an engine and the engine's answer to the client."""
        call = Call(
            request_id=request[REQUEST_ID],
            path=endpoint.path,
            body=asked.body,
            model=account.model,
            tenant=account.principal.tenant,
            prompt_tokens=asked.prompt_tokens,
            span=request.get(SPAN, NO_SPAN),
            trace=_trace(request),
        )
        relay = self._relay_stream if asked.stream else self._relay_answer
        try:
            async with AsyncExitStack() as stack:
                # An answer that is not streamed comes whole, when it begins; the relay of a stream watches by itself.
                async with self._while_allowed(account):
                    upstream = await stack.enter_async_context(self._fleet.open(call, account))
                return await relay(request, upstream, asked, account)
        except EngineRefused as refusal:
            # A 4xx comes before any work: nothing of it is held against the tenant. Overload is, or a client could
            # knock without end.
            account.unserved = refusal.error.code == "no_engine"
            of_client = refusal.status is not None and 400 <= refusal.status < 500
            account.refused(counts=not (of_client or account.unserved))
            # Whose fault it was: only the client's is a refusal, a wrong token or a missing model is our error.
            status = "refused" if isinstance(refusal.error, BadRequest) else "error"
            await self._accounting.close_and_wait(account, status)
            refusal.error.headers = {**account.reservation.headers, **refusal.error.headers}
            raise refusal.error from refusal

    async def _relay_answer(
        self, request: web.Request, upstream: ClientResponse, asked: InferenceRequest, account: Account
    ) -> web.StreamResponse:
        answer = await read_json(upstream)
        account.observe_answer(answer)
        answer.pop("loraplex", None)
        answer["model"] = account.model.name
        await self._accounting.close_ahead(account)
        return web.Response(
            body=msgspec.json.encode(answer), content_type="application/json", headers=account.reservation.headers
        )

    async def _relay_stream(
        self, request: web.Request, upstream: ClientResponse, asked: InferenceRequest, account: Account
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**STREAM_HEADERS, **account.reservation.headers})
        try:
            await self._guard(response.prepare(request))
            try:
                async with self._while_allowed(account):
                    async for event in read_events(upstream):
                        account.observe_event(event)
                        if "error" in event:
                            await self._accounting.close_and_wait(account, "error")
                            await self._send(response, msgspec.json.encode(event))
                            return response
                        visible = visible_event(event, account.model.name, asked.include_usage)
                        if visible is not None:
                            await self._send(response, msgspec.json.encode(visible))
                await self._accounting.close_ahead(account)
                await self._send(response, b"[DONE]")
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001  (the status line is out: errors travel as an event)
                failure = translate(error, request[REQUEST_ID])
                # The engine stops, and can then be asked what it did.
                upstream.close()
                status = "revoked" if isinstance(error, InvalidKey | Forbidden) else "error"
                await self._accounting.close_and_wait(account, status)
                await self._send(response, error_body(failure.message, failure.kind, failure.param, failure.code))
        except ClientGone:
            self._accounting.close(account, "cancelled")
            if request.transport is not None:
                request.transport.abort()
        return response

    @asynccontextmanager
    async def _while_allowed(self, account: Account) -> AsyncIterator[None]:
        """Ends the block when the key opens nothing any more, or the request has taken as long as any may.

        Raises InvalidKey, Forbidden, OutOfTime.
        """
        left = account.arrived + self._request_timeout - time.monotonic()
        try:
            async with asyncio.timeout(left) as deadline, self._auth.while_valid(account.principal):
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise OutOfTime(f"The request took longer than the {self._request_timeout:g} s that any may.") from error

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        await self._guard(response.write(b"data: " + data + b"\n\n"))

    async def _guard(self, writing: Any) -> None:
        """Waits until the client has taken enough of what was written; nothing piles up here for a slow one.

        Raises ClientGone.
        """
        try:
            async with asyncio.timeout(self._client_timeout):
                await writing
        except (ClientError, ConnectionError, TimeoutError) as error:
            raise ClientGone from error

    async def list_models(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "inference")
        adapters = await self._catalog.list(principal.tenant)
        models = [self._base(), *(self._describe(adapter, principal.tenant) for adapter in adapters)]
        usable = [model for model in models if principal.may_use(model["id"])]
        return json_response({"object": "list", "data": usable})

    async def get_model(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "inference")
        name = request.match_info["name"]
        principal.check_model(name)
        if name == self._base_model:
            return json_response(self._base())
        for adapter in await self._catalog.list(principal.tenant):
            if adapter.name == name:
                return json_response(self._describe(adapter, principal.tenant))
        raise ModelNotFound(name)

    def _base(self) -> dict[str, Any]:
        return {"id": self._base_model, "object": "model", "created": self._started, "owned_by": "loraplex"}

    def _describe(self, adapter: Adapter, owner: Tenant) -> dict[str, Any]:
        created = int(adapter.created_at.timestamp())
        description = {"id": adapter.name, "object": "model", "created": created, "owned_by": owner.name}
        return {**description, "root": self._base_model, "parent": self._base_model}


def _trace(request: web.Request) -> dict[str, str]:
    """The client's, for the engine, where the gateway makes no spans itself."""
    given = request.headers.get("traceparent")
    return {"traceparent": given} if given is not None and TRACEPARENT.fullmatch(given) else {}


def visible_event(event: dict[str, Any], model: str, include_usage: bool) -> dict[str, Any] | None:
    """A stream's event as its client may see it, None for one that only the gateway asked for."""
    event.pop("loraplex", None)
    event["model"] = model
    if not include_usage:
        event.pop("usage", None)
    return event if event.get("choices") or event.get("usage") is not None else None
