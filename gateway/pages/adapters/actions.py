"""Actions on an adapter's page: each is a form of the page, and the destructive ones ask for the name first."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

from aiohttp import web

from gateway.api.adapters.use import AdapterUseRoutes
from gateway.api.adapters.versions import AdapterVersions
from gateway.api.golden.checking import GoldenChecks
from gateway.api.page_guard import form_of
from gateway.api.requests.fields import check_year
from gateway.api.scopes import ACTOR
from gateway.api.uploads.validating import Validation
from gateway.errors import AdapterInUse, BadRequest, Forbidden, GatewayError, NoEngine
from gateway.pages.adapters.page import earlier_targets, shown_targets
from gateway.pages.adapters.subject import PageAdapter, find_adapter
from gateway.pages.frame.errors import TEMPORARY
from gateway.pages.frame.frame import Frame
from gateway.quota.quota import Quota
from gateway.records.adapters.aliases import Alias, AliasTarget
from gateway.records.adapters.catalog import Catalog
from gateway.records.tenants.tenants import Tenants
from wire.model_names import MAX_VERSION, version_name

ASK_QUERY = ("act", "version", "alias")
ALIAS_QUERY = ("alias",)
# Number of rows for versions in the form of an alias.
MAX_ROWS = 4
WRONG_NAME = "This is not the name. Type it as it stands above."


class Question(NamedTuple):
    """Page that asks before an action. needs_name: whether the name is typed."""

    title: str
    text: str
    button: str
    needs_name: bool = True


QUESTIONS: Mapping[str, Question] = {
    "retire": Question(
        "Retire a version",
        "Requests that name this version get a 404 from now on; running ones finish. You can make it ready again.",
        "Retire the version",
    ),
    "delete_version": Question(
        "Delete a version",
        "The version and its golden answers are removed for good, and its number is not used again. Running requests "
        "finish, and new ones get a 404.",
        "Delete the version",
    ),
    "delete": Question(
        "Delete an adapter",
        "The name is removed with all its versions, aliases and golden answers. Running requests finish, and new ones "
        "get a 404. Usage stays on record.",
        "Delete the adapter",
    ),
    "delete_alias": Question(
        "Delete an alias", "New requests that name this alias get a 404. Its versions stay.", "Delete the alias"
    ),
    "rollback": Question(
        "Roll an alias back",
        "New requests use the earlier versions at once, at every gateway. Running requests finish with what they have. "
        "Another roll-back goes one state further back.",
        "Roll back",
        needs_name=False,
    ),
}


# Changes of a version by action.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "retire": {"state": "retired"},
    "ready": {"state": "ready"},
    "pin": {"pinned": True},
    "unpin": {"pinned": False},
}


class AdapterActs:
    """Actions of an adapter's page."""

    def __init__(
        self,
        *,
        frame: Frame,
        tenants: Tenants,
        catalog: Catalog,
        quota: Quota,
        validation: Validation,
        checks: GoldenChecks,
        versions: AdapterVersions,
        uses: AdapterUseRoutes,
    ) -> None:
        self._frame = frame
        self._tenants = tenants
        self._catalog = catalog
        self._quota = quota
        self._validation = validation
        self._checks = checks
        self._versions = versions
        self._uses = uses

    async def ask(self, request: web.Request) -> web.Response:
        """Show the page that asks before an action."""
        return await self._ask(request, await self._adapter(request), request.query)

    async def alias_form(self, request: web.Request) -> web.Response:
        """Show the form of an alias: of `?alias=`, or of a new one."""
        adapter = await self._adapter(request)
        return await self._alias_form(request, adapter, request.query.get("alias", ""))

    async def act(self, request: web.Request) -> web.StreamResponse:
        """Run the action of a form and redirect to the adapter's page. An error is shown on the page with the form."""
        adapter, form = await self._adapter(request), form_of(request)
        act = form.get("act", "")
        do: Callable[[web.Request, PageAdapter, Mapping[str, str]], Awaitable[None]] | None = {
            "retire": self._change,
            "ready": self._change,
            "pin": self._change,
            "unpin": self._change,
            "expire": self._change,
            "probe": self._probe,
            "prefetch": self._prefetch,
            "check": self._check,
            "move": self._move,
            "rollback": self._rollback,
            "delete_alias": self._delete_alias,
            "delete_version": self._delete,
            "delete": self._delete,
        }.get(act)
        if do is None:
            raise BadRequest("act: there is no such action.", param="act")
        question = QUESTIONS.get(act)
        if question is not None and question.needs_name and form.get("typed", "") != _name_of(adapter, form):
            return await self._ask(request, adapter, form, WRONG_NAME)
        try:
            await adapter.caller.count_change(request, self._quota)
            await do(request, adapter, form)
        except GatewayError as error:
            if error.status in TEMPORARY:
                raise
            return await self._show_error(request, adapter, form, error)
        if act == "delete":
            return _to(adapter.list)
        kept = {"version": form["version"]} if form.get("version") and act != "delete_version" else {}
        return _to(f"{adapter.home}?{urlencode({'done': act, **kept})}")

    async def _adapter(self, request: web.Request) -> PageAdapter:
        adapter = await find_adapter(request, self._tenants)
        if not adapter.may_change:
            raise Forbidden("Only an operator may change adapters here.", code="role_needed")
        return adapter

    async def _show_error(
        self, request: web.Request, adapter: PageAdapter, form: Mapping[str, str], error: GatewayError
    ) -> web.Response:
        act = form.get("act", "")
        if act in QUESTIONS:
            return await self._ask(request, adapter, form, error.message, force=isinstance(error, AdapterInUse))
        if act == "move":
            return await self._alias_form(request, adapter, form.get("alias", ""), form, error)
        return self._frame.render(
            request,
            "adapter_problem.html",
            title="That did not work",
            status=error.status,
            message=error.message,
            back=adapter.home,
            adapter=adapter,
        )

    async def _ask(
        self,
        request: web.Request,
        adapter: PageAdapter,
        form: Mapping[str, str],
        error: str | None = None,
        *,
        force: bool = False,
    ) -> web.Response:
        """Return the page that asks before an action. force: whether the action must be forced."""
        act = form.get("act", "")
        question = QUESTIONS.get(act)
        if question is None:
            raise BadRequest("act: this action needs no confirmation.", param="act")
        fields = {name: form[name] for name in (*ASK_QUERY, "etag") if form.get(name)}
        if force:
            fields["force"] = "true"
        changes: list[tuple[str, str, str]] = []
        if act == "rollback":
            alias = await self._catalog.aliases.get(adapter.tenant, adapter.name, form.get("alias", ""))
            fields["etag"] = alias.etag
            changes = [await self._rolled_back(adapter, alias)]
        return self._frame.confirm(
            request,
            title=question.title,
            name=_name_of(adapter, form) if question.needs_name else "",
            text=question.text,
            button=f"{question.button} although it is in use" if force else question.button,
            action=f"{adapter.home}/act",
            fields=fields,
            changes=changes,
            cancel=adapter.home,
            error=error,
        )

    async def _rolled_back(self, adapter: PageAdapter, alias: Alias) -> tuple[str, str, str]:
        """Return (alias, its present targets, its targets after the roll-back) as texts."""
        versions = await self._catalog.versions.list(adapter.tenant, adapter.name)
        targets = earlier_targets(alias, {each.version for each in versions if each.is_served})
        then = "nothing: no earlier state has only ready versions" if targets is None else shown_targets(targets)
        return f"{alias.name}:{alias.alias}", shown_targets(alias.targets), then

    async def _alias_form(
        self,
        request: web.Request,
        adapter: PageAdapter,
        alias: str,
        form: Mapping[str, str] | None = None,
        error: GatewayError | None = None,
    ) -> web.Response:
        aliases = await self._catalog.aliases.list(adapter.tenant, adapter.name)
        versions = await self._catalog.versions.list(adapter.tenant, adapter.name)
        found = next((each for each in aliases if each.alias == alias), None)
        now = [] if found is None else [(str(each.version), str(each.weight)) for each in found.targets]
        if form is not None:
            now = [(form.get(f"version_{i}", ""), form.get(f"weight_{i}", "")) for i in range(MAX_ROWS)]
        rows = [*now, *[("", "")] * MAX_ROWS][: 1 if alias == "latest" else max(MAX_ROWS, len(now))]
        ready = [(str(each.version), f"version {each.version}") for each in reversed(versions) if each.is_served]
        return self._frame.render(
            request,
            "adapter_alias.html",
            title=f"Move {adapter.name}:{alias}" if found is not None else "New alias",
            status=200 if error is None else error.status,
            adapter=adapter,
            alias=found,
            name=alias,
            rows=rows,
            options=[("", "–"), *ready],
            error=None if error is None else error.message,
        )

    async def _change(self, request: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        act = form["act"]
        if act == "expire":
            values: dict[str, Any] = {"expires_at": _moment(form.get("expires_at", ""))}
        else:
            values = dict(CHANGES[act])
        if "pinned" in values and not adapter.is_operators:
            raise Forbidden("pinned: only an operator may pin versions.", param="pinned")
        force = form.get("force") == "true"
        change = self._catalog.versions.change
        await change(adapter.tenant, adapter.name, _version(form), values, request[ACTOR], force=force)

    async def _probe(self, _: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        await self._validation.verify(adapter.tenant, adapter.name, _version(form))

    async def _prefetch(self, _: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        if not adapter.is_operators:
            raise Forbidden("Only an operator may choose an engine.")
        await self._uses.load(adapter.tenant, adapter.name, _version(form), form.get("engine", ""))

    async def _check(self, _: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        payer, number = adapter.caller.principal, _version(form)
        if payer is not None:
            raise Forbidden("Check your golden answers with POST /v1/adapters/.../golden/check; your key pays for it.")
        engines = await self._checks.engines(adapter.tenant, adapter.name, number)
        if not engines:
            raise NoEngine
        for engine in engines:
            await self._checks.check(adapter.tenant, adapter.name, number, engine)

    async def _move(self, request: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        targets = [_target(form, i) for i in range(MAX_ROWS) if form.get(f"version_{i}")]
        alias, etag = form.get("alias", "").strip(), form.get("etag") or None
        await self._catalog.aliases.move(adapter.tenant, adapter.name, alias, targets, request[ACTOR], etag)

    async def _rollback(self, request: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        alias, etag = form.get("alias", ""), form.get("etag") or None
        await self._catalog.aliases.rollback(adapter.tenant, adapter.name, alias, request[ACTOR], etag)

    async def _delete_alias(self, request: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        await self._catalog.aliases.delete(adapter.tenant, adapter.name, form.get("alias", ""), request[ACTOR])

    async def _delete(self, request: web.Request, adapter: PageAdapter, form: Mapping[str, str]) -> None:
        force = form.get("force") == "true"
        number = _version(form) if form["act"] == "delete_version" else None
        running = set() if force else await self._versions.running(adapter.tenant, adapter.name)
        delete = self._catalog.delete
        await delete(adapter.tenant, adapter.name, request[ACTOR], number, running=running, force=force)


def _name_of(adapter: PageAdapter, form: Mapping[str, str]) -> str:
    """Return the name that the person must type before an action."""
    if form.get("act") in ("retire", "delete_version"):
        return version_name(adapter.name, _version(form))
    return f"{adapter.name}:{form.get('alias', '')}" if form.get("act") == "delete_alias" else adapter.name


def _target(form: Mapping[str, str], row: int) -> AliasTarget:
    version, weight = f"version_{row}", f"weight_{row}"
    return AliasTarget(_number(form[version], version), _number(form.get(weight) or "1", weight))


def _version(form: Mapping[str, str]) -> int:
    return _number(form.get("version", ""), "version")


def _number(text: str, param: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_VERSION):
        raise BadRequest(f"{param}: expected a number from 1 to {MAX_VERSION}.", param=param)
    return int(text)


def _moment(text: str) -> datetime | None:
    """Return the UTC time of a form's field; None for an empty one."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadRequest("expires_at: expected a time such as 2026-12-31T18:00.", param="expires_at") from error
    check_year(moment, "expires_at")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _to(path: str) -> web.Response:
    return web.Response(status=303, headers={"Location": path, "Cache-Control": "no-store"})
