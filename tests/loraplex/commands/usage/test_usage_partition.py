"""`loraplex usage partition` beside a running gateway: ids with a time, the request log, exports, prune and backups."""

import asyncio
import csv
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

from gateway.billing.writer import UsageWriter
from gateway.records.partitions import request_ids
from gateway.records.partitions.partitions import next_month
from gateway.records.sql.database import MIGRATION_LOCK, Database
from loraplex.cli import main
from testing.gateway.commands import runner
from testing.gateway.rows import row
from testing.gateway.running import Client, running, settings, until
from testing.gateway.upstream import Upstream
from testing.stack import ROOT

PROGRAM = "from loraplex.cli import main; main()"


def clean(url: str) -> dict[str, Any]:
    return {name: None for name in os.environ if name.startswith("LORAPLEX_")} | {"LORAPLEX_DATABASE_URL": url}


async def run(url: str, *arguments: str, code: int = 0) -> str:
    """Run a command on a database and return its output."""
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=clean(url))
    assert result.exit_code == code, result.output
    return result.output


async def ask(acme: Client) -> str:
    """Send a request and return its id, once its row is in the ledger."""
    answer = await acme.chat()
    assert answer.status == 200
    request_id = answer.headers["x-request-id"]

    async def written() -> bool:
        return (await acme.get(f"/v1/requests/{request_id}")).status == 200

    await until(written)
    return request_id


async def where(url: str) -> dict[str, str]:
    """Return each row's table by its id."""
    async with connected(url) as connection:
        return dict(await connection.fetch("SELECT request_id, tableoid::regclass::text FROM usage"))


async def test_a_running_gateway_goes_on_with_partitions(
    migrated_postgres_url: str,
    tmp_path: Path,
    model_dir: Path,
    upstream: Upstream,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(request_ids, "LOOK_SECONDS", 0.05)
    url, month = migrated_postgres_url, f"usage_{next_month(datetime.now(UTC).date()):%Y%m}"
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url, database_url=url)) as gateway:
        acme, admin = await gateway.tenant("acme"), runner(gateway)
        before = await ask(acme)
        out = await run(url, "usage", "partition")
        assert out.startswith("reading usage once")
        assert f"usage is partitioned now: {month}, " in out

        async def timed() -> bool:
            return (await ask(acme)).startswith(f"req_g{datetime.now(UTC):%Y%m}")

        await until(timed)
        after = await ask(acme)
        assert (len(before), len(after)) == (36, 36)
        found = await where(url)
        assert (found[before], found[after]) == ("usage_first", "usage_first")
        assert (await run(url, "usage", "partition")).startswith("usage was partitioned already: ")

        target = tmp_path / "rows.csv"
        await admin("usage", "export", str(target), "--csv")
        with target.open() as file:
            assert {line["request_id"] for line in csv.DictReader(file)} == found.keys()
        database = Database(url)
        await UsageWriter(database).write([row("req_0", created_at=datetime(2026, 1, 1, tzinfo=UTC), cost=5)])
        await database.close()
        pruned = await admin("usage", "prune", "--before", "2026-02-01", "--yes")
        assert pruned.stdout.startswith("removed 1 rows with a cost of 0.000005 ")
        assert (await where(url)).keys() == found.keys()


async def test_a_backup_of_partitions_is_restored_into_one_table(
    migrated_postgres_url: str, postgres_url: str, tmp_path: Path
):
    url, store = migrated_postgres_url, str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    await run(url, "usage", "partition")
    later, database = datetime.now(UTC) + timedelta(days=31), Database(url)
    await UsageWriter(database).write([row(f"req_g{later:%Y%m%d%H%M%S}{'0' * 17}", created_at=later), row("req_0")])
    await database.close()
    assert len(set((await where(url)).values())) == 2
    backup = str(tmp_path / "file.backup")
    await run(url, "backup", backup, "--adapter-store", store)
    await run(postgres_url, "restore", backup, "--adapter-store", store)
    assert (await where(postgres_url)) == dict.fromkeys(await where(url), "usage")
    await run(postgres_url, "usage", "partition")
    assert (await where(postgres_url)) == dict.fromkeys(await where(url), "usage_first")


async def test_a_backup_is_restored_into_the_partitions_of_its_months(
    migrated_postgres_url: str, postgres_url: str, tmp_path: Path
):
    """The default partition gets no month, because each later month's partition has to read it."""
    (tmp_path / "store").mkdir()
    backup, store = str(tmp_path / "file.backup"), str(tmp_path / "store")
    await run(migrated_postgres_url, "usage", "partition")
    database, month, expected = Database(migrated_postgres_url), datetime.now(UTC).date(), {}
    for number in range(8):
        request_id = f"req_g{month:%Y%m%d}000000{number:017x}"
        expected[request_id] = f"usage_{month:%Y%m}" if number else "usage_first"
        await UsageWriter(database).write([row(request_id)])
        month = next_month(month)
    expected |= {"req_0": "usage_first", "req_g29999999": "usage_default"}
    await UsageWriter(database).write([row("req_0"), row("req_g29999999")])
    await database.close()
    assert "usage_default" in (await where(migrated_postgres_url)).values()
    await run(migrated_postgres_url, "backup", backup, "--adapter-store", store)
    await run(postgres_url, "migrate")
    await run(postgres_url, "usage", "partition")
    await run(postgres_url, "restore", backup, "--adapter-store", store)
    assert await where(postgres_url) == expected


async def test_errors_have_one_line(migrated: Path, postgres_url: str):
    lines = [
        await run(f"sqlite:///{migrated}", "usage", "partition", code=1),
        await run(postgres_url, "usage", "partition", code=1),
    ]
    assert lines[0] == "Error: LORAPLEX_DATABASE_URL: partitions need PostgreSQL; SQLite has none\n"
    assert "run `loraplex migrate`" in lines[1]
    assert len(lines[1].splitlines()) == 1


async def test_a_killed_command_leaves_a_table_that_works(migrated_postgres_url: str):
    """It is killed before its last step, after the constraint was made."""
    url = migrated_postgres_url
    environ = {name: value for name, value in clean(url).items() if value} | {"PATH": os.environ["PATH"]}
    environ["PYTHONPATH"] = str(ROOT)
    async with connected(url) as reader, connected(url) as holder:
        await reader.execute("BEGIN; SELECT 1 FROM usage")
        command = (sys.executable, "-c", PROGRAM, "usage", "partition")
        process = await asyncio.create_subprocess_exec(*command, env=environ)
        try:

            async def is_held() -> bool:
                """Get the lock of changes between the first step, which waits for the reader, and the last one."""
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'usage'::regclass"
                if reader.is_in_transaction() and not await holder.fetchval(waiting):
                    return False
                holding = asyncio.create_task(holder.execute(f"SELECT pg_advisory_lock({MIGRATION_LOCK})"))
                if reader.is_in_transaction():
                    await reader.execute("ROLLBACK")
                await holding
                if await holder.fetchval("SELECT count(*) FROM pg_constraint WHERE conname = 'usage_before'"):
                    return True
                await holder.execute(f"SELECT pg_advisory_unlock({MIGRATION_LOCK})")
                return False

            await until(is_held)
        finally:
            process.kill()
            await process.wait()
    assert set((await where(url)).values()) == set()
    database = Database(url)
    await UsageWriter(database).write([row("req_0"), row("req_" + "f" * 32)])
    await database.close()
    assert set((await where(url)).values()) == {"usage"}
    assert "usage_first" in await run(url, "usage", "partition")
    assert set((await where(url)).values()) == {"usage_first"}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()
