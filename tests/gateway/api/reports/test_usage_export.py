"""Export and removal of the ledger's rows: they add up to it, in bounded memory, and the sums outlive them."""

import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.api.reports import usage_export
from gateway.billing.writer import UsageWriter
from gateway.records.sql.database import Database
from gateway.usage_row import UsageRow
from testing.gateway.commands import Run, runner
from testing.gateway.rows import row
from testing.gateway.running import Gateway, until

THIS_MONTH = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
LAST_MONTH = (THIS_MONTH - timedelta(days=1)).replace(day=1)
EARLIER = (LAST_MONTH - timedelta(days=1)).replace(day=1)
DAY = "%Y-%m-%d"


@pytest.fixture
async def database(tmp_path: Path, starts_servers: None) -> AsyncIterator[Database]:
    """Return the gateway's database, for rows of usage."""
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    yield database
    await database.close()


@pytest.fixture
def run(gateway: Gateway) -> Run:
    return runner(gateway)


def rows(number: int, start: datetime, **changes: Any) -> list[UsageRow]:
    """Return rows, a minute and some microseconds apart. The names of every third one begin like a formula."""
    names = ("acme", "globex", "initech")
    return [
        row(
            f"req_{start:%y%m%d}_{i:06}",
            tenant=names[i % 3],
            tenant_id=f"t{i % 3}",
            end_user=f"=user {i}" if i % 3 else None,
            cost=1_000_001 + i,
            created_at=start + timedelta(minutes=i, microseconds=i),
            **changes,
        )
        for i in range(number)
    ]


async def test_rows_of_both_formats_add_up_to_the_ledger(run: Run, database: Database, tmp_path: Path):
    arro3 = pytest.importorskip("arro3.io", reason="reads Parquet")
    written = [*rows(250, EARLIER), *rows(2600, LAST_MONTH)]
    await UsageWriter(database).write(written)
    period = ("--since", LAST_MONTH.isoformat(), "--until", (LAST_MONTH + timedelta(minutes=2300)).isoformat())
    for more in ((), ("--tenant", "globex")):
        total = json.loads((await run("usage", *period, *more, "--json")).stdout)["total"]
        expected = [each for each in written[250:2550] if not more or each.tenant == "globex"]
        assert total["requests"] == len(expected)

        target = tmp_path / "rows.csv"
        await run("usage", "export", str(target), "--csv", *period, *more)
        found = list(csv.DictReader(io.StringIO(target.read_text())))
        assert [each["request_id"] for each in found] == [each.request_id for each in expected]
        assert [datetime.fromisoformat(each["created_at"]) for each in found] == [each.created_at for each in expected]
        assert sum(Decimal(each["cost"]) for each in found) == Decimal(total["cost"])
        assert {each["end_user"][:2] for each in found if each["end_user"]} == {"'="}

        target = tmp_path / "rows.parquet"
        await run("usage", "export", str(target), "--parquet", *period, *more)
        table = arro3.read_parquet(str(target)).read_all()
        columns = {name: [value.as_py() for value in table[name]] for name in table.column_names}
        assert sum(columns["cost"]) == Decimal(total["cost"])
        assert columns["end_user"] == [each.end_user for each in expected]
        assert columns["created_at"] == [each.created_at for each in expected]
        assert sum(columns["prompt_tokens"]) == total["prompt_tokens"]


async def test_the_gateway_encodes_few_rows_at_a_time(gateway: Gateway, database: Database, monkeypatch: Any):
    await UsageWriter(database).write(rows(700, LAST_MONTH))
    monkeypatch.setattr(usage_export, "ROW_GROUP", 100)
    monkeypatch.setattr(usage_export, "AT_ONCE", 30)
    held = []

    class Counted(usage_export.ParquetWriter):
        def rows(self, rows: Any) -> bytes:
            held.append(len(rows))
            return super().rows(rows)

    monkeypatch.setattr(usage_export, "ParquetWriter", Counted)
    assert (await gateway.admin.get("/admin/api/usage/rows?format=parquet")).status == 200
    assert sum(held) == 700
    assert max(held) < 130


async def test_a_broken_or_refused_export_leaves_no_file(run: Run, tmp_path: Path, gateway: Gateway, monkeypatch: Any):
    target = tmp_path / "out" / "rows.csv"
    target.parent.mkdir()
    assert (await run("usage", "export", str(target), code=2)).stderr == "Error: expected --parquet or --csv\n"
    period = ("--since", "2026-02-01", "--until", "2026-01-01")
    refused = await run("usage", "export", str(target), "--csv", *period, code=1)
    assert "'since' must not be after 'until'" in refused.stderr

    async def broken(*_: Any) -> AsyncIterator[bytes]:
        yield b"request_id\r\n"
        raise TimeoutError

    monkeypatch.setattr(usage_export, "_csv", broken)
    cut = await run("usage", "export", str(target), "--csv", code=1)
    assert "sent no whole file" in cut.stderr
    assert list(target.parent.iterdir()) == []
    path = "/admin/api/usage/rows?format=csv"
    acme = await gateway.tenant("acme")
    assert (await gateway.nobody.get(path)).status == 401
    assert (await acme.get(path)).status == 403
    assert (await gateway.admin.get("/admin/api/usage/rows?format=xml")).error["param"] == "format"


async def test_sums_go_to_a_file_of_each_format(run: Run, database: Database, tmp_path: Path, gateway: Gateway):
    await UsageWriter(database).write(rows(30, LAST_MONTH))
    for form in ("csv", "json", "parquet"):
        target = tmp_path / f"sums.{form}"
        await run("usage", "--by", "tenant,day", "--export", form, "--out", str(target))
        query = f"format={form}&group_by=tenant,day"
        assert target.read_bytes() == (await gateway.admin.get(f"/admin/api/usage/export?{query}")).body
    for wrong in (("--export", "csv"), ("--export", "csv", "--out", "f", "--top", "3"), ("--out", "f")):
        await run("usage", *wrong, code=2)


async def test_pruning_needs_a_yes_and_keeps_the_sums(run: Run, database: Database, gateway: Gateway):
    await UsageWriter(database).write([*rows(40, EARLIER), *rows(20, LAST_MONTH)])
    before = (await gateway.admin.get("/admin/api/usage?group_by=day")).json
    activity = f"/admin/api/activity?since={EARLIER:{DAY}}&until={LAST_MONTH:{DAY}}"
    charts = (await gateway.admin.get(activity)).json["total"]
    prune = ("usage", "prune", "--before", f"{LAST_MONTH:{DAY}}")

    asked = await run(*prune, code=2)
    expected = f"40 rows from before {LAST_MONTH:{DAY}}, with a cost of 40.00082 USD"
    assert asked.stderr.startswith(f"Error: nothing was removed: {expected}; to remove them: loraplex usage prune")
    assert (await run("requests", "--limit", "1000", "--csv")).stdout.count("req_") == 60

    assert (await run(*prune, "--yes")).stdout == "removed 40 rows with a cost of 40.00082 USD\n"
    assert (await run("requests", "--limit", "1000", "--csv")).stdout.count("req_") == 20
    assert (await gateway.admin.get("/admin/api/usage?group_by=day")).json == before
    assert (await gateway.admin.get(activity)).json["total"] == charts
    [entry] = (await gateway.admin.get("/admin/api/audit?action=usage.prune")).json["data"]
    assert entry["detail"] == {"before": f"{LAST_MONTH:{DAY}}", "rows": 40, "cost": "40.00082"}
    assert (await run(*prune, "--yes")).stdout == f"there are no rows from before {LAST_MONTH:{DAY}}\n"


@pytest.mark.parametrize("day", [LAST_MONTH + timedelta(days=1), THIS_MONTH, THIS_MONTH + timedelta(days=90)])
async def test_pruning_refuses_dates_of_the_present_and_the_last_month(day: datetime, run: Run, database: Database):
    await UsageWriter(database).write(rows(3, EARLIER))
    refused = await run("usage", "prune", "--before", f"{day:{DAY}}", "--yes", code=1)
    assert refused.stderr.startswith(f"Error: before: expected {LAST_MONTH:{DAY}} or an earlier date")
    assert (await run("requests", "--csv")).stdout.count("req_") == 3
    wrong = await run("usage", "prune", "--before", "yesterday", "--yes", code=1)
    assert wrong.stderr == "Error: before: expected a date such as 2026-01-31.\n"


async def test_pruning_goes_on_until_nothing_is_left(
    run: Run, database: Database, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.api.reports.usage_pruning.MAX_ROWS", 15)
    monkeypatch.setattr("gateway.records.maintenance.retention.AT_ONCE", 7)
    await UsageWriter(database).write(rows(40, EARLIER))
    done = await run("usage", "prune", "--before", f"{LAST_MONTH:{DAY}}", "--yes")
    assert done.stderr == "removed 15 of 40 rows\nremoved 30 of 40 rows\n"
    assert done.stdout == "removed 40 rows with a cost of 40.00082 USD\n"
    entries = (await gateway.admin.get("/admin/api/audit?action=usage.prune")).json["data"]
    assert [entry["detail"]["rows"] for entry in entries] == [10, 25, 40]
    viewer = await gateway.admin.post("/admin/api/keys", {"role": "billing"})
    billing = gateway.client(viewer.json["key"])
    body = {"before": f"{LAST_MONTH:{DAY}}"}
    assert (await billing.post("/admin/api/usage/prune?dry_run=true", body)).status == 403


async def test_charts_of_an_earlier_release_are_rebuilt_before_their_rows_go(
    run: Run, database: Database, gateway: Gateway
):
    from sqlalchemy import delete

    from gateway.records.activity.tables import ACTIVITY

    await UsageWriter(database).write(rows(40, EARLIER))
    activity = f"/admin/api/activity?since={EARLIER:{DAY}}&until={LAST_MONTH:{DAY}}"
    charts = (await gateway.admin.get(activity)).json["total"]
    async with database.write() as connection:
        for table in ACTIVITY.values():
            await connection.execute(delete(table))
    assert (await gateway.admin.get(activity)).json["total"]["requests"] == 0
    await run("usage", "prune", "--before", f"{LAST_MONTH:{DAY}}", "--yes")

    async def rebuilt() -> bool:
        return bool((await gateway.admin.get(activity)).json["total"] == charts)

    await until(rebuilt)
