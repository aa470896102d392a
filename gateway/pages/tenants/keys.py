"""Pages of keys: all keys, and the forms that create, rotate and revoke one. A secret is shown once."""

from functools import partial
from typing import cast
from urllib.parse import quote

from aiohttp import web

from gateway.access.roles import ADMIN_ROLES, DEFAULT_SCOPES, TENANT_SCOPES
from gateway.api.key_manager import KeyChanges, KeyManager, NewAdminKey
from gateway.api.page_guard import FORM
from gateway.api.requests.fields import read_fields
from gateway.api.requests.key_filter import read_key_filter
from gateway.api.scopes import ACTOR
from gateway.components import Records
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.edits import again_if_changed
from gateway.pages.widgets.examples import KeyExamples
from gateway.pages.widgets.form_checks import form_errors, is_confirmed
from gateway.pages.widgets.key_forms import (
    DONE,
    edit_key,
    key_form,
    new_key_id,
    read_expiry,
    read_grace,
    read_new_key,
    revoke_form,
    rotate_form,
)
from gateway.pages.widgets.key_rows import CSV_COLUMNS, KEY_COLUMNS, key_context
from gateway.pages.widgets.tables import read_page, read_table, send_csv
from gateway.records.keys.keys import KEY_ID, ApiKey, unknown_key
from gateway.records.keys.list import Sort

LIST = "/admin/keys"
LIST_QUERY = ("tenant", "state", "q", "sort", "page", "format", "done")


class KeyPages:
    """Pages of keys."""

    def __init__(self, frame: Frame, records: Records, manager: KeyManager, examples: KeyExamples) -> None:
        self._frame = frame
        self._records = records
        self._manager = manager
        self._examples = examples

    async def list(self, request: web.Request) -> web.StreamResponse:
        criteria = read_key_filter(request)
        table = read_table(request, "keys", KEY_COLUMNS, "-created_at")
        read = partial(self._records.key_lists.page, criteria, sort=cast(Sort, table.sort), descending=table.descending)
        if request.query.get("format") == "csv":
            return await send_csv(request, "keys", CSV_COLUMNS, read)
        await read_page(table, read)
        done = DONE.get(request.query.get("done", ""))
        return await self._frame.render_long(request, "keys.html", title="Keys", done=done, **key_context(table))

    async def new(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a tenant's new key; with a form, create it and show its secret."""
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            with form_errors(errors):
                key, clear = await self._manager.create(
                    tenant, read_new_key(form), request[ACTOR], key_id=new_key_id(request)
                )
                return await self._shown(request, key, clear)
        chosen = form.getall("scopes", []) if form is not None else DEFAULT_SCOPES
        return key_form(
            self._frame,
            request,
            errors,
            title=f"New key of {tenant.name}",
            owner=tenant.name,
            cancel=f"/admin/tenants/{tenant.name}?tab=keys",
            scopes=[(scope, scope in chosen) for scope in sorted(TENANT_SCOPES)],
        )

    @again_if_changed
    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a key's label and limits; with a form, change them."""
        key = await self._key(request)

        async def save(changes: KeyChanges) -> None:
            await self._manager.change(key.id, changes, request[ACTOR], seen=key)

        return await edit_key(self._frame, request, key, save, f"{LIST}?done=changed")

    async def new_admin(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a new admin key; with a form, create it and show its secret."""
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            with form_errors(errors):
                fields = {"label": form.get("label", "").strip(), "role": form.get("role", "")}
                fields |= {"expires_at": read_expiry(form.get("expires", ""))}
                given = read_fields(fields, NewAdminKey)
                key, clear = await self._manager.create_admin(given, request[ACTOR], key_id=new_key_id(request))
                return await self._shown(request, key, clear)
        roles = [(role, role) for role in ADMIN_ROLES]
        return key_form(self._frame, request, errors, title="New admin key", cancel=LIST, roles=roles)

    async def rotate(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a rotation; with a form, rotate the key and show the new secret."""
        key = await self._key(request)
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            with form_errors(errors):
                new, clear = await self._manager.rotate(
                    key.id, read_grace(form), request[ACTOR], new_id=new_key_id(request)
                )
                return await self._shown(request, new, clear)
        return rotate_form(self._frame, request, key, errors)

    async def revoke(self, request: web.Request) -> web.StreamResponse:
        key = await self._key(request)
        name = key.label or key.id
        if is_confirmed(request, name):
            await self._manager.revoke(key.id, request[ACTOR])
            raise web.HTTPSeeOther(f"{LIST}?done=revoked")
        whose = f"of {key.tenant.name}" if key.tenant else "of operators"
        text = f"The key {key.id} {whose} is refused from now on, and its running streams end."
        return revoke_form(self._frame, request, name, text, LIST)

    async def _key(self, request: web.Request) -> ApiKey:
        key_id = request.match_info["id"]
        key = await self._records.keys.find(key_id) if KEY_ID.fullmatch(key_id) else None
        if key is None:
            raise unknown_key(key_id)
        return key

    async def _shown(self, request: web.Request, key: ApiKey, clear: str) -> web.Response:
        back = f"/admin/tenants/{quote(key.tenant.name)}?tab=keys" if key.tenant else LIST
        context = await self._examples.context(request, key, clear)
        return self._frame.secret(request, "key_made.html", title="New key", key=key, clear=clear, back=back, **context)
