"""Pages of prices."""

from aiohttp import web

from gateway.api.admin.prices import NewPrice
from gateway.api.page_guard import FORM
from gateway.api.requests.fields import parse_text, read_fields
from gateway.api.scopes import ACTOR
from gateway.components import Records
from gateway.errors import BadRequest, RecordNotFound
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.form_checks import form_errors, is_confirmed, typing_error
from gateway.pages.widgets.price_fields import read_price
from gateway.pages.widgets.tables import Column, csv_response, fill, read_table
from gateway.records.money.prices import EVERYTHING

PRICES = "/admin/prices"
PRICE_COLUMNS = (
    Column("model", "Model"),
    Column("input", "Input", numeric=True, value=lambda row: row.price.input),
    Column("cached", "Cached", numeric=True, value=lambda row: row.price.cached),
    Column("output", "Output", numeric=True, value=lambda row: row.price.output),
    Column("updated_at", "Changed"),
)


class PricePages:
    """Pages of prices."""

    def __init__(self, frame: Frame, records: Records) -> None:
        self._frame = frame
        self._records = records

    async def list(self, request: web.Request) -> web.StreamResponse:
        """List the prices; with a form, set one."""
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            price, model = read_price(form, "", errors), form.get("model", "").strip()
            with form_errors(errors):
                if not errors:
                    await self._check(model)
                    await self._records.prices.put(model, read_fields(price, NewPrice).price(), request[ACTOR])
                    await self._refresh()
                    raise web.HTTPSeeOther(f"{PRICES}?done=saved")
        words, known = (parse_text(request.query, "q") or "").lower(), await self._records.prices.list()
        prices = [each for each in known if words in each.model.lower()]
        if request.query.get("format") == "csv":
            return csv_response("prices", PRICE_COLUMNS, prices)
        done = {"saved": "The price is set.", "deleted": "The price is deleted."}.get(request.query.get("done", ""))
        return self._frame.render(
            request,
            "prices.html",
            title="Prices",
            status=400 if errors else 200,
            table=fill(read_table(request, "prices", PRICE_COLUMNS, "model"), prices),
            num=len(known),
            base_model=" or ".join(self._records.bases.names),
            values=form or {"model": request.query.get("model", "")},
            errors=errors,
            done=done,
        )

    async def delete(self, request: web.Request) -> web.StreamResponse:
        model = request.match_info["model"]
        if is_confirmed(request, model):
            await self._records.prices.delete(model, request[ACTOR])
            await self._refresh()
            raise web.HTTPSeeOther(f"{PRICES}?done=deleted")
        return self._frame.confirm(
            request,
            title="Delete a price",
            name=model,
            text=f"From then on the next more general price holds for {model}, or none.",
            button="Delete",
            cancel=PRICES,
            error=typing_error(request, model),
        )

    async def _check(self, model: str) -> None:
        """Raise BadRequest for a model that is neither general nor a tenant's."""
        if model == EVERYTHING or self._records.bases.named(model) is not None:
            return
        owner, slash, adapter = model.partition("/")
        try:
            tenant = await self._records.tenants.get(owner)
        except RecordNotFound:
            tenant = None
        known = tenant is not None and (adapter == EVERYTHING or await self._records.catalog.knows(tenant, adapter))
        if not (slash and known):
            message = (
                f"Expected a base model ({self._records.bases.shown}), '*', 'tenant/*', or an adapter as tenant/name."
            )
            raise BadRequest(message, param="model")

    async def _refresh(self) -> None:
        await self._records.price_list.refresh()
        await self._records.auth.catch_up()
