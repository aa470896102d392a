"""Errors that a client can receive.

The gateway raises these (or `AdapterError`, or errors of its libraries); gateway/error_boundary.py makes the responses.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy.exc import IntegrityError

from adapters.manifest import AdapterError
from gateway.sql_states import is_race
from wire.error_codes import ENGINE_SHARE_USED, MODEL_NOT_FOUND, WRONG_OFFSET
from wire.errors import BadRequest as ProtocolError
from wire.http_requests import BadHead
from wire.text.tokenizer import ChatTemplateError

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
# Code of the error in a request's answer or stream, for the access log.
ERROR_CODE = web.RequestKey("error_code", str)
# Whether an inference request has a usage row: it was admitted, and an engine was available.
HAS_USAGE = web.RequestKey("has_usage", bool)
# Error that was sent as the whole answer, for the request log.
FAILURE = web.RequestKey("failure", Exception)
# Ending of an inference request that was admitted but not completed, for the access log.
ENDING = web.RequestKey("ending", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ClientGone(Exception):
    """The client closed the connection, or was cut off."""


class GatewayError(Exception):
    """Base class. `status` is the HTTP status, `kind` OpenAI's error type, `code` its machine-readable code."""

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if code is not None:
            self.code = code


class BadRequest(GatewayError):
    status, kind = 400, "invalid_request_error"
    code: str | None = None


class RankNotServed(BadRequest):
    code = "adapter_rank_not_served"


class CheckFailed(GatewayError):
    """The check of an upload ended without a result: it exceeded its memory or time, or was killed."""

    status, kind, code = 400, "invalid_request_error", "adapter_check_failed"


class InvalidKey(GatewayError):
    status, kind, code = 401, "invalid_request_error", "invalid_api_key"

    def __init__(self, message: str = "Incorrect API key provided.", **kwargs: Any) -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"}, **kwargs)


class WrongKey(InvalidKey):
    """Key that was never issued, so a guess, unlike a key that is missing, revoked or expired."""


class Forbidden(GatewayError):
    status, kind, code = 403, "permission_error", "insufficient_permissions"


class AdapterLimitExceeded(Forbidden):
    """The tenant has no room for another adapter; `param` names the limit."""

    code = "adapter_limit_exceeded"


class RecordNotFound(GatewayError):
    status, kind, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(RecordNotFound):
    """Unknown model name, or another tenant's. The answer is identical in every byte, so that it reveals no name."""

    code = MODEL_NOT_FOUND

    def __init__(self, name: str) -> None:
        super().__init__(f"The model '{name}' does not exist or you do not have access to it.", param="model")


class ExpectationFailed(GatewayError):
    status, kind, code = 417, "invalid_request_error", "unknown_expectation"


class MethodNotAllowed(GatewayError):
    status, kind, code = 405, "invalid_request_error", "method_not_allowed"


class NameTaken(GatewayError):
    status, kind, code = 409, "invalid_request_error", "already_exists"


class WrongOffset(GatewayError):
    """A part of an upload does not start at the end of the previous part. `Upload-Offset` has the expected start."""

    status, kind, code = 409, "invalid_request_error", WRONG_OFFSET

    def __init__(self, expected: int) -> None:
        super().__init__(
            f"The upload has {expected} bytes so far: the next part starts there.",
            param="offset",
            headers={"Upload-Offset": str(expected)},
        )


class AdapterInUse(GatewayError):
    """A version that is to be deleted or retired is in use."""

    status, kind, code = 409, "invalid_request_error", "adapter_in_use"


class Conflict(GatewayError):
    """The change conflicts with the present records."""

    status, kind, code = 409, "invalid_request_error", "conflict"


class Changed(Conflict):
    """The record has changed since it was read for the change."""

    code = "changed"

    def __init__(self) -> None:
        super().__init__("Another change was saved at the same time. Load the page again and repeat yours.")


class NoEarlierState(GatewayError):
    """An alias has no earlier state to return to."""

    status, kind, code = 409, "invalid_request_error", "no_earlier_state"


class PreconditionFailed(GatewayError):
    """If-Match names another state of an alias than the present one. `ETag` has the present one."""

    status, kind, code = 412, "invalid_request_error", "precondition_failed"

    def __init__(self, message: str, *, etag: str | None = None) -> None:
        super().__init__(message, headers={} if etag is None else {"ETag": etag})


class PreconditionRequired(PreconditionFailed):
    """If-Match is missing in a change of an existing alias."""

    status, code = 428, "precondition_required"


class BodyTimeout(GatewayError):
    """The client did not send all of its body in time."""

    status, kind, code = 408, "invalid_request_error", "request_timeout"


class TimeLimitExceeded(GatewayError):
    """The request exceeded the time limit."""

    status, code = 504, "time_limit_exceeded"


class TooLarge(GatewayError):
    status, kind, code = 413, "invalid_request_error", "request_too_large"


class Exceeded(msgspec.Struct, frozen=True, kw_only=True):
    """Limit that refused a request.

    name: such as "tokens_per_minute". owner: "tenant", "key" or "model". value: the limit itself. needed, remaining:
    the amounts that the request needed and that were left; money in micro-units. retry_after: the wait in seconds.
    """

    name: str
    owner: str
    value: int
    needed: int
    remaining: int
    retry_after: int | None = None


class RateLimited(GatewayError):
    """Exceeded limit.

    limit_class: "requests", "tokens", "concurrency" or "budget"; it becomes `kind`, the `type` of the error's body.
    exceeded: the limit and its amounts; None if it ended a running answer or upload. ended_by: its name, for an answer.
    """

    status, code = 429, "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        limit_class: str,
        code: str | None = None,
        headers: Mapping[str, str],
        exceeded: Exceeded | None = None,
        ended_by: str | None = None,
    ) -> None:
        super().__init__(message, code=code, headers=headers)
        self.kind, self.exceeded, self.ended_by = limit_class, exceeded, ended_by


class TooManyBodies(GatewayError):
    """The memory for request bodies, or the tenant's part of it, is used up."""

    status, kind, code = 429, "concurrency", "too_many_bodies"

    def __init__(self) -> None:
        message = "Too many request bodies are being read or served at once. Try again in 1 s, or with fewer at a time."
        super().__init__(message, headers={"Retry-After": "1"})


class TooMuchRefused(GatewayError):
    """The tenant's refused requests, whose prompts had been counted, have recently cost too much CPU time."""

    status, kind, code = 429, "invalid_request_error", "too_many_refused_requests"

    def __init__(self, retry_after: int) -> None:
        message = (
            f"Too many of your recent requests were refused after their prompts were counted. Their errors name the "
            f"causes. Try again in {retry_after} s."
        )
        super().__init__(message, headers={"Retry-After": str(retry_after)})


class TooManyRefusedUploads(GatewayError):
    """The checks of the tenant's refused uploads have recently cost too much CPU time."""

    status, kind, code = 429, "invalid_request_error", "too_many_refused_uploads"

    def __init__(self, retry_after: int) -> None:
        message = (
            f"Too many of your uploads were refused after an expensive check. Correct what their errors name, and try "
            f"again in {retry_after} s."
        )
        super().__init__(message, headers={"Retry-After": str(retry_after)})


class TooManyWrongKeys(GatewayError):
    """Too many wrong keys came from the client's address."""

    status, kind, code = 429, "invalid_request_error", "too_many_wrong_keys"

    def __init__(self, *, retry_after: int) -> None:
        wait = f"Try again in {retry_after} s. Issued keys are still served."
        message = f"Too many wrong API keys came from your address, so this key was not compared. {wait}"
        super().__init__(message, headers={"Retry-After": str(retry_after)})
        self.retry_after = retry_after


class Overloaded(GatewayError):
    """Every engine is full, and either the queue is full too or the request reached the time limit of the queue."""

    status, kind, code = 429, "server_overloaded", "server_overloaded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, headers={"Retry-After": str(retry_after)})


class UpstreamFailed(GatewayError):
    """The engine failed, or its response is malformed."""

    status, code = 502, "engine_error"


class Unavailable(GatewayError):
    """A part that the gateway needs is away, so it refuses the request."""

    status, code = 503, "service_unavailable"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message, param=param, code=code, headers={"Retry-After": str(retry_after)})
        self.retry_after = retry_after


class EngineShareUsed(Unavailable):
    """The tenant has used up its own share of the engine: its places, or its CPU time for new structured output forms.
    `param` names the field of a form.
    """

    status, kind, code = 429, "concurrency", ENGINE_SHARE_USED


# Length limits of quoted text, which keep an error response below 2 KB.
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1200, 200


def _fit(text: str, limit: int) -> str:
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return shown.encode("utf-8", "backslashreplace").decode()


class AdapterMismatch(GatewayError):
    """The engine used another adapter's pages than the request's. Its answer is discarded."""

    status, code = 500, "adapter_mismatch"

    def __init__(self) -> None:
        super().__init__("The engine used an adapter other than the request's; the request is not charged. Try again.")


class NoEngine(Unavailable):
    """No engine is available for the request."""

    status, code = 503, "no_engine"

    def __init__(
        self, message: str = "No engine is available to serve this request; try again shortly.", *, retry_after: int = 1
    ) -> None:
        super().__init__(message, retry_after=retry_after)


class NoEngineOfBase(NoEngine):
    """The available engines serve another base model than the adapter's."""

    code = "base_unavailable"

    def __init__(self) -> None:
        super().__init__(
            "No available engine serves the base model that this adapter was validated on. The operator may be "
            "replacing the base model; try again later, or verify the adapter on the new one."
        )


class EngineDied(NoEngine):
    """An engine died with the request, and no other is available."""

    code = "engine_died"

    def __init__(self) -> None:
        super().__init__(
            "The engine died while it worked on this request, and no other is available; try again shortly. The "
            "request costs no money; tokens that were computed for it count against the token rates."
        )


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """Return OpenAI's error object as JSON. The message may quote a client, so it is cut and its lone surrogates are
    escaped.
    """
    message, param = _fit(message, MAX_MESSAGE_CHARS), None if param is None else _fit(param, MAX_PARAM_CHARS)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def translate(error: Exception, request_id: str) -> GatewayError:
    """Convert an exception into the error for the client. Log unexpected ones, whose details only the operator sees."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, BadHead):
        return ExpectationFailed(error.message) if error.status == 417 else BadRequest(error.message)
    if isinstance(error, AdapterError):
        return BadRequest(f"{error}.", param=error.field, code="invalid_adapter")
    if isinstance(error, ProtocolError):
        return BadRequest(error.message, param=error.param, code=error.code)
    if isinstance(error, ChatTemplateError):
        return BadRequest(str(error), param=error.param)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return TooLarge("The request body exceeds the limit of this gateway.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"Method {error.method} is not allowed here; use {allowed}."
        return MethodNotAllowed(message, headers={"Allow": allowed})
    if isinstance(error, IntegrityError) and is_race(error):
        # The traceback tells a race from a change that always conflicts. It has no values (`hide_parameters`).
        log.warning("request %s conflicts with another change", request_id, exc_info=error)
        return Conflict("Another change, which conflicts with this one, was saved at the same time. Try again.")
    log.error("request %s failed", request_id, exc_info=error)
    return GatewayError(f"The gateway failed. Report request id {request_id} to its operator.")
