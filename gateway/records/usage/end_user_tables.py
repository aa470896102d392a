"""Tables of sums by end user, part of the schema of `gateway/records/sql/tables.py`.

A tenant's clients choose the names of its end users, so there can be as many sums as requests. Therefore each table
begins with the day and the tenant: one tenant's sums are never between another's, and removing a day needs no index.
"""

from sqlalchemy import BigInteger, Column, String, Table

from gateway.records.sql.schema import UtcDateTime, metadata

SUMMED = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost")

# Sums of `usage` by UTC day, tenant and end user, updated in the transactions of the rows. end_user: "" for requests
# without one.
usage_end_users = Table(
    "usage_end_users",
    metadata,
    Column("day", UtcDateTime, primary_key=True),
    Column("tenant_id", String(32), primary_key=True),
    Column("end_user", String(128), primary_key=True),
    Column("tenant", String(64), nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in SUMMED),
    sqlite_with_rowid=False,
)

# Number of a tenant's end users of a day, their requests, and the largest sum of any one of them: an upper bound, by
# which a ranking skips tenants whose sums it need not read.
usage_end_user_days = Table(
    "usage_end_user_days",
    metadata,
    Column("day", UtcDateTime, primary_key=True),
    Column("tenant_id", String(32), primary_key=True),
    Column("end_users", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    *(Column(f"most_{name}", BigInteger, nullable=False) for name in SUMMED),
    sqlite_with_rowid=False,
)
