"""Table of the base models."""

from sqlalchemy import BigInteger, Column, String, Table, Text

from gateway.records.sql.schema import UtcDateTime, metadata

# id: empty for the deployment's first base; versions without a `base_id` belong to it. digest: NULL if engines of the
# base are identified by name only. former, shape: JSON. tokenizer: folder on the gateways' machines, or NULL.
bases = Table(
    "bases",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(256), nullable=False, unique=True),
    Column("digest", String(64), nullable=True),
    Column("former", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("tokenizer", Text, nullable=True),
    Column("context_length", BigInteger, nullable=False),
    Column("shape", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)
