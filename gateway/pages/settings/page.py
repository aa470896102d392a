"""Page of settings: status of the gateway, effective settings, migrations, admin keys, and sessions of browsers."""

from functools import partial
from typing import Any, cast

from aiohttp import web

from gateway.access.sessions import VISITOR, Sessions
from gateway.api.deployment_status import StatusReader
from gateway.api.requests.fields import parse_text, read_number
from gateway.api.scopes import ACTOR
from gateway.api.shown_settings import ShownSetting
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.form_checks import is_confirmed, typing_error
from gateway.pages.widgets.key_rows import CSV_COLUMNS as KEY_CSV_COLUMNS
from gateway.pages.widgets.key_rows import KEY_COLUMNS, key_context
from gateway.pages.widgets.tables import Column, Table, csv_response, fill, read_page, read_table, send_csv
from gateway.pages.widgets.tabs import show_tab
from gateway.records.keys.list import KeyFilter, KeyLists, Sort
from gateway.records.keys.session_list import SessionFilter, SessionLists
from gateway.records.keys.session_list import Sort as SessionSort
from gateway.records.usage.rejected import RejectedUsage

SETTINGS = "/admin/settings"
SESSIONS = f"{SETTINGS}?tab=sessions"
QUERY = ("tab", "q", "changed", "tenant", "sort", "page", "format", "done")
SETTING_COLUMNS = (
    Column("name", "Setting"),
    Column("value", "Value", sortable=False),
    Column("default", "Default", sortable=False),
)
MIGRATION_COLUMNS = (
    Column("revision", "Revision"),
    Column("title", "Change", sortable=False),
    Column("state", "State", sortable=False, value=lambda row: "applied" if row[1] else "not applied"),
)
SESSION_COLUMNS = (
    Column("label", "Person"),
    Column("role", "Role"),
    Column("tenant", "Tenant"),
    Column("address", "Address", sortable=False),
    Column("created_at", "Logged in"),
    Column("last_used_at", "Last use", hint="Exact to a minute"),
    Column("expires_at", "Ends"),
)
REJECTED_COLUMNS = (
    Column("rejected_at", "Time", sortable=False),
    Column("reason", "Reason", sortable=False),
    Column("event", "Usage event", sortable=False),
)


class SettingPages:
    """Pages of settings. shown: the effective settings, which do not change while the process runs."""

    def __init__(
        self,
        *,
        frame: Frame,
        shown: list[ShownSetting],
        status_reader: StatusReader,
        keys: KeyLists,
        sessions: Sessions,
        session_lists: SessionLists,
        rejected: RejectedUsage,
    ) -> None:
        self._frame = frame
        self._shown = shown
        self._status_reader = status_reader
        self._keys = keys
        self._sessions = sessions
        self._session_lists = session_lists
        self._rejected = rejected

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Return a tab of the page. Only those of keys, sessions and rejected usage need the database."""
        return await show_tab(
            request,
            self._frame,
            "settings.html",
            {
                "state": ("State", self._state),
                "settings": ("Settings", self._settings),
                "migrations": ("Migrations", self._migrations),
                "keys": ("Admin keys", self._admin_keys),
                "sessions": ("Sessions", self._session_part),
                "rejected": ("Rejected usage", self._rejected_part),
            },
            title="Settings",
            done="The session is ended." if request.query.get("done") == "ended" else None,
        )

    async def end_session(self, request: web.Request) -> web.StreamResponse:
        """Ask whether to end a session; with a confirmed form, end it at once. It may be the visitor's own."""
        session = await self._session_lists.get(request.match_info["id"])
        # A provider of OpenID Connect chooses its people's labels.
        name = session.label.strip() or session.subject
        if is_confirmed(request, name):
            await self._sessions.close(session.id, request[ACTOR])
            raise web.HTTPSeeOther(f"{SESSIONS}&done=ended")
        return self._frame.confirm(
            request,
            title="End a session",
            name=name,
            text=f"The browser of {name} ({session.role.replace('_', ' ')}) is logged out at once.",
            button="End the session",
            cancel=SESSIONS,
            error=typing_error(request, name),
        )

    async def _state(self, _: web.Request) -> dict[str, Any]:
        return {"deployment": await self._status_reader.read()}

    async def _settings(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        words = (parse_text(request.query, "q") or "").lower()
        only_changed = request.query.get("changed") == "true"
        found = [each for each in self._shown if words in each.name.lower() and (each.is_set or not only_changed)]
        table = read_table(request, "settings", SETTING_COLUMNS, "name")
        if request.query.get("format") == "csv":
            return csv_response("settings", SETTING_COLUMNS, found)
        return {"table": fill(table, found)}

    async def _migrations(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        status = await self._status_reader.read()
        # They are applied in the order of their revisions, which are numbers.
        rows = [(each, status.revision is not None and each.revision <= status.revision)
                for each in status.migrations]  # fmt: skip
        columns = (MIGRATION_COLUMNS[0]._replace(value=lambda row: row[0].revision),
                   MIGRATION_COLUMNS[1]._replace(value=lambda row: row[0].title), MIGRATION_COLUMNS[2])  # fmt: skip
        if request.query.get("format") == "csv":
            return csv_response("migrations", columns, rows)
        return {"table": fill(read_table(request, "migrations", columns, "-revision"), rows), "deployment": status}

    async def _admin_keys(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        table = read_table(request, "keys", KEY_COLUMNS, "-created_at")
        criteria = KeyFilter(tenant="", q=parse_text(request.query, "q"))
        read = partial(self._keys.page, criteria, sort=cast(Sort, table.sort), descending=table.descending)
        if request.query.get("format") == "csv":
            return await send_csv(request, "admin-keys", KEY_CSV_COLUMNS, read)
        return key_context(await read_page(table, read))

    async def _session_part(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        table = read_table(request, "sessions", SESSION_COLUMNS, "-last_used_at")
        criteria = SessionFilter(tenant=parse_text(request.query, "tenant"), q=parse_text(request.query, "q"))
        sort = cast(SessionSort, table.sort)
        read = partial(self._session_lists.page, criteria, sort=sort, descending=table.descending)
        if request.query.get("format") == "csv":
            return await send_csv(request, "sessions", (Column("id", "Id"), *SESSION_COLUMNS), read)
        return {"table": await read_page(table, read), "own": request[VISITOR].session_id}

    async def _rejected_part(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        if request.query.get("format") == "csv":
            columns = (Column("id", "Id"), *REJECTED_COLUMNS)
            return await send_csv(request, "rejected-usage", columns, self._rejected.page)
        page = read_number(request, "page", 1, 1_000_000) or 1
        return {"table": await read_page(Table("rejected", REJECTED_COLUMNS, page=page), self._rejected.page)}
