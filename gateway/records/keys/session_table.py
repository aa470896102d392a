"""Table of browsers' sessions, part of the schema of `gateway/records/sql/tables.py`."""

from sqlalchemy import Column, ForeignKey, String, Table

from gateway.records.sql.tables import UtcDateTime, metadata

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("token_hash", String(64), nullable=False, unique=True),
    Column("subject", String(64), nullable=False, index=True),
    Column("label", String(100), nullable=False),
    Column("role", String(16), nullable=False),
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), nullable=True, index=True),
    Column("key_id", String(32), ForeignKey("api_keys.id", ondelete="CASCADE"), nullable=True, index=True),
    Column("proof", String(64), nullable=True),
    Column("address", String(64), nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("last_used_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)
