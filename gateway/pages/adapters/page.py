"""Page of one adapter: versions with their reports, aliases, residency, use, and changes."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from aiohttp import web

from gateway.api.adapters.caller import AdapterCaller
from gateway.errors import BadRequest, RecordNotFound
from gateway.fleet.engines.engine import AdapterTier
from gateway.fleet.routing.operator_prefetch import OperatorPrefetch
from gateway.pages.adapters.subject import PageAdapter, find_adapter
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.audit_values import changes_of, clipped, sentence
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.periods import read_period, segments_of
from gateway.pages.widgets.states import TONES
from gateway.pages.widgets.tables import Column, csv_response
from gateway.records.activity.report import Activity, Scope
from gateway.records.adapters.aliases import Alias, Targets
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.golden import Golden, GoldenSet
from gateway.records.adapters.probes import Probes, Recorded
from gateway.records.adapters.rows import Version
from gateway.records.adapters.uploads import Uploads
from gateway.records.adapters.use import AdapterUses, Change
from gateway.records.bases.base import Binding
from gateway.records.tenants.tenants import Tenants
from gateway.sharing.concurrency import ConcurrencyLimiter

QUERY = ("tab", "version", "period", "done", "table", "format")
TABS = (("versions", "Versions"), ("use", "Use"), ("changes", "Changes"))
PERIODS = ("24h", "7d", "30d")
# Banners after an action, by the value of `done`.
DONE = {
    "retire": "The version is retired: requests for it get a 404.",
    "ready": "The version is ready again.",
    "pin": "The version is pinned: engines keep it in host memory from the next 5 s on.",
    "unpin": "The version is no longer pinned.",
    "expire": "The end of the version is changed.",
    "probe": "The version was probed again.",
    "prefetch": "The engine has the version in its host memory.",
    "check": "The golden answers were checked on every available engine of the base model.",
    "rollback": "The alias is rolled back. New requests use its earlier versions.",
    "move": "The alias is moved. New requests use its versions.",
    "delete_alias": "The alias is deleted.",
    "delete_version": "The version is deleted.",
    "upload": "The upload is accepted.",
}


class VersionRow(NamedTuple):
    """A version in the table. aliases: those that refer to it. by: the person or key that uploaded it."""

    version: Version
    aliases: Sequence[str]
    by: str
    on_device: int
    in_host: int


class AliasRow(NamedTuple):
    """An alias. shares: (version, per cent). earlier: the targets that a rollback restores; None if there are none."""

    alias: Alias
    shares: Sequence[tuple[int, float]]
    earlier: Targets | None


class EngineRow(NamedTuple):
    """An engine and the memory that has a version there. may_load: whether the engine can prefetch it."""

    url: str
    tier: AdapterTier
    running: int
    serves_base: bool
    may_load: bool


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports on versions that are not in the catalog."""

    uploads: Uploads
    probes: Probes
    golden: Golden


class AdapterPages:
    """Page of an adapter, for operators and for its tenant. reads: limiter of tenants' readers."""

    def __init__(
        self,
        *,
        frame: Frame,
        tenants: Tenants,
        catalog: Catalog,
        reports: Reports,
        uses: AdapterUses,
        activity: Activity,
        operator_prefetch: OperatorPrefetch,
        reads: ConcurrencyLimiter,
    ) -> None:
        self._frame = frame
        self._tenants = tenants
        self._catalog = catalog
        self._reports = reports
        self._uses = uses
        self._activity = activity
        self._operator_prefetch = operator_prefetch
        self._reads = reads

    async def show(self, request: web.Request) -> web.Response:
        """Show the tab of the query, or send its versions or aliases as CSV. Raises RecordNotFound, BadRequest."""
        adapter = await find_adapter(request, self._tenants)
        tab = request.query.get("tab", "versions")
        if tab not in dict(TABS):
            raise BadRequest(f"tab: expected one of {', '.join(dict(TABS))}.", param="tab")
        # A tenant's reader waits for the tenant's others, an operator for nobody.
        async with nullcontext() if adapter.is_operators else self._reads.place(adapter.tenant.id):
            return await self._show(request, adapter, tab)

    async def _show(self, request: web.Request, adapter: PageAdapter, tab: str) -> web.Response:
        versions = await self._catalog.versions.list(adapter.tenant, adapter.name)
        aliases = await self._catalog.aliases.list(adapter.tenant, adapter.name)
        shown = {"versions": self._versions, "use": self._use, "changes": self._changes}[tab]
        present = [each for each in versions if each.state != "deleted"]
        if request.query.get("format") == "csv":
            return _csv(request, present, aliases)
        latest = next((alias.targets[0].version for alias in aliases if alias.alias == "latest"), None)
        return self._frame.render(
            request,
            "adapter.html",
            title=adapter.name,
            adapter=adapter,
            links=Links(request),
            tab=tab,
            tabs=[(title, f"{adapter.home}?tab={key}", key == tab) for key, title in TABS],
            tones=TONES,
            done=DONE.get(request.query.get("done", "")),
            latest=latest,
            num_versions=len(present),
            num_deleted=len(versions) - len(present),
            **await shown(request, adapter, present, aliases),
        )

    async def _versions(
        self, request: web.Request, adapter: PageAdapter, versions: Sequence[Version], aliases: Sequence[Alias]
    ) -> dict[str, Any]:
        chosen = _chosen(request, versions, aliases)
        pushed = _uploaders(await self._uses.changes(adapter.tenant, adapter.name, by_tenant=not adapter.is_operators))
        served = {each.version for each in versions if each.is_served}
        rows = [self._row(each, aliases, pushed) for each in reversed(versions)]
        found = await self._report(adapter.caller, adapter.name, chosen) if chosen is not None else {}
        return {
            "rows": rows,
            "aliases": [_alias_row(alias, served) for alias in aliases],
            "chosen": chosen,
            "uploads": await self._reports.uploads.of_name(adapter.tenant, adapter.name),
            **found,
        }

    async def _report(self, caller: AdapterCaller, name: str, version: Version) -> dict[str, Any]:
        """Return the probe, the golden answers and the residency of a version."""
        probe: Recorded | None = None
        golden: GoldenSet | None = None
        with suppress(RecordNotFound):
            probe = await self._reports.probes.get(caller.tenant, name, version.version)
        with suppress(RecordNotFound):
            golden = await self._reports.golden.get(caller.tenant, name, version.version)
        digest = probe.base_digest if probe is not None else None
        binding = Binding.of(version.base, digest)
        engines = self._engines(version, binding) if caller.principal is None else []
        return {"probe": probe, "golden": golden, "engines": engines}

    def _engines(self, version: Version, binding: Binding) -> list[EngineRow]:
        able = {engine.url for engine in self._operator_prefetch.engines(binding)}
        rows = []
        for engine in sorted(self._operator_prefetch.up, key=lambda engine: engine.url):
            tier = engine.tier_of(version.digest)
            may_load = version.is_served and engine.url in able and tier == "none"
            running = engine.requests.by_digest[version.digest] if version.digest else 0
            rows.append(EngineRow(engine.url, tier, running, engine.serves(binding), may_load))
        return rows

    def _row(self, version: Version, aliases: Sequence[Alias], pushed: Mapping[int, str]) -> VersionRow:
        number = version.version
        named = [each.alias for each in aliases if any(target.version == number for target in each.targets)]
        tiers = [engine.tier_of(version.digest) for engine in self._operator_prefetch.up]
        by = pushed.get(number, "")
        return VersionRow(version, named, by, tiers.count("device"), tiers.count("host"))

    async def _use(
        self, request: web.Request, adapter: PageAdapter, _: Sequence[Version], __: Sequence[Alias]
    ) -> dict[str, Any]:
        period = read_period(request, PERIODS[0], datetime.now(UTC))
        scope = Scope(tenant_id=adapter.tenant.id, model=adapter.name)
        report = await self._activity.report(since=period.since, scope=scope)
        times = [int(start.timestamp()) for start in report.starts]
        curve = report.curve

        def chart(unit: str, *series: tuple[str, Sequence[int]]) -> dict[str, Any]:
            listed = [{"name": name, "values": list(values)} for name, values in series]
            return {"times": times, "unit": unit, "series": listed, "stacked": True, "kind": "area"}

        served = [all_ - failed for all_, failed in zip(curve.requests, curve.failed, strict=True)]
        computed = [all_ - hit for all_, hit in zip(curve.prompt_tokens, curve.cached_tokens, strict=True)]
        tokens = (("prompt", computed), ("prompt, cached", curve.cached_tokens), ("answer", curve.completion_tokens))
        return {
            "report": report,
            "use": await self._uses.of(adapter.tenant, adapter.name),
            "requests_chart": chart("requests", ("completed", served), ("failed", curve.failed)),
            "tokens_chart": chart("tokens", *tokens),
            "periods": segments_of(request, period, PERIODS),
        }

    async def _changes(
        self, _: web.Request, adapter: PageAdapter, __: Sequence[Version], ___: Sequence[Alias]
    ) -> dict[str, Any]:
        changes = await self._uses.changes(adapter.tenant, adapter.name, by_tenant=not adapter.is_operators)
        return {"changes": [(change, _what(change)) for change in changes]}


VERSION_FIELDS = ("version", "state", "digest", "rank", "num_bytes", "pinned", "created_at", "expires_at")
VERSION_COLUMNS = tuple(Column(name, name) for name in VERSION_FIELDS)
ALIAS_COLUMNS = (
    Column("alias", "alias"),
    Column("targets", "targets", value=lambda row: shown_targets(row.targets)),
)


def _csv(request: web.Request, versions: Sequence[Version], aliases: Sequence[Alias]) -> web.Response:
    """Return the table of the query's `table` as CSV. Raises BadRequest."""
    tables = {"versions": (VERSION_COLUMNS, versions), "aliases": (ALIAS_COLUMNS, aliases)}
    name = request.query.get("table") or "versions"
    if name not in tables:
        raise BadRequest(f"table: expected one of {', '.join(tables)}.", param="table")
    return csv_response(name, *tables[name])


def earlier_targets(alias: Alias, served: set[int]) -> Targets | None:
    """Return the targets that a rollback restores, as `Aliases.rollback` chooses them."""
    for targets in reversed(alias.history):
        if targets != alias.targets and all(target.version in served for target in targets):
            return targets
    return None


def shares_of(targets: Targets) -> list[tuple[int, float]]:
    """Return each version's share of an alias's requests in per cent, the largest first."""
    total = sum(target.weight for target in targets)
    shares = [(target.version, 100 * target.weight / total) for target in targets]
    return sorted(shares, key=lambda share: (-share[1], share[0]))


def shown_targets(targets: Targets) -> str:
    return ", ".join(f"version {version} ({share:.4g} %)" for version, share in shares_of(targets))


def _alias_row(alias: Alias, served: set[int]) -> AliasRow:
    return AliasRow(alias, shares_of(alias.targets), earlier_targets(alias, served))


def _chosen(request: web.Request, versions: Sequence[Version], aliases: Sequence[Alias]) -> Version | None:
    """Return the version of `?version=`, by default that of `latest` or the newest."""
    by_number = {each.version: each for each in versions}
    given = request.query.get("version")
    if given is not None:
        found = by_number.get(int(given)) if given.isascii() and given.isdecimal() and len(given) < 10 else None
        if found is None:
            raise RecordNotFound("The adapter has no version of this number.", param="version")
        return found
    latest = [target.version for alias in aliases if alias.alias == "latest" for target in alias.targets]
    return by_number.get(latest[0] if latest else -1) or (versions[-1] if versions else None)


def _uploaders(changes: Sequence[Change]) -> dict[int, str]:
    """Return the uploader of each version by number. Versions older than the recorded changes are absent."""
    pushes = [change for change in changes if change.action == "adapter.push"]
    return {change.detail.get("version", 0): change.actor_label or change.actor for change in pushes}


ACTIONS = {
    "adapter.push": "uploaded",
    "adapter.version": "changed",
    "adapter.alias": "moved",
    "adapter.rollback": "rolled back",
    "adapter.alias_delete": "deleted",
    "adapter.delete": "deleted",
    "adapter.golden": "golden answers",
}


def _what(change: Change) -> tuple[str, str]:
    """Return a change in words: the action, and its detail."""
    detail, words = change.detail, ACTIONS.get(change.action, change.action)
    if change.action == "adapter.push":
        return words, f"version {detail.get('version')}"
    return words, clipped(sentence(changes_of(change.action, detail, None), "→"))
