"""`/admin/api/engines/history` and `/admin/api/residency`: an engine's last hour, and where adapters are."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aiohttp import web
from msgspec import Struct

from gateway.api.admin.engines import find_engine
from gateway.api.answers import row_struct
from gateway.api.requests.fields import json_response, read_limit, read_number
from gateway.errors import Unavailable
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import AdapterTier, EngineRecord
from gateway.fleet.history import Change, History, Sample
from gateway.fleet.routing.choice import Rates
from gateway.records.adapters.residency import Residency
from wire.digests import digest_name
from wire.responses import StepSecond

DEFAULT_ROWS, MAX_PAGE = 100, 1000


EngineSample: Any = row_struct("EngineSample", Sample)
EngineChange: Any = row_struct("EngineChange", Change)


class EngineHistoryAnswer(Struct, frozen=True, kw_only=True):
    """Last hour of an engine. steps: its last seconds. utilisation: fraction of the last minute that the steps would
    take at the device's full memory bandwidth and compute rate; null if the engine has not measured its device.
    """

    object: Literal["engine.history"] = "engine.history"
    url: str
    samples: list[EngineSample]
    changes: list[EngineChange]
    steps: list[StepSecond]
    utilisation: float | None


class QueueSample(Struct, frozen=True, kw_only=True):
    """Requests of this process: in its queue, and on engines. at: in Unix seconds."""

    at: int
    waiting: int
    inside: int


class QueueHistoryAnswer(Struct, frozen=True, kw_only=True):
    """Last hour of the queue: the answer to a request without `?url=`."""

    object: Literal["engine.history"] = "engine.history"
    url: None = None
    samples: list[QueueSample]
    changes: list[EngineChange] = []


class AdapterPlace(Struct, frozen=True, kw_only=True):
    """Memory tier of an adapter on an engine, and the requests of this process there."""

    place: AdapterTier
    running: int


class ShownResident(Struct, frozen=True, kw_only=True):
    """Content of adapters. versions: those with this content. places: by the engine's URL, without engines that neither
    have nor use it.
    """

    digest: str
    versions: Sequence[str]
    requests_per_second: float
    places: dict[str, AdapterPlace]


class ResidencyAnswer(Struct, frozen=True, kw_only=True):
    """Page of adapters. total: their number on all pages. names_missing: why the names could not be read, or null."""

    object: Literal["list"] = "list"
    engines: list[str]
    data: list[ShownResident]
    total: int
    has_more: bool
    names_missing: str | None


class ResidentRow(NamedTuple):
    """An adapter's versions, and its memory tier on each engine with the requests of this process there.

    tiers: in the order of the engines. rate: recent requests per second. engines: number of engines that have it on the
    device.
    """

    digest: str
    names: Sequence[str]
    tiers: Sequence[tuple[AdapterTier, int]]
    rate: float
    engines: int

    @property
    def name(self) -> str:
        return ", ".join(self.names) or f"{digest_name(self.digest[:12])}…"


class Matrix(NamedTuple):
    """Adapters in the memory of engines. missing: the reason why the adapters have no names, None if they have."""

    engines: Sequence[EngineRecord]
    rows: Sequence[ResidentRow]
    missing: str | None


class Residents:
    """Reader of the matrix. Only the adapters' names are read from the database."""

    def __init__(self, *, registry: Registry, rates: Rates, residency: Residency) -> None:
        self._registry = registry
        self._rates = rates
        self._residency = residency

    async def read(self, wanted: str) -> Matrix:
        """Return the adapters in the device or host memory of an engine that is up, whose name or digest contains
        `wanted`.
        """
        engines = self._registry.up
        digests = sorted({digest for engine in engines for digest in engine.resident | engine.host})
        missing: str | None = None
        names: Mapping[str, Sequence[str]] = {}
        try:
            names = await self._residency.names(digests)
        except Unavailable as error:
            missing = error.message
        rows = [self._row(digest, names.get(digest, ()), engines) for digest in digests]
        wanted = wanted.strip().lower()
        return Matrix(engines, [row for row in rows if wanted in row.name.lower() or wanted in row.digest], missing)

    def _row(self, digest: str, names: Sequence[str], engines: Sequence[EngineRecord]) -> ResidentRow:
        tiers = [(engine.tier_of(digest), engine.requests.by_digest[digest]) for engine in engines]
        return ResidentRow(digest, names, tiers, self._rates.of(digest), sum(tier == "device" for tier, _ in tiers))


class FleetViews:
    """Routes with the data of the engines' pages, as the answering process sees it."""

    def __init__(self, *, registry: Registry, history: History, residents: Residents) -> None:
        self._registry = registry
        self._history = history
        self._residents = residents

    async def history(self, request: web.Request) -> web.Response:
        """Return the samples, changes and steps of an engine; without `?url=`, those of the queue."""
        url = request.query.get("url")
        if url is None:
            queue = [QueueSample(at=at, waiting=waiting, inside=inside) for at, waiting, inside in self._history.queue]
            return json_response(QueueHistoryAnswer(samples=queue))
        engine = find_engine(self._registry, url)
        history, now = self._history.of(engine.url), int(time.time())
        return json_response(
            EngineHistoryAnswer(
                url=engine.url,
                samples=[EngineSample(**sample._asdict()) for sample in history.samples],
                changes=[EngineChange(**change._asdict()) for change in history.changes],
                steps=history.steps(now),
                utilisation=history.utilisation(now),
            )
        )

    async def residency(self, request: web.Request) -> web.Response:
        """Return a page of adapters, adapters with most requests first."""
        limit, number = read_limit(request, DEFAULT_ROWS, MAX_PAGE), read_number(request, "page", 1, 1_000_000) or 1
        matrix = await self._residents.read(request.query.get("q", ""))
        rows = sorted(matrix.rows, key=lambda row: (-row.rate, -row.engines, row.digest))
        shown = rows[(number - 1) * limit : number * limit]
        urls = [engine.url for engine in matrix.engines]
        return json_response(
            ResidencyAnswer(
                engines=urls,
                data=[_described(row, urls) for row in shown],
                total=len(rows),
                has_more=number * limit < len(rows),
                names_missing=matrix.missing,
            )
        )


def _described(row: ResidentRow, urls: Sequence[str]) -> ShownResident:
    """Return a row. Engines without the adapter and without requests for it are left out."""
    places = {
        url: AdapterPlace(place=tier, running=running)
        for url, (tier, running) in zip(urls, row.tiers, strict=True)
        if tier != "none" or running
    }
    return ShownResident(
        digest=digest_name(row.digest),
        versions=row.names,
        requests_per_second=round(row.rate, 4),
        places=places,
    )
