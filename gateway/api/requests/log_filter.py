"""Query parameters of the request log, for its JSON routes, its pages and its exports."""

import re
from datetime import datetime

from aiohttp import web

from gateway.api.requests.fields import read_moment
from gateway.errors import BadRequest
from gateway.records.requests.log import STATUSES, LogFilter
from wire.model_names import MAX_VERSION

# Parameters of a filter.
FILTERS = (
    *("tenant", "key", "model", "version", "engine", "status", "code", "limit_name", "end_user"),
    *("since", "until", "min_latency_ms"),
)
# Names for several statuses.
STATUS_SETS = {"failed": tuple(status for status in STATUSES if status not in ("ok", "cancelled"))}
# Longest text of a filter; all stored values are shorter. Texts are printable, because databases refuse a NUL.
MAX_CHARS = 256
# A day, in ms.
MAX_LATENCY_MS = 86_400_000


def read_log_filter(request: web.Request) -> LogFilter:
    """Return the filter of the query. A parameter without a value counts as absent. Raises BadRequest."""
    since, until = read_bounds(request)
    return LogFilter(
        tenant=read_text(request, "tenant"),
        key_id=read_text(request, "key"),
        model=read_text(request, "model"),
        version=_read_number(request, "version", MAX_VERSION),
        engine=read_text(request, "engine"),
        statuses=_read_statuses(request),
        code=read_text(request, "code"),
        limit_name=read_text(request, "limit_name"),
        end_user=read_text(request, "end_user"),
        min_latency_ms=_read_number(request, "min_latency_ms", MAX_LATENCY_MS),
        since=since,
        until=until,
    )


def read_bounds(request: web.Request) -> tuple[datetime | None, datetime | None]:
    """Return `?since=` and `?until=`, each of which may be empty. Raises BadRequest if `since` is after `until`."""
    since, until = (read_moment(request, name) if request.query.get(name) else None for name in ("since", "until"))
    if since is not None and until is not None and since > until:
        raise BadRequest("since: expected a moment that is not after 'until'.", param="since")
    return since, until


def read_text(request: web.Request, name: str) -> str | None:
    """Return a text of the query, None if it is absent or empty. Raises BadRequest."""
    given = request.query.get(name, "").strip()
    if not (given.isprintable() and len(given) <= MAX_CHARS):
        raise BadRequest(f"{name}: expected at most {MAX_CHARS} printable characters.", param=name)
    return given or None


def _read_number(request: web.Request, name: str, most: int) -> int | None:
    given = request.query.get(name, "").strip()
    if not given:
        return None
    if not (re.fullmatch("[0-9]{1,10}", given) and int(given) <= most):
        raise BadRequest(f"{name}: expected a number from 0 to {most}.", param=name)
    return int(given)


def _read_statuses(request: web.Request) -> tuple[str, ...] | None:
    given = request.query.get("status", "").strip()
    if not given:
        return None
    if given in STATUS_SETS:
        return STATUS_SETS[given]
    found = tuple(given.split(","))
    if not set(found) <= set(STATUSES):
        expected = ", ".join((*STATUS_SETS, *STATUSES))
        raise BadRequest(f"status: expected one or more of {expected}, comma separated.", param="status")
    return found
