"""Attributes of the gateway's spans, named by OpenTelemetry's conventions for HTTP and generative AI.

A request has the span `POST /v1/chat/completions`. Its children are `admission` (key, prompt, quota), `routing` (the
wait for an engine with room) and one `chat <model>` for each engine that was asked, which contains the engine's own
span.
"""

from typing import TYPE_CHECKING

from aiohttp import web

from gateway.caller import Caller
from wire.digests import digest_name
from wire.telemetry.spans import OPERATIONS, Span, Value

if TYPE_CHECKING:
    from gateway.billing.account import Account

# Whether a client's `traceparent` decides if spans are recorded.
TRUST_TRACEPARENT = web.AppKey("trust_traceparent", bool)
# Routes that load balancers, Prometheus and engines call all the time.
UNTRACED = ("/healthz", "/readyz", "/metrics", "/internal/engines")


def describe_caller(span: Span, caller: Caller) -> None:
    """Set the attributes of any request."""
    attributes: dict[str, Value] = {"client.address": caller.address, "loraplex.request_id": caller.request_id}
    if caller.key_id is not None:
        attributes["loraplex.key_id"] = caller.key_id
    if caller.tenant_name is not None:
        attributes["loraplex.tenant"] = caller.tenant_name
    span.set(attributes)


def describe_request(span: Span, path: str, account: "Account") -> None:
    """Set the attributes of an inference request that has ended: its fields and the token counts received for it."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": account.model.shown,
        "gen_ai.request.max_tokens": account.reservation.max_tokens,
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": account.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
        "loraplex.status": account.status,
    }
    if account.model.digest is not None:
        attributes["loraplex.adapter"] = digest_name(account.model.digest)
    if account.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [account.finish_reason]
    if account.first_token_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = account.first_token_seconds
    span.set(attributes)
    if account.status == "error":
        span.fail("error")
