"""`/admin/api/engines/history` and `/admin/api/residency`: an engine's last hour, and where adapters are."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiohttp import web

from gateway.api.admin.engines import find_engine
from gateway.api.requests.fields import json_response, read_limit, read_number
from gateway.errors import Unavailable
from gateway.fleet.engine import AdapterTier, EngineRecord
from gateway.fleet.history import History
from gateway.fleet.registry import Registry
from gateway.fleet.routing import Rates
from gateway.records.adapters.residency import Residency
from wire.digests import digest_name

DEFAULT_ROWS, MAX_PAGE = 100, 1000


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
            queue = [{"at": at, "waiting": waiting, "inside": inside} for at, waiting, inside in self._history.queue]
            return json_response({"object": "engine.history", "url": None, "samples": queue, "changes": []})
        engine = find_engine(self._registry, url)
        history, now = self._history.of(engine.url), int(time.time())
        return json_response(
            {
                "object": "engine.history",
                "url": engine.url,
                "samples": [sample._asdict() for sample in history.samples],
                "changes": [change._asdict() for change in history.changes],
                "steps": history.steps(now),
                "utilisation": history.utilisation(now),
            }
        )

    async def residency(self, request: web.Request) -> web.Response:
        """Return a page of adapters, adapters with most requests first."""
        limit, number = read_limit(request, DEFAULT_ROWS, MAX_PAGE), read_number(request, "page", 1, 1_000_000) or 1
        matrix = await self._residents.read(request.query.get("q", ""))
        rows = sorted(matrix.rows, key=lambda row: (-row.rate, -row.engines, row.digest))
        shown = rows[(number - 1) * limit : number * limit]
        urls = [engine.url for engine in matrix.engines]
        return json_response(
            {
                "object": "list",
                "engines": urls,
                "data": [_described(row, urls) for row in shown],
                "total": len(rows),
                "has_more": number * limit < len(rows),
                "names_missing": matrix.missing,
            }
        )


def _described(row: ResidentRow, urls: Sequence[str]) -> dict[str, object]:
    """Return a row. Engines without the adapter and without requests for it are left out."""
    places = {
        url: {"place": tier, "running": running}
        for url, (tier, running) in zip(urls, row.tiers, strict=True)
        if tier != "none" or running
    }
    return {
        "digest": digest_name(row.digest),
        "versions": list(row.names),
        "requests_per_second": round(row.rate, 4),
        "places": places,
    }
