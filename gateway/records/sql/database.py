"""Connections, transactions and the schema's version. SQLite by default, PostgreSQL by URL."""

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, TextClause, event, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

import migrations as versions
from gateway.error_codes import DATABASE_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.process.outage import Outage
from gateway.records.sql.schema_support import find_problem
from gateway.records.sql.schema_version import migrations, read_revision
from gateway.records.sql.sqlite_driver import connect_sqlite
from gateway.records.sql.urls import ParsedUrl, parse_url
from gateway.setting_errors import NotUsableNow, SettingsError
from gateway.sql_states import LOCK_NOT_AVAILABLE, READ_ONLY, is_datas_fault, sql_state

log = logging.getLogger(__name__)
# Alembic logs its context and each step of a migration. The change as a whole is logged below.
logging.getLogger("alembic").setLevel(logging.WARNING)

# Time-out of a statement and of the wait for a connection, in seconds.
STATEMENT_SECONDS = 10
# Connections of a process: POOL_SIZE are kept, MAX_OVERFLOW more are opened under load, and one is reserved.
POOL_SIZE, MAX_OVERFLOW = 10, 5
# A connection is replaced at this age, so that a moved server is found and a balancer's time limit is not reached.
RECYCLE_SECONDS = 1800
RECONNECT_SECONDS = 1.0
# Options of SQLite's connections. The driver would begin transactions by itself, and only before some statements;
# `_begin_sqlite` does it instead.
SQLITE: dict[str, Any] = {"isolation_level": None, "pragmas": ("synchronous=NORMAL", "foreign_keys=ON")}
# Pause between two attempts to reach the database at the start.
RETRY_SECONDS = 0.5
# Id of the advisory lock under which gateways that start together migrate one after the other. Any constant works.
MIGRATION_LOCK = 0x6C_70_78_6D
# Maximum waits of a migration for another migration, and for a table's lock. Other statements on the table queue
# behind the second wait.
MIGRATION_SECONDS, TABLE_LOCK_SECONDS = 600.0, 10.0


class Database:
    """A pool of connections. `write()` gives a transaction that is committed on a clean exit, `read()` one that is not.

    They raise Unavailable when the database is unreachable or too slow, and SQLAlchemy's errors for input it refuses.
    """

    def __init__(self, url: str, statement_seconds: float | None = STATEMENT_SECONDS) -> None:
        """statement_seconds: time-out of a statement; None: none."""
        self._url, driver_options = _parsed(url)
        self.dialect = self._url.get_backend_name()
        self._outage = Outage(log, "the database")
        # Parameters hold hashes and names; errors are logged without them.
        options: dict[str, Any] = {"pool_timeout": STATEMENT_SECONDS, "hide_parameters": True}
        if self.dialect == "sqlite":
            options["connect_args"] = SQLITE | {"timeout": STATEMENT_SECONDS, "async_creator_fn": connect_sqlite}
            options["pool_size"] = 5
        else:
            driver_options |= {"timeout": STATEMENT_SECONDS, "command_timeout": statement_seconds}
            options["connect_args"] = driver_options
            options["pool_size"], options["max_overflow"] = POOL_SIZE, MAX_OVERFLOW
            options["pool_recycle"] = RECYCLE_SECONDS
            # A server may have closed a connection since its last use.
            options["pool_pre_ping"] = True
        self._options = options
        self._engine = create_async_engine(self._url, **options)
        # A connection that no request can take, for reading changes of keys.
        self._reserved = create_async_engine(self._url, **options | {"pool_size": 1, "max_overflow": 0})
        self._reconnected_at = -math.inf
        if self.dialect == "sqlite":
            for engine in (self._engine, self._reserved):
                event.listen(engine.sync_engine, "begin", _begin_sqlite)
        else:
            for engine in (self._engine, self._reserved):
                event.listen(engine.sync_engine, "connect", _prepare_postgresql)

    @asynccontextmanager
    async def read(self, *, reserved: bool = False) -> AsyncIterator[AsyncConnection]:
        """Open a read-only transaction. reserved: on the connection that is kept for reading changes."""
        with _translated(self._outage):
            # The transaction begins with the first statement, and ends by a rollback when the connection is returned.
            async with (self._reserved if reserved else self._engine).connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that may write.

        On SQLite it holds the write lock from its start, so that its reads stay valid and it never fails for a stale
        snapshot. A server that has become a standby refuses writes on connections that otherwise work; the pool is then
        replaced.
        """
        try:
            async with self._writing(self._engine) as connection:
                yield connection
        except Unavailable as error:
            if sql_state(error.__cause__) == READ_ONLY:
                await self.reconnect("it is read-only")
            raise

    @asynccontextmanager
    async def _writing(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        with _translated(self._outage):
            async with engine.connect() as connection:
                await connection.execution_options(loraplex_write=True)
                async with connection.begin():
                    yield connection

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """Open a read-only transaction whose statements all see the data of one moment. Raises SQLAlchemy's errors.

        Unlike `read` it does not translate errors, because its caller's own files may raise OSError meanwhile.
        """
        async with self._engine.connect() as connection:
            if self.dialect == "postgresql":
                await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            async with connection.begin():
                yield connection

    async def reconnect(self, reason: str) -> None:
        """Replace all connections, at most once in RECONNECT_SECONDS. The URL may lead to another server now."""
        now = time.monotonic()
        if now - self._reconnected_at < RECONNECT_SECONDS:
            return
        self._reconnected_at = now
        log.warning("reconnecting to the database: %s", reason)
        await self._engine.dispose()
        await self._reserved.dispose()

    async def ping(self) -> None:
        """Raise Unavailable if the database does not answer."""
        async with self.read() as connection:
            await connection.execute(text("SELECT 1"))

    async def wait(self, seconds: float) -> None:
        """Wait until the database answers, for at most `seconds`. The log reports the outage once.

        An outage that lasts longer raises no error here, but in the next call. SQLite needs no wait.
        """
        if self.dialect == "sqlite":
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                await self.ping()
                break
            except Unavailable:
                await asyncio.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))

    async def upgrade(self) -> None:
        """Migrate the schema to the newest version. Several processes may call it at the same time.

        Raises NotUsableNow if the database cannot be reached.
        """
        async with self.changing_schema() as connection:
            await connection.run_sync(upgrade_schema)

    @asynccontextmanager
    async def changing_schema(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that no other migration overlaps. A missing SQLite file is created.

        Its statements have no time-out: a large table takes minutes to change. Raises NotUsableNow if the database
        cannot be reached or refuses a statement, and if another transaction keeps a lock.
        """
        with _reachable():
            if self.dialect == "sqlite":
                if self._url.database:
                    await asyncio.to_thread(_make_sqlite, Path(self._url.database))
                async with self.write() as connection:
                    yield connection
                return
            arguments = self._options["connect_args"] | {"command_timeout": None}
            engine = create_async_engine(self._url, **self._options | {"connect_args": arguments})
            event.listen(engine.sync_engine, "connect", _prepare_postgresql)
            try:
                async with self._writing(engine) as connection:
                    await connection.execute(text("SET LOCAL statement_timeout = 0"))
                    await connection.execute(_lock_timeout(MIGRATION_SECONDS))
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
                    await connection.execute(_lock_timeout(TABLE_LOCK_SECONDS))
                    yield connection
            finally:
                await engine.dispose()

    async def check_schema(self) -> None:
        """Raise NotUsableNow if this program cannot run on the schema, or if the database cannot be reached."""
        with _reachable():
            async with self.read() as connection:
                problem = await connection.run_sync(lambda sync: find_problem(sync, read_revision(sync), _known()))
        if problem is not None:
            raise NotUsableNow("LORAPLEX_DATABASE_URL", problem)

    async def num_bytes(self) -> int:
        """Return the size of the database with its indexes."""
        size = "pg_database_size(current_database())"
        if self.dialect == "sqlite":
            size = "page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        async with self.read() as connection:
            return int((await connection.execute(text(f"SELECT {size}"))).scalar_one())

    async def revision(self) -> str | None:
        """Return the schema's version, None before the first migration."""
        async with self.read() as connection:
            return await connection.run_sync(read_revision)

    async def close(self) -> None:
        await self._engine.dispose()
        await self._reserved.dispose()


@contextmanager
def _reachable() -> Iterator[None]:
    """Raise NotUsableNow for an unreachable database: the start has already waited for it."""
    try:
        yield
    except Unavailable as error:
        is_locked = sql_state(error.__cause__) == LOCK_NOT_AVAILABLE
        problem = "another transaction keeps a lock" if is_locked else "the database cannot be reached"
        raise NotUsableNow("LORAPLEX_DATABASE_URL", f"{problem}: {_cause(error.__cause__)}") from error
    except (DBAPIError, sqlite3.Error) as error:
        raise NotUsableNow("LORAPLEX_DATABASE_URL", f"the schema cannot be read or made: {_cause(error)}") from error


def _lock_timeout(seconds: float) -> TextClause:
    return text(f"SET LOCAL lock_timeout = {int(1000 * seconds)}")


def _cause(error: BaseException | None) -> str:
    """Return the error in one line, without SQLAlchemy's links to its documentation."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


@contextmanager
def _translated(outage: Outage) -> Iterator[None]:
    try:
        yield
        outage.over()
    except (DBAPIError, PoolTimeoutError, OSError, TimeoutError) as error:
        if isinstance(error, DBAPIError) and (is_datas_fault(error) or isinstance(error, ProgrammingError)):
            raise
        outage.failed(_cause(error))
        raise Unavailable("The database is unavailable; try again shortly.", code=DATABASE_UNAVAILABLE) from error


async def upgrade(url: str) -> None:
    """Open the database at `url`, migrate it and close it."""
    database = Database(url)
    try:
        await database.upgrade()
    finally:
        await database.close()


def migrate(url: str) -> None:
    """Run `upgrade` for callers without an event loop (`loraplex migrate`)."""
    asyncio.run(upgrade(url))


def _parsed(url: str) -> ParsedUrl:
    try:
        return parse_url(url)
    except ValueError as error:
        raise SettingsError("LORAPLEX_DATABASE_URL", str(error)) from error


def _make_sqlite(path: Path) -> None:
    """Create the file and switch it to a write-ahead log, so that readers and a writer do not wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + STATEMENT_SECONDS
    while True:
        try:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                return
        except sqlite3.OperationalError as error:
            # SQLite does not wait for another process that makes the switch at this moment, whatever its time-out.
            if time.monotonic() > deadline:
                raise Unavailable("The database is unavailable.", code=DATABASE_UNAVAILABLE) from error
            time.sleep(0.02)


def _prepare_postgresql(connection: Any, _record: object) -> None:
    # PostgreSQL's JIT compiles statements that it expects to be slow. Compilation of the sums with their 65 columns
    # takes longer than their execution. A statement sets it, because PgBouncer refuses it as a connection parameter.
    connection.run_async(lambda driver: driver.execute("SET jit = off"))


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("loraplex_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _known() -> list[str]:
    return [migration.revision for migration in migrations()]


def upgrade_schema(connection: Connection, revision: str = "head") -> None:
    """Migrate the schema to a version, in the connection's transaction.

    The schema of a newer release that supports this program stays as it is. Raises NotUsableNow for one that does not.
    """
    before = read_revision(connection)
    if before == _known()[0] and revision == "head":
        return
    if before is not None and before not in _known():
        if problem := find_problem(connection, before, _known()):
            raise NotUsableNow("LORAPLEX_DATABASE_URL", problem)
        log.info("the schema of the database stays at %s, of a newer release", before)
        return
    # Imported here, because most starts of a gateway find the newest schema.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(versions.__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
    after = read_revision(connection)
    if before != after:
        log.info("the schema of the database was migrated from %s to %s", before or "nothing", after)
