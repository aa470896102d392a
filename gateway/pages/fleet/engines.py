"""`/admin/engines`: the engines, one engine with its history, where adapters are resident, and drain and resume."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from gateway.access.sessions import VISITOR
from gateway.api.admin.engines import AdminEngines, find_engine
from gateway.api.admin.fleet_views import ResidentRow, Residents
from gateway.api.page_guard import form_of
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.history import History, Sample
from gateway.pages.frame.frame import Frame
from gateway.pages.frame.strip import EngineView, view_engine
from gateway.pages.widgets.charts import thin
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.tables import Column, csv_response, fill, read_table
from gateway.records.bases.registry import Bases
from wire.responses import StepSecond

# Points of a chart; more samples are thinned out.
MAX_POINTS = 240


class EngineRow(NamedTuple):
    """An engine in the table. base: the name of its base model; None if it is not on record. died_at: as in
    `EngineRecord`.
    """

    view: EngineView
    base: str | None
    kind: str
    version: str
    in_flight: int
    running: int
    waiting: int
    slots: int
    kv_used: float | None
    pages_used: float | None
    hits: float | None
    tokens: float | None
    resident: int
    loads: int | None
    evictions: int | None
    preemptions: int | None
    drained: bool
    died_at: datetime | None

    @property
    def url(self) -> str:
        return self.view.url

    @property
    def state(self) -> str:
        return self.view.state


COLUMNS = (
    Column("url", "Engine"),
    Column("state", "State"),
    Column("running", "Running", numeric=True, hint="Requests in the engine's batch, of all gateways"),
    Column("waiting", "Queue", numeric=True, hint="Requests that wait in the engine"),
    Column("tokens", "Tokens/s", numeric=True, hint="Generated tokens per second over the last 5 s"),
    Column("kv_used", "KV cache", hint="Used part of the KV blocks"),
    Column("hits", "Prefix hits", numeric=True, hint="Part of the prompt tokens that the prefix cache had"),
    Column("pages_used", "Adapter pages", hint="Used part of the adapter memory on the device"),
    Column("resident", "Adapters", numeric=True, hint="Adapters on the device"),
    Column("loads", "Loads", numeric=True, hint="Adapters loaded, and below those evicted, since the engine's start"),
    Column("drained", "", sortable=False),
)
CSV_COLUMNS = (
    *COLUMNS[:-1],
    *(
        Column(key, key)
        for key in ("base", "kind", "version", "slots", "evictions", "preemptions", "drained", "died_at")
    ),
)
HISTORY_COLUMNS = (Column("at", "When"), Column("state", "State"), Column("reason", "Reason"))


MATRIX = (
    Column("name", "Adapter"),
    Column("rate", "Requests/s", numeric=True, hint="Recent requests per second through this gateway process"),
    Column("engines", "Engines", numeric=True, hint="Engines that have it on the device"),
)


class EnginePages:
    """Pages of the engines. Only the adapters' names are read from the database."""

    def __init__(
        self,
        *,
        frame: Frame,
        registry: Registry,
        history: History,
        residents: Residents,
        acts: AdminEngines,
        bases: Bases,
    ) -> None:
        self._frame = frame
        self._registry = registry
        self._history = history
        self._residents = residents
        self._acts = acts
        self._bases = bases

    async def list(self, request: web.Request) -> web.Response:
        table = read_table(request, "engines", COLUMNS, "url")
        now = datetime.now(UTC)
        rows = [self._row(engine, now) for engine in self._registry.engines]
        wanted = request.query.get("q", "").strip().lower()
        state = request.query.get("state", "")
        kept = [
            row
            for row in rows
            if wanted in f"{row.url} {row.base or ''}".lower() and (not state or row.state.startswith(state))
        ]
        if request.query.get("format") == "csv":
            return csv_response("engines", CSV_COLUMNS, kept)
        queue = thin(list(self._history.queue), MAX_POINTS)
        chart = {
            "times": [at for at, _, _ in queue],
            "series": [
                {"name": "on engines", "values": [inside for _, _, inside in queue]},
                {"name": "waiting here", "values": [waiting for _, waiting, _ in queue]},
            ],
            "unit": "requests",
            "stacked": True,
        }
        return self._frame.render(
            request, "engines.html", title="Engines", table=fill(table, kept), queue=chart, num=len(rows)
        )

    async def one(self, request: web.Request) -> web.Response:
        engine = find_engine(self._registry, request.query.get("url", ""))
        history = self._history.of(engine.url)
        changes = read_table(request, "health-history", HISTORY_COLUMNS, "-at")
        if request.query.get("format") == "csv":
            return csv_response("health-history", HISTORY_COLUMNS, list(reversed(history.changes)))
        return self._frame.render(
            request,
            "engine.html",
            title=engine.url,
            row=self._row(engine, datetime.now(UTC)),
            engine=engine,
            state=engine.state.reported,
            charts=[*step_charts(history.steps(int(time.time()))), *_charts(thin(list(history.samples), MAX_POINTS))],
            utilisation=history.utilisation(int(time.time())),
            changes=fill(changes, history.changes),
        )

    async def residency(self, request: web.Request) -> web.Response:
        """Show the memory tier of each adapter on each engine: device, host, or none."""
        table = read_table(request, "residency", MATRIX, "-rate")
        matrix = await self._residents.read(request.query.get("q", ""))
        engines, rows = matrix.engines, matrix.rows
        if request.query.get("format") == "csv":
            placed = [Column(engine.url, engine.url, value=_tier_on(i)) for i, engine in enumerate(engines)]
            return csv_response("residency", (Column("digest", "Digest"), *MATRIX, *placed), rows)
        return self._frame.render(
            request,
            "residency.html",
            title="Where adapters are resident",
            table=fill(table, rows),
            engines=engines,
            links_of=partial(_adapter_links, Links(request)),
            missing=matrix.missing,
        )

    async def ask(self, request: web.Request) -> web.Response:
        """Show the page that confirms a drain."""
        return self._confirm(request, find_engine(self._registry, request.query.get("url", "")), None)

    async def drain(self, request: web.Request) -> web.Response:
        form = form_of(request)
        engine = find_engine(self._registry, form.get("url", ""))
        if form.get("typed", "") != engine.url:
            return self._confirm(request, engine, "This is not the engine's URL. Type it as it stands above.")
        await self._acts.drain_engine(engine.url, request[VISITOR].subject)
        return _back("/admin/engines")

    async def resume(self, request: web.Request) -> web.Response:
        await self._acts.resume_engine(form_of(request).get("url", ""), request[VISITOR].subject)
        return _back("/admin/engines")

    def _confirm(self, request: web.Request, engine: EngineRecord, error: str | None) -> web.Response:
        others = sum(other.available for other in self._registry.engines if other is not engine)
        left = f"{others} other {'engine serves' if others == 1 else 'engines serve'} requests meanwhile."
        return self._frame.confirm(
            request,
            title="Drain an engine",
            name=engine.url,
            text=f"No gateway sends this engine new requests until you resume it. Its {engine.load} running requests "
            + "go on. "
            + (left if others else "No other engine serves requests, so clients get errors until you resume it."),
            button="Drain the engine",
            action="/admin/engines/drain",
            fields={"url": engine.url},
            cancel="/admin/engines",
            error=error,
        )

    def _row(self, engine: EngineRecord, now: datetime) -> EngineRow:
        state, last = engine.state, self._history.of(engine.url).last
        reported = state.reported if engine.is_up else {}
        queried = reported.get("prefix_query_tokens")
        return EngineRow(
            view=view_engine(engine, now),
            base=None if engine.base is None else self._bases.name_of(engine.base),
            kind=engine.address.traits.name,
            version=str(state.version or "")[:64],
            in_flight=engine.requests.in_flight,
            running=state.running if engine.is_up else 0,
            waiting=state.waiting if engine.is_up else 0,
            slots=engine.slots,
            kv_used=last.kv_used if last else None,
            pages_used=last.pages_used if last else None,
            hits=reported.get("prefix_hit_tokens", 0) / queried if queried else None,
            tokens=last.tokens if last else None,
            resident=len(engine.resident),
            loads=reported.get("adapter_loads"),
            evictions=reported.get("adapter_evictions"),
            preemptions=reported.get("preemptions"),
            drained=engine.drained is not None,
            died_at=engine.died_at,
        )


def _adapter_links(links: Links, row: ResidentRow) -> list[tuple[str, str | None]]:
    """Return each name of a row, with the URL of its version's page."""
    found = []
    for name in row.names:
        adapter, _, version = name.rpartition("@")
        url = links.adapter(*adapter.split("/", 1))
        found.append((name, url if url is None or "?" in url else f"{url}?version={version}#version"))
    return found


def _tier_on(index: int) -> Callable[[ResidentRow], str]:
    return lambda row: row.tiers[index][0]


Chart = tuple[str, str, str, dict[str, Any]]


def step_charts(seconds: Sequence[StepSecond]) -> list[Chart]:
    """Return (id, title, period, data) of the charts of an engine's steps; none without reports of steps."""
    if not seconds:
        return []
    times = [second.at for second in seconds]

    def chart(unit: str, series: dict[str, list[float | None]], *, stacked: bool = False) -> dict[str, Any]:
        listed = [{"name": name, "values": values} for name, values in series.items()]
        return {"times": times, "unit": unit, "series": listed, "stacked": stacked}

    durations: dict[str, list[float | None]] = {
        "longest": [round(1000 * each.longest, 1) if each.steps else None for each in seconds],
        "mean": [round(1000 * each.seconds / each.steps, 1) if each.steps else None for each in seconds],
    }
    rows: dict[str, list[float | None]] = {
        "prompt tokens": [each.prompt_tokens for each in seconds],
        "decodes": [each.decodes for each in seconds],
    }
    # A step counts in the second in which it ends, so the times of a second may add up to more than 1 s.
    use: dict[str, list[float | None]] = {"steps": [round(100 * min(1.0, each.seconds), 1) for each in seconds]}
    if any(each.roofline is not None for each in seconds):
        use["at full speed"] = [round(100 * min(1.0, each.roofline or 0.0), 1) for each in seconds]
    period = "the last 4 minutes, by second"
    return [
        ("step-times", "Time of a step", period, chart("ms", durations)),
        ("step-rows", "Computed tokens", period, chart("tokens/s", rows, stacked=True)),
        ("step-use", "Time in steps", period, chart("%", use)),
    ]


def _charts(samples: Sequence[Sample]) -> list[Chart]:
    """Return (id, title, period, data) of an engine's charts of the last hour."""
    times = [sample.at for sample in samples]

    def chart(unit: str, series: dict[str, list[float | int | None]], *, stacked: bool = False) -> dict[str, Any]:
        listed = [{"name": name, "values": values} for name, values in series.items()]
        return {"times": times, "unit": unit, "series": listed, "stacked": stacked}

    def parts(name: str) -> list[float | int | None]:
        return [None if (part := getattr(each, name)) is None else round(100 * part, 1) for each in samples]

    def rates(name: str) -> list[float | int | None]:
        return [None if (rate := getattr(each, name)) is None else round(rate, 2) for each in samples]

    load: dict[str, list[float | int | None]] = {
        "running": [each.running for each in samples],
        "queue": [each.waiting for each in samples],
    }
    memory = {"KV cache": parts("kv_used"), "adapter pages": parts("pages_used"), "prefix hits": parts("hits")}
    period = "the last hour"
    return [
        ("load", "Requests", period, chart("requests", load, stacked=True)),
        ("tokens", "Generated tokens", period, chart("tokens/s", {"generated": rates("tokens")})),
        ("memory", "Memory and prefix cache", period, chart("%", memory)),
        ("loads", "Adapters", period, chart("per minute", {"loads": rates("loads"), "evictions": rates("evictions")})),
    ]


def _back(path: str) -> web.Response:
    return web.Response(status=303, headers={"Location": path, "Cache-Control": "no-store"})
