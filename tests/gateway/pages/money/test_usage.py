"""Page of usage: rankings, comparison, charts, exports that add up to the ledger, and hostile names."""

import csv
import html
import io
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import func, select

from gateway.api.reports.usage_export import UsageExport
from gateway.billing.writer import UsageWriter
from gateway.pages.money.usage import UsagePages
from gateway.records.maintenance.retention import Retention
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from gateway.records.usage import end_user_sums
from gateway.records.usage.ranking import UsageRanking
from gateway.records.usage.report import UsageReport
from gateway.usage_row import UsageRow
from testing.gateway.rows import row
from tests.gateway.pages.conftest import Reader, World
from tests.gateway.pages.records import HOSTILE, fill, serving, unsafe

NOON = datetime(2026, 3, 10, 12, 20, tzinfo=UTC)
MARCH = "since=2026-03-01&until=2026-04-01"


@pytest.fixture
async def reader(starts_servers: None, world: World, database: Database) -> AsyncIterator[Reader]:
    export = UsageExport(UsageReport(database), "EUR")
    pages = UsagePages(world.frame, UsageRanking(database), export, "EUR")
    handlers = {"/admin/usage": pages.page, "/admin/usage/export": pages.export}
    async with serving(handlers) as reader:
        yield reader


def rows(number: int = 400) -> list[UsageRow]:
    """Return usage of twelve tenants, the first of which spends most; t0 has five models and three keys."""
    return [
        row(
            f"req_{i:04}",
            created_at=NOON + timedelta(hours=i % 300),
            tenant_id=f"t{i % 12}",
            tenant=f"n{i % 12:02}",
            key_id=f"k{i % 5 % 3}",
            model=f"m{i % 5}",
            end_user=("ann", None)[i % 2],
            cost=1_000_000 * (12 - i % 12) + i,
            prompt_tokens=i,
            completion_tokens=7,
        )
        for i in range(number)
    ]


def table(text: str) -> list[list[str]]:
    """Return the cells of the page's table as text."""
    [body] = re.findall(r'id="usage">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    found = []
    for line in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL):
        cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL)
        found.append([" ".join(html.unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in cells])
    return found


def chart(text: str) -> Any:
    [data] = re.findall(r'data-chart="([^"]*)"', text)
    return json.loads(html.unescape(data))


async def test_tenants_are_ranked_by_their_cost(reader: Reader, database: Database):
    await fill(database, *rows())
    _, text = await reader.get(f"/admin/usage?{MARCH}")
    assert [line[0] for line in table(text)] == [f"n{i:02}" for i in range(12)]
    _, text = await reader.get(f"/admin/usage?{MARCH}&sort=name")
    assert [line[0] for line in table(text)] == [f"n{i:02}" for i in range(12)]
    _, text = await reader.get(f"/admin/usage?{MARCH}&sort=cost")
    assert [line[0] for line in table(text)] == [f"n{i:02}" for i in reversed(range(12))]


@pytest.mark.parametrize("group_by", ["tenant", "model", "key", "end_user", "hour", "day", "month"])
async def test_every_grouping_has_the_same_total(reader: Reader, database: Database, group_by: str):
    await fill(database, *rows(120))
    whole = sum(each.cost for each in rows(120))
    _, text = await reader.get(f"/admin/usage?{MARCH}&group_by={group_by}")
    assert f'title="{whole // 10**6:,}.{whole % 10**6:06}'.rstrip("0") in text
    data = chart(text)
    assert sum(sum(each["values"]) for each in data["series"]) == pytest.approx(whole / 10**6)
    assert data["unit"] == "EUR"
    assert len(table(text)) == min(50, len({_group(each, group_by) for each in rows(120)}))


def _group(each: UsageRow, group_by: str) -> Any:
    starts = {"hour": "%Y-%m-%d %H", "day": "%Y-%m-%d", "month": "%Y-%m"}
    if group_by in starts:
        return f"{each.created_at:{starts[group_by]}}"
    return each.tenant, {"tenant": "", "model": each.model, "key": each.key_id, "end_user": each.end_user}[group_by]


async def test_the_chart_has_eight_groups_and_the_others(reader: Reader, database: Database):
    await fill(database, *rows())
    _, text = await reader.get(f"/admin/usage?{MARCH}&measure=requests")
    data = chart(text)
    assert [each["name"] for each in data["series"]][-1] == "others"
    assert len(data["series"]) == 9
    assert sum(sum(each["values"]) for each in data["series"]) == 400
    # A step without usage has a place of its own.
    steps = {b - a for a, b in zip(data["times"], data["times"][1:], strict=False)}
    assert steps == {86400}


@pytest.mark.parametrize(
    ("group_by", "period", "points"),
    [
        ("day", "since=2026-03-10&until=2026-03-11", 12),
        ("day", "since=2026-03-10&until=2026-03-12", 2),
        ("month", "since=2026-03-10&until=2026-03-12", 36),
        ("month", MARCH, 13),
        ("month", "since=2026-02-10&until=2026-03-12", 1),
        ("hour", "since=2026-03-10T12:00&until=2026-03-10T13:00", 1),
    ],
)
async def test_the_chart_of_one_day_or_month_has_finer_steps(
    reader: Reader, database: Database, group_by: str, period: str, points: int
):
    """On the first of a month, the chart of this month by day had a single value and no curve.

    A chart begins with the first use, which is at 12:00 on 10 March.
    """
    await fill(database, *rows())
    _, text = await reader.get(f"/admin/usage?{period}&group_by={group_by}")
    assert len(chart(text)["times"]) == points


async def test_a_period_is_compared_with_the_one_before(reader: Reader, database: Database):
    await fill(
        database,
        row("req_1", created_at=NOON, cost=300, tenant="acme"),
        row("req_2", created_at=NOON - timedelta(days=3), cost=200, tenant="acme"),
        row("req_3", created_at=NOON, cost=50, tenant="globex", tenant_id="t2"),
    )
    _, text = await reader.get("/admin/usage?since=2026-03-09&until=2026-03-11")
    acme, globex = table(text)
    assert acme[3] == "▲ 50 % more"
    assert globex[3] == "new"
    assert re.search(r"75 %<span class=\"sr\"> more than the period before, 7 Mar 2026 to 8 Mar 2026<", text)


async def test_filters_narrow_everything(reader: Reader, database: Database):
    await fill(database, *rows())
    _, text = await reader.get(f"/admin/usage?{MARCH}&tenant=n00&group_by=model&measure=requests")
    wanted = [each for each in rows() if each.tenant == "n00"]
    assert sum(int(line[2]) for line in table(text)) == len(wanted)
    assert sum(sum(each["values"]) for each in chart(text)["series"]) == len(wanted)
    assert 'href="/admin/requests?model=m' in text


async def test_requests_without_an_end_user_have_a_group(reader: Reader, database: Database):
    await fill(database, *rows(24))
    _, text = await reader.get(f"/admin/usage?{MARCH}&group_by=end_user&tenant=n01")
    assert [line[0] for line in table(text)] == ["none given"]
    assert [each["name"] for each in chart(text)["series"]] == ["n01 / none given"]


async def test_a_ranking_of_end_users_begins_with_a_whole_day(reader: Reader, database: Database):
    """End users have sums by day; with a filter by model the rows are read, and the period is not extended."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    yesterday, before = today - timedelta(days=1), today - timedelta(days=1, minutes=1)
    used = [row("a", end_user="first", created_at=yesterday), row("b", end_user="early", created_at=before)]
    await fill(database, *used)
    for path, is_noted in (
        ("24h&group_by=end_user", True),
        ("24h&group_by=end_user&model=base", False),
        ("24h", False),
    ):
        _, text = await reader.get(f"/admin/usage?period={path}")
        assert ("the period begins at 00:00 UTC" in text) == is_noted, path
        if is_noted:
            assert [line[0] for line in table(text)] == ["first"]
            assert f"{yesterday:%Y-%m-%d} 00:00:00" in text


async def test_end_users_of_the_whole_period_are_ranked(
    reader: Reader, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """Sixty end users have usage on one to three days each; two pages show them all."""
    amounts = {f"user-{i:02}": (i % 3 + 1, 10**6 * (60 - i)) for i in range(60)}
    used = [
        row(f"req_{user}-{j}", end_user=user, cost=cost, created_at=NOON + timedelta(days=i % 20 + j))
        for i, (user, (number, cost)) in enumerate(amounts.items())
        for j in range(number)
    ]
    await fill(database, *used)
    whole = {user: number * cost for user, (number, cost) in amounts.items()}
    expected = sorted(whole, key=lambda user: (-whole[user], user))
    pages = [table((await reader.get(f"/admin/usage?{MARCH}&group_by=end_user&page={page}"))[1]) for page in (1, 2)]
    assert [len(page) for page in pages] == [50, 10]
    lines = [line for page in pages for line in page]
    assert [(line[0], int(line[2])) for line in lines] == [(user, amounts[user][0]) for user in expected]
    monkeypatch.setattr(end_user_sums, "MAX_RANKED", 3)
    for path, is_noted in ((f"{MARCH}&group_by=end_user", True), (f"{MARCH}&group_by=tenant", False)):
        _, text = await reader.get(f"/admin/usage?{path}")
        assert ("too many end users to rank" in text) == is_noted


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
async def test_an_export_adds_up_to_the_ledger(reader: Reader, database: Database, form: str, tmp_path: Any):
    await fill(database, *rows())
    for group_by in ("tenant", "tenant,model,hour", "tenant,key,end_user,day"):
        response, found = await export(reader, f"{MARCH}&group_by={group_by}&format={form}", form, tmp_path)
        if found is None:
            pytest.skip("no reader of Parquet")
        async with database.read() as connection:
            ledger = (await connection.execute(select(func.sum(usage.c.cost), func.count()))).one()
        assert sum((Decimal(str(each["cost"])) for each in found), Decimal(0)) == Decimal(int(ledger[0])) / 10**6
        assert sum(int(each["requests"]) for each in found) == ledger[1]
        assert {each["currency"] for each in found} == {"EUR"}
        name = f'attachment; filename="usage-{"-".join(sorted_groups(group_by))}.{form}"'
        assert response.headers["Content-Disposition"] == name


def sorted_groups(group_by: str) -> list[str]:
    order = ("tenant", "model", "version", "key", "end_user", "hour", "day", "month")
    return [name for name in order if name in group_by.split(",")]


async def export(reader: Reader, query: str, form: str, folder: Any) -> tuple[Any, list[dict[str, Any]] | None]:
    """Return the answer and the rows of an export; None for the rows if nothing here reads them."""
    async with reader.session.get(f"{reader.url}/admin/usage/export?{query}") as response:
        body = await response.read()
    if form == "csv":
        return response, list(csv.DictReader(io.StringIO(body.decode())))
    if form == "json":
        return response, json.loads(body)
    try:
        from arro3.io import read_parquet
    except ImportError:
        return response, None
    (folder / "usage.parquet").write_bytes(body)
    table = read_parquet(str(folder / "usage.parquet")).read_all()
    columns = {name: [value.as_py() for value in table[name]] for name in table.column_names}
    return response, [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


async def test_an_export_is_of_one_moment(reader: Reader, database: Database):
    """Rows that are written while an export is read are in none of its groups."""
    await fill(database, *rows(3000))
    report = UsageReport(database)
    from gateway.records.usage.rows import UsageFilter

    found, wrote = 0, False
    async for part in report.stream(("model", "hour"), UsageFilter(), None, None, at_once=100):
        found += sum(sums.cost for sums in part)
        if not wrote:
            wrote = True
            await UsageWriter(database).write(
                [row("req_late", created_at=NOON + timedelta(days=20), cost=5, model="m9")]
            )
    assert wrote
    assert found == sum(each.cost for each in rows(3000))


async def test_wrong_parameters_are_named(reader: Reader):
    for query in ("group_by=colour", "measure=weight", "period=year", "since=x", "sort=x"):
        response, text = await reader.get(f"/admin/usage?{query}")
        assert response.status == 400, query
        assert re.search("expected", text, re.IGNORECASE)
    for query, param in {"format=xls": "format", "format=csv&group_by=x": "group_by"}.items():
        response, text = await reader.get(f"/admin/usage/export?{query}")
        assert (response.status, json.loads(text)["error"]["param"]) == (400, param)
    response, text = await reader.get("/admin/usage/export?format=csv&group_by=end_user")
    assert (response.status, json.loads(text)["error"]["param"]) == (400, "since")


async def test_an_empty_period_says_what_to_do(reader: Reader):
    _, text = await reader.get(f"/admin/usage?{MARCH}")
    assert "No usage in this period." in text
    assert "period=30d" in text


async def test_hostile_names_are_inert(reader: Reader, database: Database):
    hostile = {"tenant": HOSTILE[:64], "model": HOSTILE, "end_user": HOSTILE}
    await fill(database, row("req_1", created_at=NOON, **hostile))
    for group_by in ("tenant", "model", "key", "end_user"):
        _, text = await reader.get(f"/admin/usage?{MARCH}&group_by={group_by}")
        assert unsafe(text) == []
    await fill(database, row("req_2", created_at=NOON, model="=1+1", end_user="@x"))
    _, text = await reader.get(f"/admin/usage/export?{MARCH}&format=csv&group_by=model,end_user")
    assert "'=1+1" in text
    assert "'@x" in text


async def test_removed_usage_is_noted(reader: Reader, database: Database):
    """Retention has removed the rows of the first day of two, and their sums by end user."""
    later = NOON + timedelta(days=2)
    used = (row("r1", end_user="gone", created_at=NOON), row("r2", end_user="left", created_at=later))
    await fill(database, *used)
    await Retention(database).prune_usage(datetime.now(UTC) - later + timedelta(hours=1))
    for path, is_noted in ((f"{MARCH}&group_by=end_user", True), (f"{MARCH}&group_by=tenant", False)):
        _, text = await reader.get(f"/admin/usage?{path}")
        assert ("end users may be missing" in text) == is_noted
