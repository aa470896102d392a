"""Backups, restores and exports that a signal or a fault of the adapter store ends."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from adapters.store import DirectoryStore
from gateway.records.backup import file as backup_file
from gateway.records.sql.database import Database, migrate
from gateway.records.tenants.tenants import Tenants
from loraplex.commands.common import run as run_command
from testing.adapter_files import BASE, tensors, write
from testing.gateway.running import until
from tests.gateway.records.backup.test_backup import is_bare, run


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex.cli", *arguments),
        env={**clean, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def terminated(process: asyncio.subprocess.Process, folder: Path) -> None:
    """Send SIGTERM once the command has begun its file, as a timer's time limit does; nothing may be left of it."""

    async def has_begun() -> bool:
        assert process.returncode is None, await process.communicate()
        return bool(os.listdir(folder))

    try:
        await until(has_begun, 90)
        process.send_signal(signal.SIGTERM)
        said, _ = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert os.listdir(folder) == []
    assert process.returncode == 143
    assert said.decode().splitlines()[-1] == "Terminated"


def test_sigterm_ends_a_command_only_where_it_waits(capsys: pytest.CaptureFixture[str]):
    """An exception of the signal's handler came up inside the database driver: a backup in 60 crashed or failed."""
    steps: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 0.05
            while time.monotonic() < deadline:
                pass
            steps.append("end of the step")
            await asyncio.sleep(90)
        finally:
            steps.append("cleaned up")

    with pytest.raises(SystemExit) as ended:
        run_command(work())
    assert (ended.value.code, steps) == (143, ["end of the step", "cleaned up"])
    assert capsys.readouterr().err == "Terminated\n"


@pytest.mark.integration
async def test_a_backup_that_is_terminated_leaves_no_part_of_its_file(migrated_postgres_url: str, tmp_path: Path):
    store, folder = tmp_path / "adapters", tmp_path / "backups"
    store.mkdir()
    folder.mkdir()
    holder = await asyncpg.connect(migrated_postgres_url)
    try:
        async with holder.transaction():
            # The backup waits for this table in its middle.
            await holder.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
            file, env = str(folder / "backup"), {"LORAPLEX_DATABASE_URL": migrated_postgres_url}
            await terminated(await start("backup", file, "--adapter-store", str(store), **env), folder)
    finally:
        await holder.close()


async def test_an_export_that_is_terminated_leaves_no_part_of_its_file(tmp_path: Path):
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"tenant,cost\n" * 1000)
            await asyncio.sleep(0.05)

    app = web.Application()
    app.router.add_get("/admin/api/usage/rows", endless)
    async with TestServer(app) as server:
        flags = ("--gateway", str(server.make_url("/")), "--admin-key", "k")
        await terminated(await start("usage", "export", str(tmp_path / "rows.csv"), "--csv", *flags), tmp_path)


async def test_two_exports_to_one_file_do_not_mix(tmp_path: Path):
    """A timer starts the next export while the last one still writes."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def rows(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        if not begun.is_set():
            await answer.write(b"slow 1\n")
            begun.set()
            await go_on.wait()
            await answer.write(b"slow 2\n")
        else:
            await answer.write(b"quick\n")
        return answer

    app = web.Application()
    app.router.add_get("/admin/api/usage/rows", rows)
    file = tmp_path / "rows.csv"
    async with TestServer(app) as server:
        arguments = ("usage", "export", str(file), "--csv", "--gateway", str(server.make_url("/")), "--admin-key", "k")
        slow = await start(*arguments)
        await asyncio.wait_for(begun.wait(), 90)
        quick = await start(*arguments)
        said, _ = await asyncio.wait_for(quick.communicate(), 90)
        assert (quick.returncode, file.read_text()) == (0, "quick\n"), said
        go_on.set()
        said, _ = await asyncio.wait_for(slow.communicate(), 90)
        assert (slow.returncode, file.read_text()) == (0, "slow 1\nslow 2\n"), said
    assert os.listdir(tmp_path) == ["rows.csv"]


async def backup_with_an_adapter(folder: Path) -> tuple[Path, str]:
    """Return a backup with one adapter's files, and the adapter's digest."""
    url, store = f"sqlite:///{folder}/old.db", folder / "old"
    await asyncio.to_thread(migrate, url)
    digest = DirectoryStore(store).put(write(folder / "adapter", tensors()), BASE).digest
    database = Database(url)
    acme = await Tenants(database).create("acme", {}, "op")
    async with database.write() as connection:
        await connection.exec_driver_sql(
            f"INSERT INTO adapters VALUES ('a', '{acme.id}', 'pirate', 1, '2026-01-01 00:00:00', NULL, NULL)"
        )
        await connection.exec_driver_sql(
            "INSERT INTO adapter_versions (adapter_id, version, digest, rank, num_bytes, created_at) "
            f"VALUES ('a', 1, '{digest}', 8, 1, '2026-01-01 00:00:00')"
        )
    await database.close()
    await run("backup", folder / "backup", url, store, "--with-adapters")
    return folder / "backup", digest


async def test_a_fault_of_the_adapter_store_is_not_reported_as_the_databases(tmp_path: Path):
    file, digest = await backup_with_an_adapter(tmp_path)
    new, to = tmp_path / "new", f"sqlite:///{tmp_path}/new.db"
    new.mkdir()
    (new / digest[:2]).write_text("not a folder")
    said = await run("restore", file, to, new, code=1)
    assert said.startswith(f"Error: --adapter-store: the adapter {digest} cannot be written: ")
    assert "File exists" in said
    assert is_bare(to)


async def test_restored_adapters_are_on_the_disk_before_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After a loss of power, a file that was renamed but never written out may be empty."""
    file, digest = await backup_with_an_adapter(tmp_path)
    synced: set[int] = set()
    fsync = os.fsync

    def spy(descriptor: int) -> Any:
        synced.add(os.fstat(descriptor).st_ino)
        return fsync(descriptor)

    monkeypatch.setattr(backup_file.os, "fsync", spy)
    await run("restore", file, f"sqlite:///{tmp_path}/new.db", tmp_path / "new")
    folder = DirectoryStore(tmp_path / "new").folder(digest)
    assert {path.stat().st_ino for path in (*folder.iterdir(), *list(folder.parents)[:2], folder)} <= synced
