"""Monthly partitions of `usage` on a real PostgreSQL: made while writers run, then each row once and in its month."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

import asyncpg
import pytest
from sqlalchemy import func, select, text

from gateway.billing.writer import UsageWriter
from gateway.records.partitions import partitioning, partitions
from gateway.records.partitions.partitioning import PartitionError, partition
from gateway.records.partitions.partitions import Partitions, next_month
from gateway.records.partitions.request_ids import RequestIds
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_daily
from gateway.usage_row import UsageRow
from testing.gateway.rows import NOON, row
from testing.gateway.running import until

THIS = datetime.now(UTC).date().replace(day=1)
MONTHS = [THIS, next_month(THIS), next_month(next_month(THIS)), next_month(next_month(next_month(THIS)))]
# The first partition has the month of the conversion.
NAMES = sorted(["usage_first", "usage_default", *(f"usage_{month:%Y%m}" for month in MONTHS[1:])])


@pytest.fixture
async def plain(migrated_postgres_url: str) -> AsyncIterator[Database]:
    """Return a database whose table `usage` has no partitions."""
    database = Database(migrated_postgres_url)
    yield database
    await database.close()


@pytest.fixture
async def parted(plain: Database) -> Database:
    assert await convert(plain) == NAMES
    return plain


async def convert(database: Database) -> list[str]:
    """Partition `usage` and return the partitions' names."""
    _, found = await partition(database, lambda line: None)
    return [each.name for each in found]


def id_of(moment: datetime, number: int = 0) -> str:
    """Return an id as gateways make it on partitions."""
    return f"req_g{moment:%Y%m%d%H%M%S}{number:017x}"


def in_month(month: date, day: int = 15) -> datetime:
    return datetime(month.year, month.month, day, 12, tzinfo=UTC)


async def query(database: Database, statement: str) -> list[Any]:
    async with database.read() as connection:
        return [tuple(each) for each in (await connection.execute(text(statement))).all()]


async def execute(database: Database, *statements: str) -> None:
    async with database.write() as connection:
        for statement in statements:
            await connection.execute(text(statement))


async def where(database: Database) -> dict[str, str]:
    """Return each row's partition by its id."""
    return dict(await query(database, "SELECT request_id, tableoid::regclass::text FROM usage"))


async def counts(database: Database) -> tuple[int, int]:
    """Return the number of rows, and of requests by the sums of days."""
    async with database.read() as connection:
        rows = (await connection.execute(select(func.count()).select_from(usage))).scalar_one()
        summed = (await connection.execute(select(func.sum(usage_daily.c.requests)))).scalar_one()
    return rows, int(summed or 0)


async def test_a_table_gets_partitions_under_its_writers_without_a_rewrite(plain: Database, migrated_postgres_url: str):
    others, ended, written = [Database(migrated_postgres_url) for _ in range(3)], asyncio.Event(), 0
    writers = [UsageWriter(other) for other in others]

    async def write(number: int) -> None:
        nonlocal written
        while not ended.is_set():
            rows = [row(f"req_{number}{written + i + 1:031x}") for i in range(20)]
            for writer in (writers[number], writers[number - 1]):
                await writer.write(rows)
            written += len(rows)

    await write_some(plain, row("req_" + "f" * 32), row("req_" + "0" * 32))
    file = await query(plain, "SELECT pg_relation_filenode('usage'), pg_relation_filenode('pk_usage')")
    await execute(
        plain, "CREATE ROLE reader", "GRANT SELECT ON usage TO reader", "GRANT UPDATE (cost) ON usage TO PUBLIC"
    )
    columns = await query(plain, COLUMNS)
    tasks = [asyncio.create_task(write(number)) for number in range(3)]
    try:
        await until(lambda: _is(written > 200))
        assert await convert(plain) == NAMES
        before = written
        await until(lambda: _is(written > before + 200))
        # The second run finds all done.
        assert await partition(plain, pytest.fail) == (False, await listed(plain))
    finally:
        ended.set()
        await asyncio.gather(*tasks)
        await asyncio.gather(*(other.close() for other in others))
    assert await counts(plain) == (written + 2, written + 2)
    kept = "SELECT pg_relation_filenode('usage_first'), pg_relation_filenode('pk_usage_first')"
    assert await query(plain, kept) == file
    assert await query(plain, COLUMNS) == columns


COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod), attnotnull, attacl::text, pg_get_expr(adbin, adrelid)
FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attrelid = 'usage'::regclass AND attnum > 0 ORDER BY attnum
"""


async def write_some(database: Database, *rows: UsageRow) -> None:
    await UsageWriter(database).write(rows)


async def listed(database: Database) -> list[partitions.Partition]:
    async with database.read() as connection:
        return await partitions.read_partitions(connection)


async def _is(value: bool) -> bool:
    return value


async def test_the_new_table_has_the_grants_and_indexes_of_the_former(plain: Database):
    role = '"reader\\:x"'
    await execute(plain, f"CREATE ROLE {role}", f"GRANT SELECT ON usage TO {role} WITH GRANT OPTION")
    await execute(plain, f"GRANT UPDATE (cost) ON usage TO {role}", "GRANT SELECT (model) ON usage TO PUBLIC")
    shown = "SELECT grantee, privilege_type, is_grantable, column_name FROM information_schema.column_privileges"
    shown += " WHERE table_name = 'usage' ORDER BY 1, 2, 4"
    indexes = "SELECT replace(indexdef, ' ONLY ', ' ') FROM pg_indexes WHERE tablename = 'usage' ORDER BY 1"
    granted, indexed = await query(plain, shown), await query(plain, indexes)
    await convert(plain)
    assert await query(plain, shown) == granted
    assert await query(plain, indexes) == indexed
    assert len(indexed) == 4
    await execute(plain, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def test_a_request_has_one_row_whatever_its_moments_are(parted: Database):
    """A gateway that Redis' answer did not reach dates a request by its own clock, and its successor by Redis'."""
    late, early = in_month(MONTHS[2], 1), in_month(MONTHS[1], 28)
    for request_id in ("req_" + "a" * 32, id_of(early), id_of(in_month(date(2099, 1, 1)))):
        twins = [row(request_id, created_at=early, status="abandoned"), row(request_id, created_at=late)]
        await asyncio.gather(*(write_some(parted, each) for each in twins for _ in range(3)))
    assert await counts(parted) == (3, 3)
    assert sorted((await where(parted)).values()) == sorted(["usage_default", "usage_first", f"usage_{MONTHS[1]:%Y%m}"])


async def test_no_insert_lacks_a_partition(parted: Database):
    moments = [NOON, in_month(THIS), in_month(MONTHS[1], 1), in_month(MONTHS[3]), in_month(date(2099, 1, 1))]
    await write_some(parted, *(row(id_of(moment), created_at=moment) for moment in moments), row("req_0"), row("zzz"))
    found = await where(parted)
    assert [found[id_of(moment)] for moment in moments] == [
        "usage_first",
        "usage_first",
        f"usage_{MONTHS[1]:%Y%m}",
        f"usage_{MONTHS[3]:%Y%m}",
        "usage_default",
    ]
    assert (found["req_0"], found["zzz"]) == ("usage_first", "usage_default")


async def test_months_are_made_ahead_and_get_their_rows_from_the_default_partition(
    parted: Database, monkeypatch: pytest.MonkeyPatch
):
    assert await Partitions(parted).make() == 0
    gone = [f"DROP TABLE usage_{month:%Y%m}" for month in MONTHS[1:]]
    await execute(parted, *gone)
    rows = [row(id_of(in_month(month), i), created_at=in_month(month)) for month in MONTHS[1:] for i in range(3)]
    await write_some(parted, *rows)
    monkeypatch.setattr(partitions, "MOVED", 2)
    # More rows than a short lock allows stay in the default partition.
    assert await Partitions(parted).make() == 0
    assert list((await where(parted)).values()).count("usage_default") == 9
    monkeypatch.setattr(partitions, "MOVED", 3)
    # Two processes at once make each month once.
    assert sum(await asyncio.gather(*(Partitions(parted).make() for _ in range(2)))) == 3
    expected = {each.request_id: f"usage_{each.created_at:%Y%m}" for each in rows}
    assert await where(parted) == expected
    await write_some(parted, *rows)
    assert await counts(parted) == (9, 9)


async def test_a_row_that_waits_for_its_months_partition_is_billed(parted: Database):
    """The insert is routed to the default partition, which loses the month before the insert gets its lock."""
    month, writer = MONTHS[1], UsageWriter(parted)
    await execute(parted, f"DROP TABLE usage_{month:%Y%m}")
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'usage_default'::regclass"
    async with partitions.changing_partitions(parted) as connection:
        assert await partitions.make_month(connection, month)
        writing = asyncio.create_task(writer.write([row(id_of(in_month(month)))]))
        await until(lambda: _has(parted, waiting))
    await writing
    assert await where(parted) == {id_of(in_month(month)): f"usage_{month:%Y%m}"}
    assert (writer.rejected, await counts(parted)) == (0, (1, 1))


async def test_a_row_that_a_constraint_refuses_is_set_aside(plain: Database):
    await execute(plain, "ALTER TABLE usage ADD CHECK (cost < 100)")
    writer = UsageWriter(plain)
    await writer.write([row("req_0", cost=100), row("req_1"), row("req_2", cost=101)])
    assert (writer.rejected, await counts(plain)) == (2, (1, 1))


@pytest.mark.parametrize("step", ["_validate", "_convert", "make_month"])
async def test_a_run_that_dies_leaves_a_table_that_works(plain: Database, step: str, monkeypatch: pytest.MonkeyPatch):
    async def die(*_: object) -> None:
        raise ZeroDivisionError

    await write_some(plain, row("req_0"))
    with monkeypatch.context() as patch:
        patch.setattr(partitioning, step, die)
        with pytest.raises(ZeroDivisionError):
            await convert(plain)
    assert await listed(plain) == []
    # Ids with a time come from the journal of a gateway that knew the partitions, before a backup was restored.
    timed = [row(id_of(moment)) for moment in (NOON, datetime.now(UTC))]
    await write_some(plain, row("req_0"), row("req_" + "f" * 32), *timed)
    assert await counts(plain) == (4, 4)
    assert RequestIds(plain).new() < "req_g"
    assert await convert(plain) == NAMES
    assert await counts(plain) == (4, 4)


async def test_readers_and_writers_do_not_wait_behind_the_conversion(plain: Database, migrated_postgres_url: str):
    """A report holds the table for seconds: a writer waits for one attempt at most, and the conversion for the end."""
    report = await asyncpg.connect(migrated_postgres_url)
    reading = report.transaction()
    await reading.start()
    await report.fetch("SELECT 1 FROM usage")
    converting = asyncio.create_task(convert(plain))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'usage'::regclass"
    await until(lambda: _has(plain, waiting))
    started = asyncio.get_running_loop().time()
    await write_some(plain, row("req_1"))
    assert asyncio.get_running_loop().time() - started < 5
    assert not converting.done()
    await reading.rollback()
    await report.close()
    assert await converting == NAMES
    assert await counts(plain) == (1, 1)


async def _has(database: Database, statement: str) -> bool:
    return (await query(database, statement))[0][0] > 0


VIEW = ("CREATE VIEW dear AS SELECT * FROM usage WHERE cost > 100",)
FUNCTION = "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"
TRIGGER = (FUNCTION, "CREATE TRIGGER watch AFTER INSERT ON usage FOR EACH ROW EXECUTE FUNCTION f()")


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (VIEW, "the view dear on the table usage would miss later rows; drop it, and make it again after"),
        (TRIGGER, "the trigger watch on the table usage would miss later rows; drop it, and make it again after"),
    ],
    ids=["view", "trigger"],
)
async def test_objects_that_would_miss_rows_are_refused(plain: Database, statements: list[str], message: str):
    await execute(plain, *statements)
    with pytest.raises(PartitionError) as refused:
        await convert(plain)
    assert str(refused.value) == message


async def test_ids_that_are_not_a_gateways_are_refused(plain: Database):
    await write_some(plain, row("zzz"))
    with pytest.raises(PartitionError, match="usage has the id 'zzz', which sorts after those of gateways"):
        await convert(plain)


async def test_a_collation_with_another_order_is_refused(plain: Database, monkeypatch: pytest.MonkeyPatch):
    """Danish sorts `aa` after `z`. The tests' server lacks its collation, so a bound in a wrong place stands for it."""
    assert "'req_g'" in partitioning.IN_ORDER
    monkeypatch.setattr(partitioning, "IN_ORDER", partitioning.IN_ORDER.replace("'req_g'", "'req_aa'"))
    with pytest.raises(PartitionError, match="collation does not sort request ids by their time"):
        await convert(plain)


async def test_an_invalid_index_is_refused(plain: Database, migrated_postgres_url: str):
    await write_some(plain, row("req_0"), row("req_1"))
    connection = await asyncpg.connect(migrated_postgres_url)
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute("CREATE UNIQUE INDEX CONCURRENTLY costs ON usage (cost)")
    await connection.close()
    with pytest.raises(PartitionError) as refused:
        await convert(plain)
    assert str(refused.value) == (
        "the index costs on the table usage is invalid, as a failed CREATE INDEX CONCURRENTLY leaves it; drop it, or "
        "run REINDEX INDEX CONCURRENTLY costs"
    )
    await execute(plain, "DROP INDEX costs")
    assert await convert(plain) == NAMES


async def test_two_conversions_at_once(plain: Database):
    found = await asyncio.gather(*(convert(plain) for _ in range(3)), return_exceptions=True)
    assert NAMES in found
    others = [each for each in found if each != NAMES]
    assert all(str(each) == "another `loraplex usage partition` is running" for each in others)


async def test_rows_of_a_restored_backup_get_one_partition(plain: Database):
    """The first partition ends with the month of the latest id."""
    rows = [row(id_of(moment), created_at=moment) for moment in (NOON, in_month(THIS), in_month(MONTHS[1]))]
    await write_some(plain, *rows, row("req_0"))
    assert await convert(plain) == sorted({*NAMES} - {f"usage_{MONTHS[1]:%Y%m}"})
    assert set((await where(plain)).values()) == {"usage_first"}
    await write_some(plain, *rows, row(id_of(in_month(MONTHS[2])), created_at=in_month(MONTHS[2])))
    assert await counts(plain) == (5, 5)
    assert (await where(plain))[id_of(in_month(MONTHS[2]))] == f"usage_{MONTHS[2]:%Y%m}"


async def test_the_first_partition_stays_in_its_last_month(parted: Database):
    await write_some(parted, row("req_0"))
    await Partitions(parted).detach(datetime.now(UTC))
    assert [each.name for each in await listed(parted)] == NAMES


async def test_another_schemas_tables_are_not_dropped(parted: Database):
    """Two deployments can have a schema each in one database."""
    await execute(parted, "CREATE SCHEMA other", "CREATE TABLE other.usage_detached_202601_1 (LIKE usage)")
    assert await Partitions(parted).detached() == []


async def test_a_database_without_partitions(database: Database):
    if database.dialect == "postgresql":
        assert await Partitions(database).make() == 0
        return
    with pytest.raises(PartitionError, match="partitions need PostgreSQL"):
        await convert(database)
    assert (await Partitions(database).make(), await Partitions(database).detached()) == (0, [])
