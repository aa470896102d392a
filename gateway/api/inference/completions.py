"""`/v1/chat/completions` and `/v1/completions`: dispatch and delivery of admitted requests."""

import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from functools import partial

import msgspec
from aiohttp import ClientError, web

from gateway.api.inference.admission import Admission
from gateway.api.inference.delivery import FREE_BYTES, Deliveries, Delivery
from gateway.api.inference.events import drop_internal, head_of, shortened, show_billed, visible_event
from gateway.api.inference.log_fields import LOG_FIELDS, log_fields
from gateway.api.inference.time_limit import TimeLimit
from gateway.api.requests.prompts import CHAT, COMPLETIONS, Endpoint
from gateway.api.requests.structured_output_forms import FORM
from gateway.billing.account import Account, Accounting
from gateway.billing.charges import Ending, ending_after, ending_of
from gateway.billing.inference_request import InferenceRequest
from gateway.error_codes import code_of
from gateway.errors import (
    ENDING,
    ERROR_CODE,
    HAS_USAGE,
    REQUEST_ID,
    AdapterMismatch,
    ClientGone,
    EngineShareUsed,
    RateLimited,
    error_body,
    translate,
)
from gateway.fleet.calls import receipts
from gateway.fleet.calls.answers import EngineLost, Fields, object_parts, public_error, read_answer, read_events
from gateway.fleet.calls.call import Call, EngineRefused
from gateway.fleet.dispatch import Answering, Dispatcher
from gateway.metrics import Metrics
from gateway.spans import TRUST_TRACEPARENT, describe_request
from wire.headers import MAX_TOKENS_HEADER, RECEIPT_HEADER
from wire.telemetry.spans import NO_SPAN, SPAN

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Makes nginx and similar proxies pass on events without buffering them.
    "X-Accel-Buffering": "no",
}
# The header of W3C Trace Context, level 1. A value of another form is not passed on.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Completions:
    """Inference routes. Errors pass through; `gateway.error_boundary` turns them into responses."""

    def __init__(
        self,
        *,
        admission: Admission,
        dispatcher: Dispatcher,
        accounting: Accounting,
        metrics: Metrics,
        deliveries: Deliveries,
        max_answer_bytes: int,
        time_limit: TimeLimit,
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._accounting = accounting
        self._metrics = metrics
        self._deliveries = deliveries
        self._max_answer_bytes = max_answer_bytes
        self._limit = time_limit

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, COMPLETIONS)

    async def _serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        span = request.get(SPAN, NO_SPAN)
        with ExitStack() as held:
            with span.child("admission"):
                asked, account = await self._admission.admit(request, endpoint, held)
            try:
                with self._accounting.open(account):
                    return await self._forward(request, endpoint, asked, account)
            finally:
                # Without an engine there is no usage row, so the request log needs a row of the refusal.
                request[HAS_USAGE] = account.ending is not Ending.NO_ENGINE or account.used_engines.lost is not None
                if account.ending is not Ending.FINISHED:
                    request[ENDING] = account.ending.value
                request[LOG_FIELDS] = log_fields(account)
                if span.is_recording:
                    describe_request(span, endpoint.path, account)

    async def _forward(
        self, request: web.Request, endpoint: Endpoint, asked: InferenceRequest, account: Account
    ) -> web.StreamResponse:
        """Send the request to an engine and the engine's answer to the client."""
        call = Call(
            request_id=request[REQUEST_ID],
            path=endpoint.path,
            body=asked.limited(account.reservation.max_tokens),
            named=asked.named,
            model=account.model,
            tenant=account.principal.tenant,
            prompt_tokens=asked.prompt_tokens,
            sequences=asked.choices,
            arrived=account.arrived,
            span=request.get(SPAN, NO_SPAN),
            trace=_trace(request),
            hold=account.hold,
            on_progress=account.observe_report,
        )
        try:
            async with AsyncExitStack() as stack:
                delivery = stack.enter_context(self._deliveries.open(request, account.principal.tenant.id))
                async with self._time_limit(account):
                    answering = await stack.enter_async_context(self._dispatcher.open(call, account))
                    stack.enter_context(_mark_mismatch(answering))
                    self._admission.forms.served(call.tenant.id, request.get(FORM))
                    account.observe_receipt(answering.response.headers.get(RECEIPT_HEADER))
                    if not asked.stream:
                        return await self._relay_answer(answering, account, delivery)
                return await self._relay_stream(request, answering, asked, account, delivery)
        except RateLimited as refusal:
            # The token rates have no room for a whole answer.
            self._limited(account, refusal)
            account.failed(code_of(refusal))
            await self._accounting.close_and_wait(account, Ending.LIMITED)
            refusal.headers = {**account.reservation.headers, **refusal.headers}
            raise
        except EngineRefused as refusal:
            if isinstance(refusal.error, EngineShareUsed) and refusal.error.param is not None:
                self._admission.forms.refused(call.tenant.id, request.get(FORM), refusal.error.retry_after)
            account.failed(code_of(refusal.error))
            await self._accounting.close_and_wait(account, ending_of(refusal))
            refusal.error.headers = {**account.reservation.headers, **refusal.error.headers}
            raise refusal.error from refusal

    async def _relay_answer(self, answering: Answering, account: Account, delivery: Delivery) -> web.Response:
        account.used_engines.answered()

        async def reserve(size: int) -> None:
            if size > FREE_BYTES:
                # The engine has finished; only the wait for this gateway's memory is left.
                answering.release()
                await delivery.reserve(size)

        is_own = not answering.engine.address.traits.has_own_secret
        answer = await read_answer(
            answering.response, self._max_answer_bytes, reserve, is_own=is_own, before_piece=delivery.wait_for_piece
        )
        answering.end()
        account.observe_answer(answer)
        headers = _headers(account)
        if account.is_beyond_hold:
            assert account.hold is not None
            # The tokens are charged, so every client gets them, also of a tenant whose requests are refused.
            self._limited(account, account.hold.refused())
            headers = {**headers, MAX_TOKENS_HEADER: str(account.completion_tokens // account.choices)}
        drop_internal(answer)
        answer.update(head_of(account))
        await self._accounting.close_ahead(account)
        show_billed(answer, account)
        body = delivery.whole(object_parts(answer))
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _relay_stream(
        self,
        request: web.Request,
        answering: Answering,
        asked: InferenceRequest,
        account: Account,
        delivery: Delivery,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**STREAM_HEADERS, **_headers(account)})
        delivery.on_full = partial(_hold_back, account, answering)
        head = head_of(account)
        try:
            await _prepare(response, request)
            try:
                async with self._time_limit(account):
                    async for event in read_events(answering.response, self._deliveries.reader_bytes):
                        account.observe_event(event)
                        if "error" in event:
                            answering.end()
                            failed = public_error(event, answering.engine.address.traits)
                            account.failed(_code(failed))
                            await self._accounting.close_and_wait(account, Ending.BROKEN)
                            request[ERROR_CODE] = _code(failed)
                            await _send(delivery, response, msgspec.json.encode(failed))
                            return response
                        if account.is_beyond_hold and not await self._grow(account, answering):
                            for last in shortened(event, head, asked, account):
                                await _send(delivery, response, msgspec.json.encode(last))
                            break
                        visible = visible_event(event, head, asked.include_usage)
                        if visible is not None:
                            show_billed(visible, account)
                            await _send(delivery, response, msgspec.json.encode(visible))
                    else:
                        answering.end()
                await self._accounting.close_ahead(account)
                await _send(delivery, response, b"[DONE]")
            except ClientGone:
                raise
            except Exception as raised:
                # The status line is already sent: an event reports the error.
                error = self._cause(account, raised)
                if isinstance(error, EngineLost) and await answering.check_cut_off():
                    self._deliveries.cut(delivery, "its engine, or a proxy, cut the answer off")
                    raise ClientGone from raised
                failure = translate(error, request[REQUEST_ID])
                request[ERROR_CODE] = failure.code or failure.kind
                account.failed(request[ERROR_CODE])
                # Closing the connection stops the engine, which can then report its final counts.
                answering.response.close()
                if isinstance(error, AdapterMismatch):
                    answering.engine.mark_mismatched(answering.instance)
                await self._accounting.close_and_wait(account, ending_after(error))
                body = error_body(failure.message, failure.kind, failure.param, failure.code)
                await _send(delivery, response, body)
        except ClientGone:
            self._accounting.close(account, Ending.CANCELLED)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _grow(self, account: Account, answering: Answering) -> bool:
        """Return whether the stream goes on: its token rates have room for the tokens that the engine has sent.

        Without room, the stream and the account of a tenant whose answers are shortened are closed. Raises RateLimited
        for other tenants.
        """
        assert account.hold is not None
        is_shortened = account.principal.tenant.on_token_limit == "shorten"
        try:
            if account.rate_end.by_engine:
                # A shortened answer does not show the wait, so its end does not wait for Redis.
                raise account.hold.refused() if is_shortened else await account.hold.refused_at_end()
            await account.hold.cover()
        except RateLimited as refusal:
            self._limited(account, refusal)
            if not is_shortened:
                raise
            if account.rate_end.by_engine:
                # The engine has ended the answer itself, as if it had reached its maximum length.
                return True
            account.finish_reason = "length"
            # Closing the connection stops the engine, which can then report its final counts.
            answering.response.close()
            await self._accounting.close_and_wait(account, Ending.SHORTENED)
            return False
        return True

    def _cause(self, account: Account, raised: Exception) -> Exception:
        """Return the error that ended a stream. Count the end if a limit had no room while the client did not read."""
        cut = account.rate_end.cut
        if cut is None:
            return raised
        if not account.rate_end.is_handled:
            self._limited(account, cut)
        return cut

    def _limited(self, account: Account, refusal: RateLimited) -> None:
        """Count an answer that ends because its token rates have no more room."""
        account.rate_end.handle(refusal)
        self._metrics.refused(account.principal.tenant.name, refusal.kind)

    def _time_limit(self, account: Account) -> AbstractAsyncContextManager[None]:
        return self._limit.of(account.principal, account.arrived)


@contextmanager
def _mark_mismatch(answering: Answering) -> Iterator[None]:
    """Send the engine's instance no more requests if its answer is of another adapter than the request's."""
    try:
        yield
    except AdapterMismatch:
        answering.engine.mark_mismatched(answering.instance)
        raise


def _hold_back(account: Account, answering: Answering) -> None:
    """Free the engine's places while a client does not read.

    The engine goes on generating, so the request's hold grows to all the tokens that it may use. If that growth is
    refused and the engine keeps no allowance, the request is stopped.
    """
    answering.release()

    def cut(refusal: RateLimited) -> None:
        if not answering.engine.keeps_allowances:
            account.rate_end.cut = refusal
            answering.response.close()

    if account.hold is not None:
        account.hold.start_cover_all(cut)


def _trace(request: web.Request) -> dict[str, str]:
    """Return the trace header of a trusted client for the engine. A span of the gateway replaces it."""
    given = request.headers.get("traceparent") if request.app.get(TRUST_TRACEPARENT) else None
    return {"traceparent": given} if given is not None and TRACEPARENT.fullmatch(given) else {}


def _code(event: Fields) -> str:
    """Return the code of a stream's error event, or its type if it has no code."""
    error = msgspec.json.decode(event["error"])
    return str(error.get("code") or error.get("type")) if isinstance(error, dict) else "engine_error"


async def _prepare(response: web.StreamResponse, request: web.Request) -> None:
    try:
        await response.prepare(request)
    except (ClientError, ConnectionError) as error:
        raise ClientGone from error


async def _send(delivery: Delivery, response: web.StreamResponse, data: bytes) -> None:
    await delivery.write(response, b"data: " + data + b"\n\n")


def _headers(account: Account) -> dict[str, str]:
    if account.served_digest is None:
        return account.reservation.headers
    return {**account.reservation.headers, RECEIPT_HEADER: receipts.as_receipt(account.served_digest)}
