"""Pages of alerts: events, the webhooks and e-mail addresses that receive them, and thresholds of budgets."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from aiohttp import web
from multidict import MultiDict

from gateway.api.page_guard import FORM
from gateway.api.requests.fields import parse_text, read_fields
from gateway.api.scopes import ACTOR
from gateway.api.webhook_manager import NewWebhook, WebhookManager, read_event_filter
from gateway.errors import BadRequest, GatewayError
from gateway.limits.kinds import BY_LETTER, PERIOD_BY_LETTER
from gateway.pages.frame.frame import Frame, link
from gateway.pages.settings.event_rows import EVENT_COLUMNS, EVENT_TITLES, TONES, event_row, export_events
from gateway.pages.widgets.edits import SHOWN, again_if_changed, merge, shown_values
from gateway.pages.widgets.form_checks import form_errors, is_confirmed, typing_error
from gateway.pages.widgets.forms import term_text
from gateway.pages.widgets.tables import ROWS, Column, Table, read_page, read_table, send_csv
from gateway.pages.widgets.tabs import show_tab
from gateway.records.events.events import EVENT_TYPES, Event, Events
from gateway.records.tenants.budgeted import BudgetedTenant, BudgetedTenants
from gateway.records.webhooks.list import STATES, ListedWebhook, Sort, TargetFilter, TargetLists
from gateway.records.webhooks.targets import Webhook, shown_url

ALERTS = "/admin/alerts"
EVENT_QUERY = ("type", "tenant", "since", "until", "after")
LIST_QUERY = ("tab", *EVENT_QUERY, "q", "state", "own", "sort", "page", "format", "done")
DONE = {"saved": "The target is saved.", "deleted": "The target is deleted with the events that waited for it."}
# Words and colour of each state.
STATE_WORDS = {
    "works": ("works", "good"),
    "failing": ("fails", "bad"),
    "waiting": ("delivering", "info"),
    "unused": ("nothing sent yet", "quiet"),
}
TARGET_COLUMNS = (
    Column("name", "Target", value=lambda target: target.webhook.name),
    Column("url", "Address", sortable=False, value=lambda target: shown_url(target.webhook.url)),
    Column("tenant", "Events of", value=lambda target: target.webhook.tenant),
    Column("types", "Types", sortable=False, value=lambda target: " ".join(target.webhook.types or ("all",))),
    Column("state", "State", sortable=False, value=lambda target: target.state),
    Column("waiting", "Queue", numeric=True, hint="Events that are still to be delivered"),
    Column("failures", "Failures", numeric=True, value=lambda t: t.webhook.failures, hint="Since the last delivery"),
    Column("delivered_at", "Last delivery", value=lambda target: target.webhook.delivered_at),
)
CSV_COLUMNS = (
    *TARGET_COLUMNS,
    Column("given_up", "Given up"),
    Column("retry_at", "Next attempt", value=lambda target: target.webhook.retry_at),
    Column("error", "Error", value=lambda target: target.webhook.error),
    Column("created_at", "Added", value=lambda target: target.webhook.created_at),
)
BUDGET = "budget_per_month"
PERIODS = {letter: "30 days" if name == "30 days" else f"a {name}" for letter, name in PERIOD_BY_LETTER.items()}
BUDGET_LETTERS = tuple(kind.letter for kind in BY_LETTER.values() if kind.is_budget)


def _share_text(tenant: BudgetedTenant) -> str:
    return ", ".join(f"{100 * share:g} %" for share in tenant.warn_at) or "none"


def _soft_text(tenant: BudgetedTenant) -> str | None:
    texts = (f"{term_text(BUDGET, value)} in {PERIODS[kind]}" for kind, value in sorted(tenant.soft.items()))
    return ", ".join(texts) or None


def _budget_column(letter: str) -> Column:
    kind = BY_LETTER[letter]
    return Column(
        kind.name,
        "30 days" if kind.period == "30 days" else f"A {kind.period}",
        numeric=True,
        sortable=False,
        value=lambda tenant: term_text(kind.name, tenant.budgets[letter]) if letter in tenant.budgets else None,
        hint=kind.help,
    )


THRESHOLD_COLUMNS = (
    Column("name", "Tenant", sortable=False),
    *(_budget_column(letter) for letter in BUDGET_LETTERS),
    Column("warn_at", "Events at", sortable=False, value=_share_text, hint="Shares of each budget"),
    Column("soft", "Soft budgets", sortable=False, value=_soft_text, hint="Spending at which there is an event too"),
    Column("source", "From", sortable=False, value=lambda tenant: "tenant" if tenant.has_own else "default"),
)


class AlertPages:
    """Pages of alerts. currency: the budgets' currency."""

    def __init__(
        self,
        *,
        frame: Frame,
        manager: WebhookManager,
        targets: TargetLists,
        events: Events,
        tenants: BudgetedTenants,
        currency: str,
    ) -> None:
        self._frame = frame
        self._manager = manager
        self._targets = targets
        self._events = events
        self._tenants = tenants
        self._currency = currency

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Return a tab of the page: events, targets or thresholds."""
        return await show_tab(
            request,
            self._frame,
            "alerts.html",
            {
                "events": ("Events", self._event_part),
                "targets": ("Targets", self._target_part),
                "thresholds": ("Thresholds", self._threshold_part),
            },
            title="Alerts",
            states=STATE_WORDS,
            shown_url=shown_url,
            event_titles=EVENT_TITLES,
            sums=await self._targets.sums(),
            done=DONE.get(request.query.get("done", "")),
        )

    async def target(self, request: web.Request) -> web.StreamResponse:
        """Return the page of a target."""
        return await self._target_page(request, await self._webhook(request))

    async def test(self, request: web.Request) -> web.StreamResponse:
        """Send a test event and return the target's page with the result."""
        webhook = await self._webhook(request)
        error = await self._manager.test(webhook)
        return await self._target_page(request, webhook, result=("good", "The target took the test event.")
                                       if error is None else ("bad", f"The test failed: {error}."))  # fmt: skip

    async def new(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a new target; with a form, add it and show its secret."""
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            name = form.get("name", "").strip()
            with form_errors(errors):
                given = {"url": _url(form), "types": form.getall("types", []) or None}
                known = read_fields(given | {"tenant": form.get("tenant", "").strip() or None}, NewWebhook)
                if await self._exists(name):
                    raise BadRequest("Another target has this name.", param="name")
                webhook, _, secret = await self._manager.put(name, known, request[ACTOR])
                if secret is None:
                    raise web.HTTPSeeOther(f"{ALERTS}/{webhook.name}?done=saved")
                title = f"Secret of {webhook.name}"
                return self._frame.secret(request, "alert_made.html", title=title, webhook=webhook, secret=secret)
        return self._form(request, None, form, errors)

    @again_if_changed
    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a target; with a form, change it."""
        webhook = await self._webhook(request)
        form, errors = request.get(FORM), dict[str, str]()
        status = 400
        if form is not None:
            types = " ".join(form.getall("types", []))
            edit = merge(MultiDict({"types": types, SHOWN: form.get(SHOWN, "")}), _present(webhook))
            chosen, errors, status = edit.fields["types"].split(), dict(edit.conflicts), edit.status
        if form is not None and not errors:
            with form_errors(errors):
                # The form does not show the URL, because its path may hold a secret.
                given = {"url": _url(form) or webhook.url, "types": chosen or None}
                known = read_fields(given | {"tenant": webhook.tenant}, NewWebhook)
                await self._manager.put(webhook.name, known, request[ACTOR], seen=webhook)
                raise web.HTTPSeeOther(f"{ALERTS}/{webhook.name}?done=saved")
        return self._form(request, webhook, form, errors, status)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        webhook = await self._webhook(request)
        if is_confirmed(request, webhook.name):
            await self._manager.webhooks.delete(webhook.name, request[ACTOR])
            raise web.HTTPSeeOther(f"{ALERTS}?tab=targets&done=deleted")
        waiting = (await self._targets.get(webhook)).waiting
        return self._frame.confirm(
            request,
            title=f"Delete {webhook.name}",
            name=webhook.name,
            text=f"{shown_url(webhook.url)} receives no further events. {waiting:,} events that wait for it are lost.",
            button="Delete",
            cancel=f"{ALERTS}/{webhook.name}",
            error=typing_error(request, webhook.name),
        )

    async def _event_part(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        errors: dict[str, str] = {}
        found: list[Event] = []
        has_more = False
        try:
            criteria = read_event_filter({name: request.query[name] for name in EVENT_QUERY if request.query.get(name)})
            if request.query.get("format") == "csv":
                return await export_events(request, self._events, criteria)
            found, has_more = await self._events.list(**criteria, limit=ROWS)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        next_link = link(request, after=found[-1].id) if has_more else None
        previous = link(request, after=None) if request.query.get("after") else None
        rows = [event_row(event, self._currency) for event in found]
        table = Table("events", EVENT_COLUMNS, rows, next_link=next_link, previous_link=previous)
        table.previous_title = "Newest"
        types = [("", "any"), *((kind, EVENT_TITLES[kind]) for kind in EVENT_TYPES)]
        return {"table": table, "errors": errors, "types": types, "tones": TONES}

    async def _target_part(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        tenant, q = (parse_text(request.query, name) for name in ("tenant", "q"))
        criteria = TargetFilter(tenant=tenant, q=q, state=cast(Any, _state(request)))
        table = read_table(request, "targets", TARGET_COLUMNS, "name")
        read = partial(self._targets.page, criteria, sort=cast(Sort, table.sort), descending=table.descending)
        if request.query.get("format") == "csv":
            return await send_csv(request, "targets", CSV_COLUMNS, read)
        return {"table": await read_page(table, read)}

    async def _threshold_part(self, request: web.Request) -> dict[str, Any] | web.StreamResponse:
        table = read_table(request, "thresholds", (Column("name", "Tenant"), *THRESHOLD_COLUMNS[1:]), "name")
        q, only_own = parse_text(request.query, "q") or "", request.query.get("own") == "true"
        table.columns = THRESHOLD_COLUMNS
        read = partial(self._tenants.page, q, only_own=only_own)
        if request.query.get("format") == "csv":
            return await send_csv(request, "thresholds", THRESHOLD_COLUMNS, read)
        await read_page(table, read)
        return {"table": table, "letters": BUDGET_LETTERS, "share_text": _share_text, "soft_text": _soft_text}

    async def _target_page(
        self, request: web.Request, webhook: Webhook, result: tuple[str, str] | None = None
    ) -> web.Response:
        target: ListedWebhook = await self._targets.get(webhook)
        if result is None and request.query.get("done") in DONE:
            result = ("good", DONE[request.query["done"]])
        return self._frame.render(
            request,
            "alert_target.html",
            title=webhook.name,
            target=target,
            webhook=webhook,
            address=shown_url(webhook.url),
            state=STATE_WORDS[target.state],
            event_titles=EVENT_TITLES,
            result=result,
        )

    def _form(
        self, request: web.Request, webhook: Webhook | None, form: Any, errors: Mapping[str, str], status: int = 400
    ) -> web.StreamResponse:
        chosen = form.getall("types", []) if form is not None else (webhook.types if webhook else None) or ()
        return self._frame.render(
            request,
            "alert_form.html",
            title=f"Edit {webhook.name}" if webhook else "New target",
            status=status if errors else 200,
            webhook=webhook,
            shown=shown_values(_present(webhook)) if webhook else "",
            address=shown_url(webhook.url) if webhook else "",
            has_mail=self._manager.has_mail,
            types=[(kind, EVENT_TITLES[kind], kind in chosen) for kind in EVENT_TYPES],
            values=form or {},
            errors=errors,
        )

    async def _webhook(self, request: web.Request) -> Webhook:
        return await self._manager.webhooks.get(request.match_info["name"])

    async def _exists(self, name: str) -> bool:
        try:
            await self._manager.webhooks.get(name)
        except GatewayError as error:
            if error.status == 404:
                return False
            raise
        return True


def _present(webhook: Webhook) -> dict[str, str]:
    """Return the form's field of the event types as text, in the form's order."""
    return {"types": " ".join(kind for kind in EVENT_TYPES if kind in (webhook.types or ()))}


def _url(form: Mapping[str, str]) -> str:
    """Return the form's address as a URL. A plain e-mail address gets its scheme."""
    url = form.get("url", "").strip()
    is_mail = "@" in url and "/" not in url and ":" not in url
    return f"mailto:{url}" if is_mail else url


def _state(request: web.Request) -> str | None:
    state = request.query.get("state") or None
    if state is not None and state not in STATES:
        raise BadRequest(f"state: expected one of {', '.join(STATES)}.", param="state")
    return state
