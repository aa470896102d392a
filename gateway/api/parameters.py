"""Types and descriptions of the query parameters of the API, for its OpenAPI description.

A name means the same on every route, except for those of OF_ROUTE.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gateway.api.admin.adapters import DEFAULT_ROWS as ADAPTER_ROWS
from gateway.api.reports.usage_export import FORMATS
from gateway.records.activity import report as activity_report
from gateway.records.adapters import list as adapter_list
from gateway.records.keys import list as key_list
from gateway.records.periods import STEPS
from gateway.records.requests import refusal_report
from gateway.records.requests.log import STATUSES
from gateway.records.tenants import list as tenant_list
from gateway.records.usage import report as usage_report


class Parameter(NamedTuple):
    """A query parameter. schema: its JSON Schema."""

    schema: dict[str, Any]
    text: str


TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean", "default": False}
MOMENT: dict[str, Any] = {
    "oneOf": [{"type": "string", "format": "date-time"}, {"type": "number", "description": "Unix seconds."}]
}


def _number(least: int, most: int | None = None, default: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer", "minimum": least}
    if most is not None:
        found["maximum"] = most
    return found if default is None else found | {"default": default}


def _choice(names: Sequence[Any], default: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string", "enum": list(names)}
    return found if default is None else found | {"default": default}


def _several(names: Sequence[str]) -> dict[str, Any]:
    """Return the schema of names that are joined by commas."""
    one = "|".join(names)
    return {"type": "string", "pattern": f"^({one})(,({one}))*$"}


def _sorts(names: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an order, descending with a "-" in front."""
    return _choice([f"{sign}{name}" for name in names for sign in ("", "-")])


PARAMETERS = {
    "action": Parameter(TEXT, "An action such as `key.revoke`, or `key` for all changes of keys."),
    "actor": Parameter(TEXT, "Id of the key that made the change."),
    "after": Parameter(TEXT, "Position after which the page begins, from the answer with the previous page."),
    "all": Parameter(FLAG, "Whether to list the keys of all tenants and operators."),
    "base": Parameter(TEXT, "Name of the adapter's base model; by default, the one that fits."),
    "code": Parameter(TEXT, "An error code, such as `rate_limit_exceeded`."),
    "dry_run": Parameter(FLAG, "Whether to change nothing and return what would change."),
    "end_user": Parameter(TEXT, "The requests' `user`."),
    "engine": Parameter({"type": "string", "format": "uri"}, "URL of an engine, as `GET /admin/api/engines` shows it."),
    "force": Parameter(FLAG, "Whether to accept names that do not exist yet, or the removal of one that is in use."),
    "format": Parameter(_choice(list(FORMATS)), "Format of the file."),
    "group_by": Parameter(_several(usage_report.GROUPS), "Groups of the sums, comma separated."),
    "idle_days": Parameter(_number(1, 9999), "Tenants created at least this number of days ago, no key used since."),
    "key": Parameter(TEXT, "Id of a key."),
    "limit": Parameter(_number(1, 1000), "Maximum number of entries in the answer."),
    "limit_name": Parameter(TEXT, "Name of a limit, such as `tokens_per_minute`."),
    "min_latency_ms": Parameter(_number(0), "Requests that took at least this number of milliseconds."),
    "model": Parameter(TEXT, "Name of a model."),
    "name": Parameter(TEXT, "Name of the adapter."),
    "not_action": Parameter(TEXT, "Actions to leave out, comma separated."),
    "offset": Parameter(_number(0), "Number of bytes before the part."),
    "order": Parameter(_choice(("asc", "desc")), "Direction of the order."),
    "over_budget": Parameter({"type": "number", "minimum": 0}, "Tenants that spent this part of their budget."),
    "page": Parameter(_number(1, 1_000_000, 1), "Number of the page."),
    "plan": Parameter(TEXT, "Name of a plan; empty: tenants without a plan."),
    "q": Parameter(TEXT, "Part of a name, an id, a label or a digest."),
    "rank": Parameter(_number(1), "Rank of the adapter."),
    "sha256": Parameter({"type": "string", "pattern": "^[0-9a-f]{64}$"}, "SHA-256 of the content, in hexadecimal."),
    "since": Parameter(MOMENT, "Start of the period; without a zone in UTC."),
    "size": Parameter(_number(1), "Size of the archive in bytes."),
    "source": Parameter({"type": "string", "format": "uri"}, "Place of the adapter, such as `hf://org/repo`."),
    "status": Parameter(_several(("failed", *STATUSES)), "Statuses of requests, comma separated."),
    "step": Parameter({"type": "integer", "enum": list(STEPS)}, "Seconds between the points of the curves."),
    "strict": Parameter(FLAG, "Whether a degraded gateway counts as not ready."),
    "suspended": Parameter({"type": "boolean"}, "Whether to list suspended tenants, or all others."),
    "tag": Parameter(TEXT, "A tag of the tenant."),
    "tenant": Parameter(TEXT, "Name of a tenant."),
    "type": Parameter(TEXT, "Type of the events, such as `engine.down`, or `engine` for all of a kind."),
    "until": Parameter(MOMENT, "End of the period (exclusive); by default now."),
    "unused": Parameter(FLAG, "Whether to list only adapters without a request in the last 30 days."),
    "url": Parameter({"type": "string", "format": "uri"}, "URL of an engine; without it, the queue's history."),
    "version": Parameter(_number(0), "Version of the model."),
}
REFUSED_STATUS = {"type": "string", "pattern": "^([0-9]{1,3}|all)$", "default": str(refusal_report.LIMITED)}
OF_ROUTE = {
    ("/admin/api/activity", "group_by"): Parameter(_choice(activity_report.GROUPS), "Groups of the sums and curves."),
    ("/admin/api/activity", "limit"): Parameter(_number(1, activity_report.MAX_GROUPS, 8), "Maximum number of groups."),
    ("/admin/api/activity", "order"): Parameter(_choice(activity_report.ORDERS, "requests"), "Measure of the order."),
    ("/admin/api/adapters", "base"): Parameter(TEXT, "Digest of the base model on which the adapter was probed."),
    ("/admin/api/adapters", "idle_days"): Parameter(
        _number(1, 9999), "Adapters that have existed for this number of days without a request."
    ),
    ("/admin/api/adapters", "limit"): Parameter(
        _number(1, adapter_list.MAX_PAGE, ADAPTER_ROWS), "Maximum number of adapters in the answer."
    ),
    ("/admin/api/adapters", "sort"): Parameter(_sorts(adapter_list.SORTS), "Order of the adapters."),
    ("/admin/api/adapters", "state"): Parameter(_choice(adapter_list.STATES), "State of the newest version."),
    ("/admin/api/keys", "sort"): Parameter(_sorts(key_list.SORTS), "Order of the keys."),
    ("/admin/api/keys", "state"): Parameter(_choice(key_list.STATES), "State of the keys."),
    ("/admin/api/refusals", "group_by"): Parameter(_choice(refusal_report.GROUPS, "limit"), "Groups of the curves."),
    ("/admin/api/refusals", "status"): Parameter(REFUSED_STATUS, "An HTTP status, or `all`."),
    ("/admin/api/tenants", "sort"): Parameter(_choice(tenant_list.SORTS, "name"), "Order of the tenants."),
}


def find_parameter(path: str, name: str) -> Parameter | None:
    """Return the parameter of a route; None for the parameters of pages, which are not a part of the API."""
    return OF_ROUTE.get((path, name)) or PARAMETERS.get(name)
