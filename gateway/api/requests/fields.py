"""Readers of JSON bodies and query parameters, which check field by field."""

import asyncio
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from gateway.api.requests.body_reader import COST, ChunkReader
from gateway.api.requests.memory import BODY_MEMORY, FREE_BYTES, OPERATOR, BodyShare
from gateway.errors import BadRequest, BodyTimeout
from gateway.limits.kinds import BUDGET_NAMES
from gateway.process.reads import large_reads
from wire import http_body
from wire.decoding import BOUND_WORDS, TYPE_WORDS, UNITS, choices

T = TypeVar("T")
Name = TypeVar("Name", bound=str)

# Deflate's maximum compression ratio.
MAX_DEFLATE_RATIO = 1032
STEP_BYTES = 2**16

# Time limit for reading a body, in seconds.
BODY_TIMEOUT = web.AppKey("body_timeout", float)
_BODY = web.RequestKey("body", bytes)

# Fields of money: budgets, and the parts of a price.
AMOUNTS = frozenset((*BUDGET_NAMES, "input", "output", "cached"))

# Longest text of a filter; all stored values are shorter.
MAX_TEXT = 256

# Years that a time may have: no records exist beyond them, and date arithmetic fails at the ends of the calendar.
YEARS = range(1970, 9000)

# Unicode categories that texts must not contain: control characters (databases refuse a NUL, others forge lines of logs
# and tables), lone surrogates, and separators of lines and paragraphs. Format characters are allowed, because emoji
# contain them, except for those that reverse the text around them on a page.
UNFIT = {"Cc", "Cs", "Zl", "Zp"}
REVERSING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


async def read_raw(request: web.Request, owner: str = OPERATOR, most: int | None = None) -> bytes:
    """Return the whole body, like `read_shared`. Later calls return the same one. owner: the user of the memory."""
    if (raw := request.get(_BODY)) is None:
        with request.config_dict[BODY_MEMORY].share(owner) as share:
            raw = request[_BODY] = await read_shared(request, share, most)
    return raw


async def read_shared(request: web.Request, share: BodyShare, most: int | None = None) -> bytes:
    """Return the whole body. The share holds its memory.

    most: its largest size, at most the application's client_max_size, which is the default. Raises TooManyBodies before
    anything is read, BodyTimeout, BadRequest, TooLarge, web.HTTPRequestEntityTooLarge.
    """
    limit = request.client_max_size if most is None else min(most, request.client_max_size)
    # A body without a declared length counts as a small one at first.
    length = FREE_BYTES if request.content_length is None else request.content_length
    if request.content_length is not None and length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    share.take(length)
    try:
        # A small body usually arrives with its headers; it needs no time-out.
        has_come = request.content.is_eof()
        async with nullcontext() if has_come else asyncio.timeout(request.config_dict[BODY_TIMEOUT]):
            is_compressed = http_body.is_compressed(request)
            # The share has room for a large body: small reads would take 4 ms of the event loop for each MiB.
            is_large = request.content_length is not None and length > FREE_BYTES
            with large_reads(request) if is_large else nullcontext():
                raw = await _read_all(request, share, limit, length)
            if is_compressed:
                share.take(len(raw) + min(limit, len(raw) * MAX_DEFLATE_RATIO))
                whole = await share.run(partial(http_body.decompress, raw, limit))
                share.take(len(whole))
                request[COST] += len(whole)
                return whole
            return raw
    except TimeoutError as error:
        raise BodyTimeout("The request's body did not come in time.") from error
    except web.RequestPayloadError as error:
        raise BadRequest(
            "The request's body cannot be decoded as its Content-Encoding or Transfer-Encoding states."
        ) from error


async def _read_all(request: web.Request, share: BodyShare, limit: int, length: int) -> bytes:
    """Return the body as it was sent. length: the bytes that the share holds."""
    # Its value is no copy: one of 8 MiB would take 8 ms of the event loop.
    raw, size, chunks = BytesIO(), 0, ChunkReader(request)
    while piece := await chunks.next():
        size += raw.write(piece)
        request[COST] = max(request.get(COST, 0), size)
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(limit, size)
        if size > length:
            length = size + STEP_BYTES
            share.take(length)
    return raw.getvalue()


async def read_body(request: web.Request, kind: type[T], owner: str = OPERATOR) -> T:
    """Return the body as `kind`, a struct that forbids unknown fields. An empty body counts as `{}`.

    owner: see `read_raw`. Raises BadRequest, also for a text that `check_text` refuses.
    """
    raw = await read_raw(request, owner) or b"{}"
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("The body is not valid JSON.") from error
    _check_texts(msgspec.to_builtins(body), "")
    return body


def read_fields(fields: Any, kind: type[T]) -> T:
    """Convert the fields of a form or query to `kind`. Raises BadRequest like `read_body`."""
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from error
    _check_texts(msgspec.to_builtins(body), "")
    return body


def is_fit(character: str) -> bool:
    """Return whether texts of bodies and queries may contain a character."""
    return unicodedata.category(character) not in UNFIT and character not in REVERSING


def check_text(text: str, name: str) -> None:
    """Raise BadRequest for a text that has several lines or that a database cannot store."""
    if not all(map(is_fit, text)):
        raise BadRequest(f"{name}: expected a text without control characters.", param=name)


def _check_texts(value: Any, place: str) -> None:
    if isinstance(value, str):
        check_text(value, place)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_texts(item, f"{place}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key, place)
            _check_texts(item, _within(place or None, key))


def read_moment(request: web.Request, name: str) -> datetime | None:
    """Return a time of the query like `parse_moment`."""
    return parse_moment(request.query, name)


def parse_moment(query: Mapping[str, str], name: str) -> datetime | None:
    """Return a query parameter in ISO 8601 or Unix seconds as a UTC time, None if it is absent or empty.

    The default zone is UTC. Raises BadRequest.
    """
    given = query.get(name)
    if not given:
        return None
    try:
        if re.fullmatch(r"\d{1,11}(\.\d+)?", given):
            moment = datetime.fromtimestamp(float(given), UTC)
        else:
            # An unescaped + in a query is decoded as a space.
            moment = datetime.fromisoformat(given.replace(" ", "+"))
        moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"Expected '{name}' as ISO 8601 or Unix seconds.", param=name) from error
    check_year(moment, name)
    return moment


def check_year(moment: datetime | None, param: str) -> None:
    """Raise BadRequest for a year at an end of the calendar, where conversions between time zones fail."""
    if moment is not None and moment.year not in YEARS:
        raise BadRequest(f"{param}: expected a year from {YEARS[0]} to {YEARS[-1]}.", param=param)


def parse_period(query: Mapping[str, str]) -> tuple[datetime | None, datetime | None]:
    """Return `since` and `until`, None for each that is absent or empty. Raises BadRequest if `since` is later."""
    since, until = parse_moment(query, "since"), parse_moment(query, "until")
    if since is not None and until is not None and since > until:
        raise BadRequest("'since' must not be after 'until'.", param="since")
    return since, until


def read_flag(request: web.Request, name: str) -> bool:
    """Return a query parameter that is `true`, `false` or absent, which means false. Raises BadRequest."""
    given = request.query.get(name, "false")
    if given not in ("true", "false"):
        raise BadRequest(f"{name}: expected true or false.", param=name)
    return given == "true"


def read_limit(request: web.Request, default: int, most: int) -> int:
    """Return `?limit=`, the size of a page. Raises BadRequest."""
    given = request.query.get("limit", str(default))
    if not (re.fullmatch("[0-9]{1,10}", given) and 1 <= int(given) <= most):
        raise BadRequest(f"limit: expected a number from 1 to {most}.", param="limit")
    return int(given)


def read_number(request: web.Request, name: str, least: int, most: int) -> int | None:
    """Return a query parameter that is a number; None if it is absent or empty. Raises BadRequest."""
    given = request.query.get(name, "").strip()
    if not given:
        return None
    if not (re.fullmatch("[0-9]{1,10}", given) and least <= int(given) <= most):
        raise BadRequest(f"{name}: expected a number from {least} to {most}.", param=name)
    return int(given)


def parse_text(query: Mapping[str, str], name: str) -> str | None:
    """Return a text of a query without the spaces around it; None if it is absent or empty. Raises BadRequest.

    It may contain what texts of a body may, so that every stored text can be searched for.
    """
    given = query.get(name, "").strip()
    if len(given) > MAX_TEXT or not all(map(is_fit, given)):
        raise BadRequest(f"{name}: expected at most {MAX_TEXT} characters without control characters.", param=name)
    return given or None


def read_sort(request: web.Request, names: Sequence[Name], default: str, parameter: str = "sort") -> tuple[Name, bool]:
    """Return `?sort=`, and whether a `-` before it asks for descending order. Raises BadRequest."""
    given = request.query.get(parameter) or default
    for name in names:
        if given.removeprefix("-") == name:
            return name, given.startswith("-")
    message = f"{parameter}: expected one of {', '.join(names)}, with a '-' to begin with the last."
    raise BadRequest(message, param=parameter)


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def encoded(entry: T) -> T:
    """Return an entry of a long list as JSON. Encoding the entries in pieces leaves turns to the event loop.

    The declared type is the entry's, so that a struct with a list of entries accepts it.
    """
    return cast(T, msgspec.Raw(msgspec.json.encode(entry)))


def _explain(message: str, body: type) -> BadRequest:
    """Return msgspec's "Expected `int`, got `str` - at `$.weight`" as an error in JSON's terms, the field as param."""
    what, _, at = message.partition(" - at `")
    param = at.removeprefix("key` in `").rstrip("`").lstrip("$.") or None
    if missing := re.search(r"missing required field `([^`]{1,64})`", what):
        param, what = _within(param, missing[1]), "is required"
    elif unknown := re.search(r"contains unknown field `([^`]{1,64})`", what):
        param, what = _within(param, unknown[1]), "there is no such field"
    elif limit := re.fullmatch(r"Expected `(\w+)` (of length )?(<=|>=|<|>) (\S+)", what):
        kind, of_length, sign, bound = limit.groups()
        of = f"{BOUND_WORDS[sign]} {bound}"
        what = f"expected {TYPE_WORDS[kind]} of {of}" + (f" {UNITS[kind]}" if of_length else "")
    elif types := re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", what):
        wanted = " or ".join(TYPE_WORDS.get(kind, kind) for kind in types[1].split(" | "))
        what = f"expected {wanted}, got {TYPE_WORDS.get(types[2], types[2])}"
        if (param or "").split(".")[-1] in AMOUNTS:
            what += "; amounts are in micro-units of the currency: 12.50 is 12500000"
    elif what.startswith("Invalid enum value"):
        what += choices(body, param or "")
    return BadRequest(f"{param or 'the body'}: {what.replace('`', chr(39))}.", param=param)


def _within(place: str | None, field: str) -> str:
    return field if place is None else f"{place}.{field}"
