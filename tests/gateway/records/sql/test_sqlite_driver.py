"""Connections to SQLite: the results of aiosqlite's own, with a single call of the thread for each statement."""

import random
import shutil
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.errors import Unavailable
from gateway.records.sql.database import Database
from gateway.records.sql.sqlite_driver import FIRST_ROWS, SqliteConnection, connect_sqlite
from gateway.records.sql.tables import prices
from testing.gateway.rows import NOON

EDGES = (0, 1, FIRST_ROWS - 1, FIRST_ROWS, FIRST_ROWS + 1, 3 * FIRST_ROWS + 7)


@pytest.fixture
def engines(tmp_path: Path) -> list[AsyncEngine]:
    """Return an engine with these connections, and one with aiosqlite's own, each with a database of its own."""
    own: dict[str, Any] = {"connect_args": {"async_creator_fn": connect_sqlite}}
    return [create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/{i}.db", **kind) for i, kind in enumerate((own, {}))]


async def told(engine: AsyncEngine, statements: list[tuple[str, Any]]) -> list[Any]:
    """Return everything that the driver says about some statements, which are executed in a transaction."""
    found: list[Any] = []
    async with engine.begin() as connection:
        for statement, parameters in statements:
            try:
                result = await connection.execute(text(statement), parameters)
            except (IntegrityError, OperationalError) as error:
                found.append(str(error.orig))
                continue
            rows = [tuple(row) for row in result.all()] if result.returns_rows else None
            found.append((rows, result.rowcount))
    await engine.dispose()
    return found


async def test_each_statement_has_the_result_of_aiosqlites_own_driver(engines: list[AsyncEngine]):
    rng = random.Random(4)
    statements: list[tuple[str, Any]] = [("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)", {})]
    for number in EDGES:
        many = [{"a": rng.randrange(10**9), "b": str(number)} for _ in range(number)]
        statements += [("INSERT INTO t VALUES (:a, :b)", many)] if many else []
        statements += [("SELECT a, b FROM t ORDER BY a LIMIT :n", {"n": number}), ("SELECT count(*) FROM t", {})]
        statements += [("UPDATE t SET b = 'x' WHERE b = :b", {"b": str(number)})]
        statements += [("DELETE FROM t WHERE b = 'x' AND a % 2 RETURNING a", {})]
        statements += [("INSERT INTO t VALUES (1, NULL)", {}), ("SELECT nothing FROM t", {})]
    ours, theirs = [await told(engine, statements) for engine in engines]
    assert ours == theirs


async def test_a_stream_has_every_row_in_pieces_of_the_asked_size(engines: list[AsyncEngine]):
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :most) SELECT i FROM n"
    for most in EDGES[1:]:
        for at_once in (1, 64, FIRST_ROWS + 3):
            sizes = []
            for engine in engines:
                async with engine.connect() as connection:
                    query = text(numbers).execution_options(yield_per=at_once)
                    pieces = [
                        [row[0] for row in piece]
                        async for piece in (await connection.stream(query, {"most": most})).partitions(at_once)
                    ]
                assert [number for piece in pieces for number in piece] == list(range(1, most + 1))
                sizes.append([len(piece) for piece in pieces])
            assert sizes[0] == sizes[1], (most, at_once)
    for engine in engines:
        await engine.dispose()


async def test_a_read_is_two_calls_of_the_thread(migrated: Path, monkeypatch: pytest.MonkeyPatch):
    database = Database(f"sqlite:///{migrated}")
    await database.ping()
    calls = []

    async def counted(self: SqliteConnection, run: Any, *given: Any, **named: Any) -> Any:
        calls.append(run)
        return await execute(self, run, *given, **named)

    execute = SqliteConnection._execute
    monkeypatch.setattr(SqliteConnection, "_execute", counted)
    async with database.read() as connection:
        assert (await connection.execute(select(prices))).all() == []
    assert len(calls) == 2, calls
    await database.close()


async def test_only_transactions_with_statements_are_ended(migrated: Path, monkeypatch: pytest.MonkeyPatch):
    ended = list[str]()
    for name in ("commit", "rollback"):
        end = getattr(aiosqlite.Connection, name)

        async def noted(self: Any, name: str = name, end: Any = end) -> None:
            ended.append(name)
            await end(self)

        monkeypatch.setattr(aiosqlite.Connection, name, noted)
    database = Database(f"sqlite:///{migrated}")
    await database.ping()
    ended.clear()
    async with database.read() as connection, connection.begin():
        pass
    assert ended == []
    async with database.write() as connection:
        await connection.execute(text("SELECT 1"))
    assert ended == ["commit"]
    with pytest.raises(Unavailable):
        async with database.write() as connection:
            await connection.execute(text("SELECT nothing"))
    assert ended == ["commit", "rollback"]
    async with database.read() as connection:
        await connection.execute(text("SELECT 1"))
    assert ended == ["commit", "rollback", "rollback"]
    await database.close()


async def test_the_statements_of_a_read_see_one_moment(migrated: Path, tmp_path: Path):
    copy = shutil.copy(migrated, tmp_path / "gateway.db")
    database = Database(f"sqlite:///{copy}")
    async with database.read() as reading:
        assert (await reading.execute(select(prices))).all() == []
        async with database.write() as writing:
            await writing.execute(insert(prices).values(model="*", input=1, cached=1, output=1, updated_at=NOON))
        assert (await reading.execute(select(prices))).all() == []
    async with database.read() as reading:
        assert len((await reading.execute(select(prices))).all()) == 1
    await database.close()


async def test_a_read_keeps_nothing_that_it_wrote(migrated: Path):
    database = Database(f"sqlite:///{migrated}")
    async with database.read() as connection:
        await connection.execute(insert(prices).values(model="*", input=1, cached=1, output=1, updated_at=NOON))
    async with database.read() as connection:
        assert (await connection.execute(select(prices))).all() == []
    await database.close()
