"""Tables of refused requests, part of the schema of `gateway/records/sql/tables.py`."""

from sqlalchemy import BigInteger, Column, Index, Integer, String, Table

from gateway.records.sql.schema import UtcDateTime, metadata

# Requests that were refused before their admission (gateway/records/requests/refused.py). Like usage rows, they outlive
# their tenant and key.
refused_requests = Table(
    "refused_requests",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("at", UtcDateTime, nullable=False),
    Column("tenant_id", String(32), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("method", String(16), nullable=False),
    Column("route", String(128), nullable=False),
    Column("model", String(256), nullable=True),
    Column("end_user", String(128), nullable=True),
    Column("status", Integer, nullable=False),
    Column("code", String(64), nullable=False),
    Column("param", String(64), nullable=True),
    # The limit of a 429 with its amounts (gateway.errors.Exceeded).
    Column("limit_name", String(32), nullable=True),
    Column("limit_owner", String(16), nullable=True),
    Column("limit_value", BigInteger, nullable=True),
    Column("needed", BigInteger, nullable=True),
    Column("remaining", BigInteger, nullable=True),
    Column("latency_ms", BigInteger, nullable=False),
    Column("address", String(64), nullable=True),
    # Seconds, of a 429 by a limit.
    Column("retry_after", BigInteger, nullable=True),
    Index("ix_refused_requests_at", "at"),
    Index("ix_refused_requests_tenant_id_at", "tenant_id", "at"),
    Index("ix_refused_requests_tenant_at", "tenant", "at"),
)

# Numbers of failed requests. level: the length of the period in seconds: a minute, an hour or a day. start: in Unix
# seconds. status: the HTTP status; 0 for requests that failed after their admission, which have usage rows. limit_name:
# empty without a limit. tenant_id: empty for requests without a verified key; "*" for the sum over all tenants.
refusal_counts = Table(
    "refusal_counts",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant_id", String(32), primary_key=True),
    Column("code", String(64), primary_key=True),
    Column("status", Integer, primary_key=True, autoincrement=False),
    Column("limit_name", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("requests", BigInteger, nullable=False),
    Index("ix_refusal_counts_tenant_id_level_start", "tenant_id", "level", "start"),
)
