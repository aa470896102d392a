"""Add the sums for charts: by minute, hour and day, for tenants, models and engines, with histograms."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

SUMMED = (
    *("requests", "ok", "cancelled", "revoked", "limited", "refused", "error", "abandoned"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "queue_ms", "ttft_ms", "latency_ms"),
)
BUCKETS = tuple(f"{name}_{i}" for name in ("latency", "ttft") for i in range(25))
TABLES = ("activity_minute", "activity_hour", "activity_day")


def upgrade() -> None:
    op.create_table(
        "activity_series",
        sa.Column("id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("kind", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_activity_series"),
    )
    for column in ("tenant_id", "tenant", "name"):
        op.create_index(f"ix_activity_series_{column}", "activity_series", [column, "kind"])
    for table in TABLES:
        op.create_table(
            table,
            sa.Column("kind", sa.Integer(), nullable=False, autoincrement=False),
            sa.Column("start", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("series_id", sa.BigInteger(), nullable=False, autoincrement=False),
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMMED),
            *(sa.Column(name, sa.Integer(), nullable=True) for name in BUCKETS),
            sa.PrimaryKeyConstraint("kind", "start", "series_id", name=f"pk_{table}"),
            sqlite_with_rowid=False,
        )
        op.create_index(f"ix_{table}_series_id_start", table, ["series_id", "start"])


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
    op.drop_table("activity_series")
