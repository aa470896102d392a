"""`/console/keys`: the tenant's own keys, for people who may manage them. The rules are those of `/v1/keys`."""

from collections.abc import Sequence
from typing import cast

import msgspec
from aiohttp import web

from gateway.access.roles import DEFAULT_SCOPES
from gateway.api.adapters.caller import tenants_caller
from gateway.api.key_manager import KeyChanges, KeyManager
from gateway.api.page_guard import FORM
from gateway.api.requests.key_filter import read_key_filter
from gateway.api.scopes import PRINCIPAL
from gateway.pages.console.access import Console, ConsolePages, needs
from gateway.pages.widgets.edits import again_if_changed
from gateway.pages.widgets.examples import KeyExamples
from gateway.pages.widgets.form_checks import form_errors, is_confirmed
from gateway.pages.widgets.key_forms import (
    DONE,
    edit_key,
    key_form,
    new_key_id,
    read_grace,
    read_new_key,
    revoke_form,
    rotate_form,
)
from gateway.pages.widgets.key_rows import CSV_COLUMNS, KEY_COLUMNS, key_context
from gateway.pages.widgets.tables import read_page, read_table, send_csv
from gateway.records.keys.keys import KEY_ID, ApiKey, unknown_key
from gateway.records.keys.list import Sort

LIST = "/console/keys"
LIST_QUERY = ("state", "q", "sort", "page", "format", "done")


class ConsoleKeys(ConsolePages):
    """Pages of the tenant's keys. Changes count against its limit of changes, which changes of adapters share."""

    def __init__(self, console: Console, manager: KeyManager, examples: KeyExamples) -> None:
        super().__init__(console)
        self._manager = manager
        self._examples = examples

    @needs("keys")
    async def list(self, request: web.Request) -> web.StreamResponse:
        tenant = request[PRINCIPAL].tenant
        criteria = msgspec.structs.replace(read_key_filter(request), tenant=tenant.name)
        table = read_table(request, "keys", [each for each in KEY_COLUMNS if each.key != "tenant"], "-created_at")

        async def read(limit: int, offset: int) -> tuple[Sequence[ApiKey], int]:
            async with self.console.reads.place(tenant.id):
                return await self.console.records.key_lists.page(
                    criteria, sort=cast(Sort, table.sort), descending=table.descending, limit=limit, offset=offset
                )

        if request.query.get("format") == "csv":
            return await send_csv(request, "keys", [each for each in CSV_COLUMNS if each.key != "tenant"], read)
        await read_page(table, read)
        done = DONE.get(request.query.get("done", ""))
        return await self.console.frame.render_long(request, "keys.html", title="Keys", done=done, **key_context(table))

    @needs("keys")
    async def new(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a new key; with a form, create it and show its secret."""
        principal = request[PRINCIPAL]
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            with form_errors(errors):
                given, caller = read_new_key(form), tenants_caller(request)
                await caller.count_change(request, self.console.quota)
                key, clear = await self._manager.create(
                    principal.tenant, given, caller.actor, principal, key_id=new_key_id(request)
                )
                return await self._shown(request, key, clear)
        chosen = form.getall("scopes", []) if form is not None else DEFAULT_SCOPES
        scopes = [(scope, scope in chosen) for scope in sorted(principal.scopes)]
        return key_form(self.console.frame, request, errors, title="New key", cancel=LIST, scopes=scopes)

    @needs("keys")
    @again_if_changed
    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a key's label and limits; with a form, change them."""
        key, principal = await self._key(request), request[PRINCIPAL]

        async def save(changes: KeyChanges) -> None:
            caller = tenants_caller(request)
            await caller.count_change(request, self.console.quota)
            await self._manager.change(key.id, changes, caller.actor, principal, seen=key)

        return await edit_key(self.console.frame, request, key, save, f"{LIST}?done=changed")

    @needs("keys")
    async def rotate(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a rotation; with a form, rotate the key and show the new secret."""
        key, principal = await self._key(request), request[PRINCIPAL]
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            with form_errors(errors):
                seconds, caller = read_grace(form), tenants_caller(request)
                await caller.count_change(request, self.console.quota)
                new, clear = await self._manager.rotate(
                    key.id, seconds, caller.actor, principal, new_id=new_key_id(request)
                )
                return await self._shown(request, new, clear)
        return rotate_form(self.console.frame, request, key, errors)

    @needs("keys")
    async def revoke(self, request: web.Request) -> web.StreamResponse:
        key, principal = await self._key(request), request[PRINCIPAL]
        name = key.label or key.id
        if is_confirmed(request, name):
            caller = tenants_caller(request)
            await caller.count_change(request, self.console.quota)
            await self._manager.revoke(key.id, caller.actor, principal)
            raise web.HTTPSeeOther(f"{LIST}?done=revoked")
        own = " You are logged in with this key, so you are logged out." if key.id == principal.key_id else ""
        text = f"The key {key.id} is refused from now on, and its running streams end.{own}"
        return revoke_form(self.console.frame, request, name, text, LIST)

    async def _key(self, request: web.Request) -> ApiKey:
        """Return the key of the path. Raises RecordNotFound, with the same text for another tenant's key."""
        key_id = request.match_info["id"]
        key = await self.console.records.keys.find(key_id) if KEY_ID.fullmatch(key_id) else None
        if key is None or key.tenant is None or key.tenant.id != request[PRINCIPAL].tenant.id:
            raise unknown_key(key_id)
        return key

    async def _shown(self, request: web.Request, key: ApiKey, clear: str) -> web.Response:
        context = await self._examples.context(request, key, clear)
        return self.console.frame.secret(
            request, "key_made.html", title="New key", key=key, clear=clear, back=LIST, **context
        )
