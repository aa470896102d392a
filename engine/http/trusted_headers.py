"""Reader of a request's caller from the gateway's headers. They are trusted only with the internal token."""

import math
from collections.abc import Callable, Mapping

from engine.answering.caller import Caller
from engine.answering.errors import ApiError
from engine.answering.usage_log import MAX_ID_BYTES
from wire.headers import (
    AGE_HEADER,
    ALLOWANCE_HEADER,
    BASE_HEADER,
    PRIORITY_HEADER,
    TENANT_HEADER,
    TTFT_HEADER,
    WEIGHT_HEADER,
)

# Maximum length of a number in a header; a longer integer could overflow a float.
MAX_NUMBER_LENGTH = 32


def read_caller(headers: Mapping[str, str], *, internal: bool) -> Caller:
    """Return the caller. internal: the request has the internal token; without it the headers are ignored. Raises
    ApiError.
    """
    if not internal:
        return Caller()
    tenant_id = headers.get(TENANT_HEADER, "")
    if not (tenant_id.isascii() and tenant_id.isprintable() and len(tenant_id) <= 256):
        raise ApiError(400, f"{TENANT_HEADER}: expected at most 256 ASCII characters.", param=TENANT_HEADER)
    return Caller(
        internal=True,
        tenant_id=tenant_id,
        weight=_weight(headers),
        priority=int(_number(headers, PRIORITY_HEADER, int, 0)),
        ttft_target=_ttft_target(headers),
        request_id=_request_id(headers),
        allowance=_allowance(headers),
        base_digest=headers.get(BASE_HEADER),
        age=_age(headers),
    )


def _weight(headers: Mapping[str, str]) -> float:
    weight = _number(headers, WEIGHT_HEADER, float, 1.0)
    if weight <= 0:
        message = f"{WEIGHT_HEADER}: expected a number above 0, got {weight:g}."
        raise ApiError(400, message, param=WEIGHT_HEADER)
    return weight


def _ttft_target(headers: Mapping[str, str]) -> float | None:
    if TTFT_HEADER not in headers:
        return None
    seconds = _number(headers, TTFT_HEADER, float, 0.0)
    if seconds <= 0:
        raise ApiError(400, f"{TTFT_HEADER}: expected seconds above 0, got {seconds:g}.", param=TTFT_HEADER)
    return seconds


def _age(headers: Mapping[str, str]) -> float:
    seconds = _number(headers, AGE_HEADER, float, 0.0)
    if seconds < 0:
        raise ApiError(400, f"{AGE_HEADER}: expected 0 seconds or more, got {seconds:g}.", param=AGE_HEADER)
    return seconds


def _request_id(headers: Mapping[str, str]) -> str | None:
    given = headers.get("x-request-id")
    if given is not None and not (given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_BYTES):
        raise ApiError(400, f"x-request-id: expected at most {MAX_ID_BYTES} ASCII characters.", param="x-request-id")
    return given


def _allowance(headers: Mapping[str, str]) -> int | None:
    if ALLOWANCE_HEADER not in headers:
        return None
    tokens = int(_number(headers, ALLOWANCE_HEADER, int, 0))
    if tokens < 0:
        raise ApiError(400, f"{ALLOWANCE_HEADER}: expected 0 or more, got {tokens}.", param=ALLOWANCE_HEADER)
    return tokens


def _number(headers: Mapping[str, str], name: str, kind: Callable[[str], float], default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = kind(text) if len(text) <= MAX_NUMBER_LENGTH else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(400, f"{name}: expected a number, got {text[:40]!r}.", param=name)
    return value
