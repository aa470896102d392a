"""`/admin/engines/bases`: the base models with their engines, adapters and prices, and the actions for them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

from aiohttp import web

from gateway.api.admin.bases import AdminBases, BaseChanges, NewBase
from gateway.api.page_guard import FORM
from gateway.api.requests.fields import parse_text
from gateway.api.scopes import ACTOR
from gateway.components import Records
from gateway.errors import RecordNotFound
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.health import Health
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.edits import again_if_changed, merge, shown_values
from gateway.pages.widgets.form_checks import form_errors, is_confirmed, read_form, typing_error
from gateway.pages.widgets.price_fields import read_price
from gateway.pages.widgets.tables import Column, csv_response, fill, read_table
from gateway.records.adapters.probes import Probes
from gateway.records.bases.base import Base, BaseState
from gateway.records.money.prices import EVERYTHING, Price
from wire.digests import digest_name

BASES = "/admin/engines/bases"
Shown = Literal["serving", "draining", "asleep", "retired", "without engines"]
TONES: Mapping[Shown, str] = {
    "serving": "good",
    "draining": "warn",
    "asleep": "info",
    "retired": "quiet",
    "without engines": "bad",
}
# States that the actions set, their buttons, and the effects.
ACTS: Mapping[str, tuple[BaseState, str, str]] = {
    "drain": ("draining", "Drain", "{} is no longer listed and accepts no adapters. Its requests are still served."),
    "retire": ("retired", "Retire", "All requests to {} and its adapters are refused."),
    "resume": ("active", "Resume", ""),
}
DONE = {
    "added": "The base model is added. Next: start an engine that serves it.",
    "changed": "The base model has changed.",
    "drain": "The base model drains.",
    "retire": "The base model is retired.",
    "resume": "The base model is in service again.",
}


class BaseRow(NamedTuple):
    """A base model in the table. up: its engines that serve requests, of all `engines`. price: None without one."""

    base: Base
    state: Shown
    up: int
    engines: int
    adapters: int
    price: Price | None

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def digest(self) -> str | None:
        return None if self.base.digest is None else digest_name(self.base.digest)


def _price(name: str) -> Any:
    return lambda row: None if row.price is None else getattr(row.price, name)


COLUMNS = (
    Column("name", "Base model"),
    Column("state", "State"),
    Column("engines", "Engines", numeric=True, hint="Engines that serve requests, of all known ones"),
    Column("adapters", "Adapters", numeric=True, hint="Adapters with a version that is ready or being validated"),
    Column("context", "Context", numeric=True, value=lambda row: row.base.context_length, hint="Tokens"),
    Column("input", "Input", numeric=True, value=_price("input"), hint="Per million tokens"),
    Column("cached", "Cached", numeric=True, value=_price("cached"), hint="Per million tokens"),
    Column("output", "Output", numeric=True, value=_price("output"), hint="Per million tokens"),
    Column("acts", "", sortable=False, value=lambda _: ""),
)
CSV_COLUMNS = (*COLUMNS[:-1], Column("up", "Up"), Column("digest", "Digest"))


class BasePages:
    """Pages of base models. acts: the routes of the API, whose changes the forms make."""

    def __init__(self, *, frame: Frame, records: Records, registry: Registry, probes: Probes, acts: AdminBases) -> None:
        self._frame = frame
        self._records = records
        self._registry = registry
        self._probes = probes
        self._acts = acts

    async def list(self, request: web.Request) -> web.Response:
        table = read_table(request, "bases", COLUMNS, "name")
        words = (parse_text(request.query, "q") or "").lower()
        known = await self._rows()
        rows = [row for row in known if words in f"{row.name} {row.digest or ''}".lower()]
        if request.query.get("format") == "csv":
            return csv_response("bases", CSV_COLUMNS, rows)
        unknown = sorted(engine.url for engine in self._registry.up if engine.base is None)
        done = DONE.get(request.query.get("done", ""))
        return self._frame.render(
            request,
            "bases.html",
            title="Base models",
            table=fill(table, rows),
            num=len(known),
            tones=TONES,
            unknown=unknown,
            done=done,
        )

    async def new(self, request: web.Request) -> web.Response:
        """Return the form of a new base model; with a form, add it."""
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            price, fields = read_price(form, "price_", errors), _read_fields(form, errors)
            given = read_form({"name": form.get("name", "").strip(), **fields}, NewBase, errors)
            if price and given is not None:
                given = read_form({"name": given.name, **fields, "price": price}, NewBase, errors)
            if given is not None and not errors:
                with form_errors(errors):
                    await self._acts.add_base(given, request[ACTOR])
                    raise web.HTTPSeeOther(f"{BASES}?done=added")
                # The form has no field for the config: it is read from the folder of the tokenizer.
                if "config" in errors:
                    errors["tokenizer"] = errors.pop("config")
        return self._form(request, None, form or {}, errors)

    @again_if_changed
    async def edit(self, request: web.Request) -> web.Response:
        """Return the form of a base model; with a form, change it."""
        if FORM in request:
            await self._records.bases.refresh()
        sent, base = request.get(FORM), self._base(request)
        present = {
            "digest": base.digest or "",
            "tokenizer": base.tokenizer or "",
            "context_length": str(base.context_length),
        }
        if sent is None:
            return self._form(request, base, present, {}, shown=shown_values(present))
        edit = merge(sent, present)
        form, errors = edit.fields, dict(edit.conflicts)
        changed = {name: form[name] for name, now in present.items() if form.get(name, now).strip() != now.strip()}
        given = read_form(_read_fields(changed, errors), BaseChanges, errors)
        if given is not None and not errors:
            if not changed:
                raise web.HTTPSeeOther(BASES)
            with form_errors(errors):
                await self._acts.change_base(base.name, given, request[ACTOR], seen=base)
                raise web.HTTPSeeOther(f"{BASES}?done=changed")
        return self._form(request, base, form, errors, edit.status, shown_values(present))

    async def act(self, request: web.Request) -> web.Response:
        """Ask for the base model's name, then drain or retire it; resume it at once."""
        act = request.match_info["act"]
        if act not in ACTS:
            raise RecordNotFound("There is no such act.", param="act")
        state, button, text = ACTS[act]
        base, form, error = self._base(request), request.get(FORM), typing_error(request, "")
        again = None
        if form is not None and (act == "resume" or is_confirmed(request, base.name)):
            force, errors = form.get("act") == "force", dict[str, str]()
            with form_errors(errors):
                await self._acts.change_base(base.name, BaseChanges(state=state), request[ACTOR], force=force)
                raise web.HTTPSeeOther(f"{BASES}?done={act}")
            [error], again = errors.values(), ("Retire it with its adapters", "force")
        elif form is not None:
            error = typing_error(request, base.name)
        return self._frame.confirm(
            request,
            title=f"{button} a base model",
            name="" if act == "resume" else base.name,
            text=text.format(base.name) or f"{base.name} is listed and accepts adapters again.",
            button=button,
            tone="primary" if act == "resume" else "danger",
            fields={"name": base.name},
            cancel=BASES,
            error=error,
            again=again,
        )

    async def _rows(self) -> Sequence[BaseRow]:
        adapters = await self._probes.adapters_by_base()
        prices = {each.model: each.price for each in await self._records.prices.list()}
        rows = []
        for base in self._records.bases.all:
            engines = [engine for engine in self._registry.engines if engine.base == base.id]
            up = sum(engine.available for engine in engines)
            is_asleep = any(engine.condition.health is Health.ASLEEP for engine in engines)
            price = prices.get(base.name, prices.get(EVERYTHING))
            rows.append(BaseRow(base, _state(base, up, is_asleep), up, len(engines), adapters.get(base.id, 0), price))
        return rows

    def _form(
        self,
        request: web.Request,
        base: Base | None,
        values: Mapping[str, str],
        errors: Any,
        status: int = 400,
        shown: str = "",
    ) -> web.Response:
        """Return the form. status: the HTTP status of an answer with errors. shown: the hidden field of an edit."""
        return self._frame.render(
            request,
            "base_form.html",
            title="New base model" if base is None else f"Change {base.name}",
            status=status if errors else 200,
            base=base,
            shown=shown,
            values=values,
            errors=errors,
            action=request.path if base is None else f"{request.path}?{urlencode({'name': base.name})}",
        )

    def _base(self, request: web.Request) -> Base:
        """Return the base model of `name`. Raises RecordNotFound."""
        form = request.get(FORM)
        name = request.query.get("name") or (form or {}).get("name", "")
        base = self._records.bases.named(name)
        if base is None:
            raise RecordNotFound(f"There is no base model '{name[:256]}'.", param="name")
        return base


def _state(base: Base, up: int, is_asleep: bool) -> Shown:
    if base.state != "active":
        return "draining" if base.state == "draining" else "retired"
    return "serving" if up else "asleep" if is_asleep else "without engines"


def _read_fields(form: Mapping[str, str], errors: dict[str, str]) -> dict[str, Any]:
    """Return the fields of a form that are not empty, the context length as a number."""
    found: dict[str, Any] = {name: text for name in ("digest", "tokenizer") if (text := form.get(name, "").strip())}
    if text := form.get("context_length", "").replace(",", "").strip():
        if text.isascii() and text.isdecimal() and len(text) < 10:
            found["context_length"] = int(text)
        else:
            errors["context_length"] = "Expected a number of tokens, such as 8192."
    return found
