"""Pages of keys: all keys, and the forms that create, rotate and revoke one. A secret is shown once."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast
from urllib.parse import quote

from aiohttp import web
from multidict import MultiMapping

from gateway.access.page_guard import FORM
from gateway.access.roles import ADMIN_ROLES, DEFAULT_SCOPES, TENANT_SCOPES
from gateway.access.scopes import ACTOR
from gateway.api.key_desk import KeyDesk, NewAdminKey, NewKey
from gateway.api.requests.fields import read_fields
from gateway.api.requests.key_filter import read_key_filter
from gateway.errors import BadRequest, GatewayError
from gateway.pages.frame.frame import Frame
from gateway.pages.parts.key_rows import CSV_COLUMNS, KEY_COLUMNS, key_context
from gateway.pages.parts.tables import csv_response, read_table, window
from gateway.parts import Records
from gateway.records.keys.keys import KEY_ID, ApiKey, unknown_key
from gateway.records.keys.list import Sort

LIST = "/admin/keys"
LIST_QUERY = ("tenant", "state", "q", "sort", "page", "format", "done")
EXPIRIES = (("", "never"), ("1", "in 1 day"), ("7", "in 7 days"), ("30", "in 30 days"), ("90", "in 90 days"),
            ("365", "in 365 days"))  # fmt: skip
GRACES = (("0", "at once"), ("3600", "after 1 hour"), ("86400", "after 1 day"), ("604800", "after 7 days"))


class KeyPages:
    """Pages of keys."""

    def __init__(self, frame: Frame, records: Records, desk: KeyDesk) -> None:
        self._frame = frame
        self._records = records
        self._desk = desk

    async def list(self, request: web.Request) -> web.StreamResponse:
        which = read_key_filter(request)
        table = read_table(request, "keys", KEY_COLUMNS, "-created_at")
        is_csv = request.query.get("format") == "csv"
        keys, total = await self._records.key_lists.page(
            which, sort=cast(Sort, table.sort), **window(table, is_csv=is_csv)
        )
        if is_csv:
            return csv_response("keys", CSV_COLUMNS, keys)
        table.rows, table.total, table.has_next = keys, total, table.offset + len(keys) < total
        done = "The key is revoked." if request.query.get("done") == "revoked" else None
        return self._frame.render(request, "keys.html", title="Keys", done=done, **key_context(table))

    async def new(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a tenant's new key; with a form, create it and show its secret."""
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            try:
                key, clear = await self._desk.create(tenant, read_new_key(form), request[ACTOR])
            except GatewayError as error:
                errors[error_field(error)] = error.message
            else:
                return self._shown(request, key, clear)
        return self._frame.render(
            request,
            "key_form.html",
            title=f"New key of {tenant.name}",
            status=400 if errors else 200,
            owner=tenant.name,
            cancel=f"/admin/tenants/{tenant.name}?tab=keys",
            scopes=[(scope, scope in (form.getall("scopes", []) if form else DEFAULT_SCOPES)) for scope in SCOPES],
            roles=(),
            expiries=EXPIRIES,
            values=form or {},
            errors=errors,
        )

    async def new_admin(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a new admin key; with a form, create it and show its secret."""
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            try:
                fields = {"label": form.get("label", "").strip(), "role": form.get("role", "")}
                fields |= {"expires_at": _expiry(form.get("expires", ""))}
                key, clear = await self._desk.create_admin(read_fields(fields, NewAdminKey), request[ACTOR])
            except GatewayError as error:
                errors[error.param or ""] = error.message
            else:
                return self._shown(request, key, clear)
        return self._frame.render(
            request,
            "key_form.html",
            title="New admin key",
            status=400 if errors else 200,
            owner=None,
            cancel=LIST,
            scopes=(),
            roles=[(role, role) for role in ADMIN_ROLES],
            expiries=EXPIRIES,
            values=form or {},
            errors=errors,
        )

    async def rotate(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a rotation; with a form, rotate the key and show the new secret."""
        key = await self._key(request)
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            try:
                new, clear = await self._desk.rotate(key.id, read_grace(form), request[ACTOR])
            except GatewayError as error:
                errors[error.param or ""] = error.message
            else:
                return self._shown(request, new, clear)
        return rotate_form(self._frame, request, key, errors)

    async def revoke(self, request: web.Request) -> web.StreamResponse:
        key = await self._key(request)
        form, error = request.get(FORM), None
        name = key.label or key.id
        if form is not None:
            if form.get("typed", "").strip() == name:
                await self._desk.revoke(key.id, request[ACTOR])
                raise web.HTTPSeeOther(f"{LIST}?done=revoked")
            error = f"Type {name} to confirm."
        whose = f"of {key.tenant.name}" if key.tenant else "of operators"
        return self._frame.confirm(
            request,
            title=f"Revoke {name}",
            name=name,
            text=f"The key {key.id} {whose} is refused from now on, and its running streams end.",
            button="Revoke",
            cancel=LIST,
            error=error,
        )

    async def _key(self, request: web.Request) -> ApiKey:
        key_id = request.match_info["id"]
        key = await self._records.keys.find(key_id) if KEY_ID.fullmatch(key_id) else None
        if key is None:
            raise unknown_key(key_id)
        return key

    def _shown(self, request: web.Request, key: ApiKey, clear: str) -> web.Response:
        back = f"/admin/tenants/{quote(key.tenant.name)}?tab=keys" if key.tenant else LIST
        return self._frame.render(request, "key_made.html", title="New key", key=key, clear=clear, back=back)


SCOPES = sorted(TENANT_SCOPES)


def read_new_key(form: MultiMapping[str]) -> NewKey:
    """Return the new key of `templates/key_form.html`. Raises BadRequest."""
    fields: dict[str, Any] = {"label": form.get("label", "").strip(), "scopes": form.getall("scopes", [])}
    models = form.get("allowed_models", "").replace(",", " ").split()
    fields |= {"expires_at": _expiry(form.get("expires", "")), "allowed_models": models or None}
    return read_fields(fields, NewKey)


def read_grace(form: MultiMapping[str]) -> int:
    """Return the seconds of `templates/key_rotate.html`. Raises BadRequest."""
    if form.get("grace", "") not in dict(GRACES):
        raise BadRequest("grace: choose one of the times.", param="grace")
    return int(form["grace"])


def rotate_form(frame: Frame, request: web.Request, key: ApiKey, errors: dict[str, str]) -> web.Response:
    """Return the form of a rotation. errors: texts by field."""
    return frame.render(
        request,
        "key_rotate.html",
        title=f"Rotate {key.label or key.id}",
        status=400 if errors else 200,
        key=key,
        graces=GRACES,
        errors=errors,
    )


def error_field(error: GatewayError) -> str:
    """Return the form's field that an error is about, "" if it is about none."""
    return (error.param or "").split("[")[0]


def _expiry(days: str) -> datetime | None:
    if days not in dict(EXPIRIES):
        raise BadRequest("expires: choose one of the times.", param="expires")
    return datetime.now(UTC) + timedelta(days=int(days)) if days else None
