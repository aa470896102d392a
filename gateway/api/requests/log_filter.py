"""Query parameters of the request log, for its JSON routes, its pages and its exports."""

from aiohttp import web

from gateway.api.requests.fields import parse_period, parse_text, read_number
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
# A day, in ms.
MAX_LATENCY_MS = 86_400_000


def read_log_filter(request: web.Request) -> LogFilter:
    """Return the filter of the query. A parameter without a value counts as absent. Raises BadRequest."""
    since, until = parse_period(request.query)
    return LogFilter(
        tenant=parse_text(request.query, "tenant"),
        key_id=parse_text(request.query, "key"),
        model=parse_text(request.query, "model"),
        version=read_number(request, "version", 0, MAX_VERSION),
        engine=parse_text(request.query, "engine"),
        statuses=_read_statuses(request),
        code=parse_text(request.query, "code"),
        limit_name=parse_text(request.query, "limit_name"),
        end_user=parse_text(request.query, "end_user"),
        min_latency_ms=read_number(request, "min_latency_ms", 0, MAX_LATENCY_MS),
        since=since,
        until=until,
    )


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
