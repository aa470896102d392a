"""Translation of exceptions into HTTP answers of OpenAI's shape. No other module does it."""

import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web

from engine.errors import EngineFailed, EngineUnavailable, QueueFull, TenantQueueFull
from wire.error_codes import ENGINE_OVERLOADED, ENGINE_SHARE_USED, ENGINE_UNAVAILABLE, MODEL_NOT_FOUND, UNKNOWN_URL
from wire.errors import BadRequest
from wire.http_requests import BadHead
from wire.responses import ErrorDetail, ErrorResponse
from wire.text.tokenizer import ChatTemplateError

logger = logging.getLogger(__name__)

# True for a request with the internal token, so that it comes from a gateway.
IS_INTERNAL = web.RequestKey("is_internal", bool)


class ApiError(Exception):
    """An error answer. `kind` is OpenAI's error type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, kind, param, code)
        self.headers = headers


class ModelNotFound(ApiError):
    def __init__(self, model: str) -> None:
        super().__init__(404, f"The model {model[:200]!r} does not exist.", param="model", code=MODEL_NOT_FOUND)


def as_api_error(exc: Exception, request: web.Request) -> ApiError:
    """Return the answer for an exception. An unexpected one is logged, and its answer reveals nothing of it.

    Raises ConnectionAbortedError if the engine failed with a gateway's request, whose connection is closed then: a
    gateway takes that for the engine's death and quarantines a request with which engines die. After an answer it would
    send the request to the next engine.
    """
    if isinstance(exc, EngineFailed) and request.get(IS_INTERNAL):
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError(exc.message) from exc
    match exc:
        case ApiError():
            return exc
        case BadHead():
            return ApiError(exc.status, exc.message)
        case BadRequest():
            return ApiError(400, exc.message, param=exc.param, code=exc.code)
        case ChatTemplateError():
            return ApiError(400, str(exc), param=exc.param)
        case EngineUnavailable():
            headers = {} if exc.retry_after is None else {"Retry-After": str(exc.retry_after)}
            if isinstance(exc, TenantQueueFull):
                return ApiError(
                    429,
                    str(exc),
                    kind="rate_limit_error",
                    param=exc.param,
                    code=ENGINE_SHARE_USED,
                    headers=headers,
                )
            code = ENGINE_OVERLOADED if isinstance(exc, QueueFull) else ENGINE_UNAVAILABLE
            return ApiError(503, str(exc), kind="server_error", code=code, headers=headers)
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "The body is too large.", code="request_too_large")
        case web.RequestPayloadError():
            return ApiError(400, "The body cannot be read: it does not match its headers.")
        case web.HTTPNotFound():
            return ApiError(404, exc.reason, code=UNKNOWN_URL)
        case web.HTTPMethodNotAllowed():
            return ApiError(405, exc.reason, code="method_not_allowed", headers={"Allow": exc.headers["Allow"]})
        case web.HTTPException():
            kind = "invalid_request_error" if exc.status < 500 else "server_error"
            return ApiError(exc.status, exc.reason, kind=kind)
        case _:
            # Logged with repr, because the client chooses the header.
            logger.error("unexpected error in %s, request %r", request.path, _request_id(request), exc_info=exc)
            return ApiError(
                500, "The engine could not answer: internal error.", kind="server_error", code="internal_error"
            )


def _request_id(request: web.Request) -> str | None:
    given = request.headers.get("x-request-id")
    return None if given is None else given[:128]


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(ErrorResponse(error.detail))
