"""Routes of engines, the quarantine and base models; a part of the table in `gateway/api/routes.py`."""

from collections.abc import Mapping
from functools import partial

from gateway.api.admin.bases import AdminBases, BaseChanges, BaseList, NewBase, ShownBase
from gateway.api.admin.engines import AdminEngines, EngineList, EngineUrl, ShownEngine, UnknownEngine
from gateway.api.admin.fleet_views import EngineHistoryAnswer, FleetViews, QueueHistoryAnswer, ResidencyAnswer
from gateway.api.admin.quarantine import AdminQuarantine, EndedQuarantine, QuarantineList
from gateway.api.route import Route
from gateway.api.route_groups import FORCE

_admin = partial(Route, scope="admin", query=())

FLEET_ROUTES: Mapping[type, tuple[Route, ...]] = {
    AdminEngines: (
        _admin(
            "GET", "/admin/api/engines", AdminEngines.list, "List the engines and their health.", response=EngineList
        ),
        _admin(
            "POST",
            "/admin/api/engines/drain",
            AdminEngines.drain,
            "Stop new requests to an engine.",
            request=EngineUrl,
            response=ShownEngine,
        ),
        _admin(
            "POST",
            "/admin/api/engines/resume",
            AdminEngines.resume,
            "Send new requests to a drained engine again.",
            request=EngineUrl,
            response=(ShownEngine, UnknownEngine),
        ),
    ),
    AdminQuarantine: (
        _admin(
            "GET",
            "/admin/api/quarantine",
            AdminQuarantine.list,
            "List requests, adapters and tenants in quarantine.",
            query=("tenant", "limit"),
            response=QuarantineList,
        ),
        _admin(
            "DELETE",
            "/admin/api/tenants/{tenant}/quarantine",
            AdminQuarantine.end,
            "End a tenant's quarantine.",
            response=EndedQuarantine,
        ),
    ),
    FleetViews: (
        _admin(
            "GET",
            "/admin/api/engines/history",
            FleetViews.history,
            "Return an engine's last hour.",
            query=("url",),
            response=(EngineHistoryAnswer, QueueHistoryAnswer),
        ),
        _admin(
            "GET",
            "/admin/api/residency",
            FleetViews.residency,
            "Return where adapters are resident.",
            query=("q", "limit", "page"),
            response=ResidencyAnswer,
        ),
    ),
    AdminBases: (
        _admin(
            "GET",
            "/admin/api/bases",
            AdminBases.list,
            "List base models with their engines and adapters.",
            query=("limit", "after"),
            response=BaseList,
        ),
        _admin(
            "POST",
            "/admin/api/bases",
            AdminBases.add,
            "Add a base model.",
            request=NewBase,
            response=ShownBase,
            statuses=(201,),
        ),
        _admin(
            "PATCH",
            "/admin/api/bases/{name:.+}",
            AdminBases.change,
            "Drain, resume, retire or replace a base model.",
            query=FORCE,
            request=BaseChanges,
            response=ShownBase,
        ),
    ),
}
