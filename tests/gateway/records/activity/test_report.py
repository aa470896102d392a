"""Activity for charts: exact sums by tenant, model and engine, curves that add up to them, and percentiles."""

import asyncio
import random
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gateway.billing.writer import UsageWriter
from gateway.errors import BadRequest, Unavailable
from gateway.records.activity import report as activity_report
from gateway.records.activity.figures import ActivityReport, Curve, percentiles
from gateway.records.activity.report import Activity, GroupBy, Order, Scope
from gateway.records.activity.tables import BOUNDS
from gateway.records.sql.database import Database
from gateway.usage_row import UsageRow
from testing.gateway.rows import row
from tests.gateway.conftest import BOTH, new_database

NOW = datetime.now(UTC)
MODELS = ("base", "pirate", "terse", "pirate*0.5+terse*0.5", "pirate*0.4+terse*0.6")
STATUSES = ("ok", "ok", "ok", "cancelled", "error", "limited")


@pytest.fixture(autouse=True)
def at_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set NOW at the beginning of each test, which may run an hour after the import."""
    monkeypatch.setattr(sys.modules[__name__], "NOW", datetime.now(UTC))


def some_rows(number: int, days: float) -> list[UsageRow]:
    """Return random rows of the last `days`, more of them lately."""
    chance = random.Random(5)
    rows = []
    for i in range(number):
        model, tenant = chance.choice(MODELS), chance.randrange(4)
        status = chance.choice(STATUSES)
        rows.append(
            row(
                f"r{i}",
                tenant_id=f"t{tenant}",
                tenant=f"n{tenant}",
                model=model,
                adapter_digest=None if model == "base" else "d",
                engine=chance.choice(["http://a", "http://b", None]),
                created_at=NOW - timedelta(days=days * chance.random() ** 3),
                status=status,
                error_code=f"{status}_code" if status in ("error", "limited") else None,
                prompt_tokens=chance.randrange(100),
                completion_tokens=chance.randrange(100),
                cached_tokens=chance.randrange(10),
                cost=chance.randrange(1000),
                queue_ms=chance.randrange(50),
                latency_ms=round(chance.lognormvariate(6, 2)),
                ttft_ms=chance.choice([None, 30]),
            )
        )
    return rows


ROWS = some_rows(1500, 70)


@pytest.fixture(scope="module", params=BOTH)
def filled_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> str:
    """Return the URL of a database with ROWS, which the tests of this file only read."""
    if request.param == "postgres":
        server, template = request.getfixturevalue("postgres"), request.getfixturevalue("migrated_template")
        url = server.get_uri(database=asyncio.run(new_database(server, template)))
    else:
        path = shutil.copy(migrated, tmp_path_factory.mktemp("activity"))
        url = f"sqlite:///{path}"
    asyncio.run(fill(url))
    return url


async def fill(url: str) -> None:
    database = Database(url)
    writer = UsageWriter(database)
    for start in range(0, len(ROWS), 400):
        await writer.write(ROWS[start : start + 450])
    await database.close()


@pytest.fixture
async def activity(filled_url: str) -> AsyncIterator[Activity]:
    database = Database(filled_url)
    yield Activity(database)
    await database.close()


def sums(rows: list[UsageRow]) -> tuple[int, ...]:
    """Return requests, failures, tokens, cost and waits."""
    failed = sum(each.status not in ("ok", "cancelled") for each in rows)
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "queue_ms")
    return len(rows), failed, *(sum(getattr(each, name) or 0 for each in rows) for name in names)


def shown(figures: Any) -> tuple[int, ...]:
    names = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "queue_ms")
    return tuple(getattr(figures, name) for name in names)


def in_period(rows: list[UsageRow], report: ActivityReport) -> list[UsageRow]:
    return [each for each in rows if report.since <= each.created_at]


def in_the_one_before(rows: list[UsageRow], report: ActivityReport) -> list[UsageRow]:
    return [each for each in rows if report.before_since <= each.created_at < report.since]


def model_of(each: UsageRow) -> tuple[str | None, str]:
    return (None, "base") if each.model == "base" else (each.tenant, "(mixtures)" if "*" in each.model else each.model)


PERIODS = [timedelta(minutes=50), timedelta(hours=20), timedelta(days=6), timedelta(days=30)]


@pytest.mark.parametrize("length", PERIODS, ids=str)
async def test_sums_are_those_of_the_rows(activity: Activity, length: timedelta):
    report = await activity.report(since=NOW - length)
    rows = in_period(ROWS, report)
    assert rows
    assert shown(report.total) == sums(rows)
    assert shown(report.before) == sums(in_the_one_before(ROWS, report))
    assert report.total.statuses == {s: n for s in set(STATUSES) if (n := sum(r.status == s for r in rows))}
    assert report.active_tenants == len({each.tenant for each in rows})
    starts = [*(moment.timestamp() for moment in report.starts), report.until.timestamp() + report.step]
    for i, start in enumerate(starts[:-1]):
        here = [each for each in rows if start <= each.created_at.timestamp() < start + report.step]
        found = tuple(getattr(report.curve, name)[i] for name in Curve.__struct_fields__)
        assert found == sums(here)[:6]
    assert sum(report.curve.requests) == report.total.requests


GROUPINGS: list[tuple[GroupBy, Callable[[UsageRow], Any]]] = [
    ("tenant", lambda each: (None, each.tenant)),
    ("model", model_of),
    ("engine", lambda each: (None, each.engine or "")),
]


@pytest.mark.parametrize("order", ["requests", "tokens", "cost"])
@pytest.mark.parametrize(("group_by", "key"), GROUPINGS)
async def test_groups_and_the_rest(activity: Activity, group_by: GroupBy, key: Any, order: Order):
    report = await activity.report(since=NOW - timedelta(days=9), group_by=group_by, order=order, top=2)
    rows, before = in_period(ROWS, report), in_the_one_before(ROWS, report)
    groups: dict[Any, list[UsageRow]] = {}
    for each in rows:
        groups.setdefault(key(each), []).append(each)
    assert report.num_groups == len(groups)
    assert report.active_tenants == len({each.tenant for each in rows})

    def amount(of: Any) -> int:
        values = sums(groups[of])
        return {"requests": values[0], "tokens": values[2] + values[4], "cost": values[5]}[order]

    names = [(group.tenant, group.name) for group in report.groups]
    assert [amount(name) for name in names] == sorted((amount(name) for name in groups), reverse=True)[:2]
    for group, name in zip(report.groups, names, strict=True):
        assert shown(group.sums) == sums(groups[name])
        assert shown(group.before) == sums([each for each in before if key(each) == name])
        assert sum(group.curve.cost) == group.sums.cost
    assert report.others is not None
    parts = [*(group.curve for group in report.groups), report.others]
    for name in Curve.__struct_fields__:
        lists = [getattr(part, name) for part in parts]
        assert [sum(values) for values in zip(*lists, strict=True)] == getattr(report.curve, name)


@pytest.mark.parametrize(
    ("scope", "matches"),
    [
        (Scope(tenant="n1"), lambda each: each.tenant == "n1"),
        (Scope(tenant_id="t1", model="terse"), lambda each: (each.tenant, each.model) == ("n1", "terse")),
        (Scope(tenant_id="t1", model="base"), lambda each: (each.tenant, each.model) == ("n1", "base")),
        (Scope(model="base"), lambda each: each.model == "base"),
        (Scope(engine="http://b"), lambda each: each.engine == "http://b"),
        (Scope(tenant="none"), lambda each: False),
    ],
)
async def test_scopes(activity: Activity, scope: Scope, matches: Any):
    report = await activity.report(since=NOW - timedelta(days=9), scope=scope)
    assert shown(report.total) == sums([each for each in in_period(ROWS, report) if matches(each)])


async def test_a_tenants_models_and_a_models_tenants(activity: Activity):
    since = NOW - timedelta(days=9)
    models = await activity.report(since=since, scope=Scope(tenant_id="t2"), group_by="model")
    assert sorted(group.name for group in models.groups) == ["(mixtures)", "base", "pirate", "terse"]
    assert models.others is None
    tenants = await activity.report(since=since, scope=Scope(model="base"), group_by="tenant")
    assert {group.tenant for group in tenants.groups} == {"n0", "n1", "n2", "n3"}
    assert sum(group.sums.requests for group in tenants.groups) == tenants.total.requests
    with pytest.raises(BadRequest, match=r"^group_by: there are no sums"):
        await activity.report(since=since, scope=Scope(tenant="n1"), group_by="engine")


async def test_the_cost_of_a_day_is_that_of_its_rows(activity: Activity):
    today = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
    for ago in (0, 1, 8, 400):
        day = today - timedelta(days=ago)
        rows = [each for each in ROWS if day <= each.created_at < day + timedelta(days=1)]
        assert bool(rows) == (ago < 400)
        assert await activity.cost_of_day(day) == sum(each.cost for each in rows)


async def test_failures_by_code(activity: Activity):
    report = await activity.report(since=NOW - timedelta(hours=20), scope=Scope(tenant="n1"))
    rows = [each for each in in_period(ROWS, report) if each.tenant == "n1"]
    expected = {code: sum(each.error_code == code for each in rows) for code in ("error_code", "limited_code")}
    assert {each.code: each.requests for each in report.refusals if each.requests} == expected
    assert all(sum(each.curve) == each.requests for each in report.refusals)
    everyone = await activity.report(since=NOW - timedelta(days=6))
    every_row = in_period(ROWS, everyone)
    assert sum(each.requests for each in everyone.refusals) == sum(each.error_code is not None for each in every_row)


async def test_periods_without_sums_are_refused(activity: Activity):
    for which in (
        {"since": NOW + timedelta(hours=1)},
        {"since": NOW, "until": NOW - timedelta(hours=1)},
        {"since": NOW - timedelta(days=5), "step": 60},
        {"since": NOW - timedelta(days=3000), "step": 3600},
    ):
        with pytest.raises(BadRequest, match=r"^(since|step): expected"):
            await activity.report(**which)


async def test_a_period_in_the_past(activity: Activity):
    since, until = NOW - timedelta(days=20), NOW - timedelta(days=10)
    report = await activity.report(since=since, until=until)
    rows = [each for each in ROWS if report.since <= each.created_at < report.until]
    assert shown(report.total) == sums(rows)
    assert timedelta(0) <= report.until - until < timedelta(hours=1)


CHANCE = np.random.default_rng(3)
SAMPLES = {
    **{f"log-normal {number}": CHANCE.lognormal(7, 1.5, number) for number in (2, 5, 60, 5000)},
    "single": np.array([120_015]),
    "far apart": np.array([40, 120_015]),
    "above the last bound": np.array([301_000, 400_000]),
    "mostly equal": np.array([121_000] * 50 + [264_000]),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_percentiles_lie_in_the_bucket_of_the_exact_ones_and_not_above_the_largest(sample: Any):
    """Some were at the end of their bucket: 264 s where no request took more than 120 s."""
    values = np.ceil(sample)
    buckets = np.bincount(np.searchsorted(BOUNDS, values), minlength=25).tolist()
    found = percentiles(buckets, int(max(values)))
    assert found is not None
    for quantile, estimate in ((50, found.p50), (95, found.p95), (99, found.p99)):
        exact = np.percentile(values, quantile, method="inverted_cdf")
        assert np.searchsorted(BOUNDS, estimate) == np.searchsorted(BOUNDS, exact)
        # Bounds are 2.5 times apart at most, in the range of these values.
        assert estimate <= max(values)
        assert 1 / 2.5 <= estimate / exact <= 2.5
        if len(values) == 5000:
            assert estimate == pytest.approx(exact, rel=0.1)
        if quantile == 99 and len(values) < 100:
            assert estimate == exact == max(values)


def test_percentiles_without_the_largest_value_lie_in_their_bucket():
    """A maximum below the last bucket is that of the rows of newer releases only."""
    assert percentiles([0] * 25) is None
    buckets = [0] * 22 + [10, 10, 0]
    for largest in (0, 60_000, 120_000):
        found = percentiles(buckets, largest)
        assert found is not None
        assert 60_000 < found.p50 < 120_000 < found.p95 <= found.p99 < 300_000
        assert found == percentiles(buckets)


@pytest.mark.parametrize("length", PERIODS, ids=str)
async def test_no_percentile_is_above_the_longest_time(activity: Activity, length: timedelta):
    report = await activity.report(since=NOW - length, group_by="tenant")
    rows = in_period(ROWS, report)
    sets = [(report.total, rows), (report.before, in_the_one_before(ROWS, report))]
    sets += [(group.sums, [each for each in rows if each.tenant == group.name]) for group in report.groups]
    starts = [each.timestamp() for each in report.starts]
    for latency, start in zip(report.times.latency, starts, strict=True):
        here = [each for each in rows if start <= each.created_at.timestamp() < start + report.step]
        assert (latency is None) == (not here)
        assert latency is None or latency.p50 <= latency.p99 <= max(each.latency_ms for each in here)
    for figures, among in sets:
        assert figures.latency is not None
        assert figures.ttft is not None
        exact = np.percentile([each.latency_ms for each in among], 99, method="inverted_cdf")
        assert figures.latency.p99 <= max(each.latency_ms for each in among)
        assert np.searchsorted(BOUNDS, figures.latency.p99) == np.searchsorted(BOUNDS, exact)
        assert figures.ttft.p99 <= 30


async def test_models_of_all_tenants_are_found_among_the_first_tenants(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(activity_report, "OWNERS_EACH", 1)
    models = [(0, "pirate")] * 9 + [(i, f"m{j}") for i in range(1, 5) for j in range(i)]
    rows = [
        row(f"r{i}", tenant_id=f"t{owner}", tenant=f"n{owner}", model=model, adapter_digest="d", created_at=NOW)
        for i, (owner, model) in enumerate(models)
    ]
    await UsageWriter(database).write(rows)
    activity, since = Activity(database), NOW - timedelta(hours=2)
    first = await activity.report(since=since, group_by="model", top=1)
    # The tenant of four small models comes second, so it may have the second model, but not the first.
    assert [(each.tenant, each.name, each.sums.requests) for each in first.groups] == [("n0", "pirate", 9)]
    assert (first.num_groups, first.active_tenants) == (None, 5)
    assert first.others is not None
    second = await activity.report(since=since, group_by="model", top=2)
    assert [each.sums.requests for each in second.groups] == [9, 1]
    assert (second.num_groups, second.active_tenants) == (11, 5)


async def test_totals_and_groups_are_read_at_the_same_time(database: Database, monkeypatch: pytest.MonkeyPatch):
    await UsageWriter(database).write(ROWS[:50])
    read, most, now = database.read, 0, 0

    @asynccontextmanager
    async def counted() -> AsyncIterator[Any]:
        nonlocal most, now
        now += 1
        most = max(most, now)
        async with read() as connection:
            yield connection
        now -= 1

    monkeypatch.setattr(database, "read", counted)
    await Activity(database).report(since=NOW - timedelta(days=2), group_by="model")
    assert (most, now) == (2, 0)


async def test_a_failed_half_of_a_report_ends_the_other(database: Database, monkeypatch: pytest.MonkeyPatch):
    read, opened, forever, calls, held = database.read, asyncio.Event(), asyncio.Event(), 0, 0

    @asynccontextmanager
    async def first_fails() -> AsyncIterator[Any]:
        nonlocal calls, held
        calls += 1
        if calls == 1:
            await opened.wait()
            raise Unavailable("The database is away.")
        async with read() as connection:
            held += 1
            opened.set()
            try:
                await forever.wait()
                yield connection
            finally:
                held -= 1

    monkeypatch.setattr(database, "read", first_fails)
    with pytest.raises(Unavailable, match="away"):
        await Activity(database).report(since=NOW - timedelta(days=2), group_by="model")
    assert (calls, held) == (2, 0)


async def test_a_report_without_times_has_the_same_sums(database: Database):
    await UsageWriter(database).write(ROWS)
    activity = Activity(database)
    for since in (NOW - timedelta(days=1), NOW - timedelta(days=40)):
        period: dict[str, Any] = {"since": since, "until": NOW, "group_by": "model"}
        whole, less = await activity.report(**period), await activity.report(**period, has_times=False)
        assert set(less.times.latency) == {None} != set(whole.times.latency)
        assert less.total.latency is None
        alike = {"times": whole.times}
        for name in ("total", "before"):
            sums = getattr(whole, name)
            alike[name] = replace(getattr(less, name), latency=sums.latency, ttft=sums.ttft)
        assert replace(less, **alike) == whole
