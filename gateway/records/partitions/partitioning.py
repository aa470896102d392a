"""`loraplex usage partition`: gives the table `usage` partitions while gateways run, without rewriting its rows.

1. A CHECK constraint says that all ids precede those of the next month. Random ids fit it, and so do ids with a time,
   which a plain table gets after a restore or a failover: from a journal, or from a gateway that knows the partitions.
2. The constraint is validated: one read of the table, beside readers and writers.
3. A single short transaction renames the table, makes the partitioned one in its place and attaches the former as the
   first partition; because of the constraint, PostgreSQL reads no row for that.

Each step is a transaction, so a kill leaves a table that works, and waits for locks at most LOCK_MS at a time.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.partitions.partitions import (
    AHEAD,
    DEFAULT,
    FIRST,
    Partition,
    Partitions,
    changing_partitions,
    first_id,
    is_partitioned,
    make_month,
    month_of,
    next_month,
    patiently,
    read_partitions,
    waiting_briefly,
)
from gateway.records.sql.database import Database

# Attempts to get a lock, about two seconds each: reports and exports may read for minutes.
TRIES = 120
CHECK = "usage_before"
# Id of the advisory lock of a running conversion. Any constant works.
CONVERSION_LOCK = 0x6C_70_78_70
# Ids sort by the database's collation, and some languages sort `aa` after `z`.
IN_ORDER = """
SELECT bool_and('req_' || one || two < 'req_g') AND 'req_g20261130235959f' < 'req_g202612'
  AND 'req_g202612' < 'req_g202612010000000'
FROM unnest(string_to_array('0 1 2 3 4 5 6 7 8 9 a b c d e f', ' ')) AS one,
  unnest(string_to_array('0 1 2 3 4 5 6 7 8 9 a b c d e f', ' ')) AS two
"""
# Objects that stay with the former table, so that they would miss all later rows.
DEPENDENT = """
SELECT 'the view ' || ev_class::regclass FROM pg_rewrite JOIN pg_depend ON objid = pg_rewrite.oid
  WHERE classid = 'pg_rewrite'::regclass AND refclassid = 'pg_class'::regclass AND refobjid = to_regclass('usage')
UNION SELECT 'the trigger ' || tgname FROM pg_trigger WHERE tgrelid = to_regclass('usage') AND NOT tgisinternal
UNION SELECT 'the policy ' || polname FROM pg_policy WHERE polrelid = to_regclass('usage')
UNION SELECT 'the publication ' || pubname FROM pg_publication JOIN pg_publication_rel ON prpubid = pg_publication.oid
  WHERE prrelid = to_regclass('usage')
UNION SELECT 'the foreign key ' || conname FROM pg_constraint WHERE contype = 'f' AND confrelid = to_regclass('usage')
ORDER BY 1
"""
# PostgreSQL would build an index in place of each of these while it attaches the table.
INVALID = """
SELECT CAST(CAST(indexrelid AS regclass) AS text) FROM pg_index
WHERE indrelid = to_regclass('usage') AND NOT indisvalid ORDER BY 1
"""
GRANTS = """
SELECT format('GRANT %s %s ON usage TO %s %s', privilege_type, "column",
  CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
  CASE WHEN is_grantable THEN 'WITH GRANT OPTION' END)
FROM (
  SELECT (aclexplode(relacl)).*, NULL AS "column" FROM pg_class WHERE oid = to_regclass('usage')
  UNION ALL
  SELECT (aclexplode(attacl)).*, format('(%I)', attname) FROM pg_attribute WHERE attrelid = to_regclass('usage')
) AS granted
"""


class PartitionError(Exception):
    """The table cannot be partitioned; the message says why, in one line."""


async def partition(database: Database, report: Callable[[str], None]) -> tuple[bool, list[Partition]]:
    """Partition `usage`. Returns whether this call did it, and the partitions. Running it again makes missing months.

    database: without a time-out of statements. report: receives a line for each long step. Raises PartitionError;
    NotUsableNow for another schema; Unavailable if the table stays in use.
    """
    if database.dialect != "postgresql":
        raise PartitionError("LORAPLEX_DATABASE_URL: partitions need PostgreSQL; SQLite has none")
    await database.check_schema()
    async with database.read() as holder:
        if not (await holder.execute(text(f"SELECT pg_try_advisory_xact_lock({CONVERSION_LOCK})"))).scalar_one():
            raise PartitionError("another `loraplex usage partition` is running")
        is_new = not await is_partitioned(database)
        if is_new:
            bound = await patiently(partial(_constrain, database), TRIES)
            report("reading usage once to check the ids of its rows; gateways go on writing")
            await patiently(partial(_validate, database), TRIES)
            await patiently(partial(_convert, database, bound), TRIES)
    await patiently(Partitions(database).make, TRIES)
    async with database.read() as connection:
        return is_new, await read_partitions(connection)


async def _constrain(database: Database) -> str:
    """Add the constraint, not validated yet. Returns the bound, which all ids precede. Raises PartitionError."""
    async with changing_partitions(database) as connection:
        await _check(connection)
        bound = await _bound(connection)
        add = f"ALTER TABLE usage ADD CONSTRAINT {CHECK} CHECK (request_id < '{bound}') NOT VALID"
        await connection.execute(text(f"ALTER TABLE usage DROP CONSTRAINT IF EXISTS {CHECK}"))
        await connection.execute(text(add))
    return bound


async def _check(connection: AsyncConnection) -> None:
    """Raise PartitionError if the role or the database does not allow partitions."""
    owner = text("SELECT pg_get_userbyid(relowner), current_user FROM pg_class WHERE oid = to_regclass('usage')")
    owned_by, role = (await connection.execute(owner)).one()
    if owned_by != role:
        raise PartitionError(f"the table usage belongs to the role {owned_by}; connect as it, not as {role}")
    if not (await connection.execute(text(IN_ORDER))).scalar_one():
        raise PartitionError("the database's collation does not sort request ids by their time; expected C or en_US")
    if names := list((await connection.execute(text(INVALID))).scalars()):
        raise PartitionError(
            f"the index {names[0]} on the table usage is invalid, as a failed CREATE INDEX CONCURRENTLY leaves it; "
            f"drop it, or run REINDEX INDEX CONCURRENTLY {names[0]}"
        )
    if names := list((await connection.execute(text(DEPENDENT))).scalars()):
        raise PartitionError(f"{names[0]} on the table usage would miss later rows; drop it, and make it again after")


async def _bound(connection: AsyncConnection) -> str:
    """Return a text that follows all ids: the first id of the next month, or of a later one if the table has later ids.

    Raises PartitionError for a later id of another form.
    """
    bound = first_id(next_month(datetime.now(UTC).date()))
    later = text("SELECT max(request_id) FROM usage WHERE request_id >= :bound")
    newest = (await connection.execute(later, {"bound": bound})).scalar_one()
    if newest is None:
        return bound
    month = month_of(newest)
    if month is None:
        raise PartitionError(f"usage has the id {newest!r}, which sorts after those of gateways; remove the row")
    return first_id(next_month(month))


async def _validate(database: Database) -> None:
    """Validate the constraint. It may take minutes, so it does not hold the lock of migrations."""
    async with waiting_briefly(database) as connection:
        await connection.execute(text("SET LOCAL statement_timeout = 0"))
        await connection.execute(text(f"ALTER TABLE usage VALIDATE CONSTRAINT {CHECK}"))


async def _convert(database: Database, bound: str) -> None:
    """Make the former table the first partition of a new one."""
    async with changing_partitions(database) as connection:
        await connection.execute(text("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE"))
        await _check(connection)
        valid = text(
            f"SELECT bool_or(convalidated AND conname = '{CHECK}') FROM pg_constraint WHERE conrelid = "
            "to_regclass('usage')"
        )
        if not (await connection.execute(valid)).scalar_one():
            # PostgreSQL would read all rows under the lock.
            raise PartitionError(f"another session removed the constraint {CHECK}; run the command again")
        indexes = text(
            "SELECT format('ALTER INDEX %I RENAME TO %I', relname, relname || '_first'), pg_get_indexdef(indexrelid), "
            "indisprimary FROM pg_index JOIN pg_class ON oid = indexrelid WHERE indrelid = to_regclass('usage')"
        )
        found = (await connection.execute(indexes)).all()
        grants = list((await connection.execute(text(GRANTS))).scalars())
        for statement in (
            f"ALTER TABLE usage RENAME TO {FIRST}",
            *(rename for rename, _, _ in found),
            f"CREATE TABLE usage (LIKE {FIRST} INCLUDING DEFAULTS) PARTITION BY RANGE (request_id)",
            "ALTER TABLE usage ADD CONSTRAINT pk_usage PRIMARY KEY (request_id)",
            *(definition for _, definition, is_primary in found if not is_primary),
            f"ALTER TABLE usage ATTACH PARTITION {FIRST} FOR VALUES FROM (MINVALUE) TO ('{bound}')",
            f"ALTER TABLE {FIRST} DROP CONSTRAINT {CHECK}",
            f"CREATE TABLE {DEFAULT} PARTITION OF usage DEFAULT",
            *grants,
        ):
            await connection.exec_driver_sql(statement)
        month = datetime.now(UTC).date().replace(day=1)
        for _ in range(AHEAD + 1):
            await make_month(connection, month)
            month = next_month(month)
