"""Reading of database errors by their SQLSTATE, or by SQLite's names, which SQLAlchemy's classes do not tell apart."""

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

# SQLSTATE classes.
DATA_EXCEPTION, INTEGRITY_VIOLATION = "22", "23"
# A row that fits neither a constraint nor its partition.
CHECK_VIOLATION = "23514"
# A write on a standby.
READ_ONLY = "25006"
UNDEFINED_TABLE = "42P01"
# A lock that was not free within `lock_timeout`.
LOCK_NOT_AVAILABLE = "55P03"
# Violations, by SQLSTATE or by SQLite's name, that another change can cause after a transaction's reads: the row exists
# now, or the row that it refers to was deleted.
RACES = ("23505", "23503", "SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_FOREIGNKEY")


def sql_state(error: BaseException | None) -> str:
    """Return the SQLSTATE of an error, or the name that SQLite gives it; "" if it has neither."""
    if not isinstance(error, DBAPIError):
        return ""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None) or ""


def is_datas_fault(error: DBAPIError) -> bool:
    """Return whether the database works but refuses the input. asyncpg marks data errors by their SQLSTATE only."""
    state = sql_state(error)
    return isinstance(error, DataError | IntegrityError) or state[:2] in (DATA_EXCEPTION, INTEGRITY_VIOLATION)


def is_race(error: IntegrityError) -> bool:
    """Return whether another change may have caused the violation, so that a repetition may succeed."""
    return sql_state(error) in RACES
