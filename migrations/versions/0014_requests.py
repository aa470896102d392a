"""Add the details of a request to its usage row, and the tables of refused requests."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

DETAILS = (
    ("admission_ms", sa.BigInteger()),
    ("queue_ms", sa.BigInteger()),
    ("reserved_tokens", sa.BigInteger()),
    ("end_user", sa.String(128)),
    ("error_code", sa.String(64)),
)


def upgrade() -> None:
    for name, kind in DETAILS:
        op.add_column("usage", sa.Column(name, kind, nullable=True))
    op.create_table(
        "refused_requests",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("route", sa.String(128), nullable=False),
        sa.Column("model", sa.String(256), nullable=True),
        sa.Column("end_user", sa.String(128), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("param", sa.String(64), nullable=True),
        sa.Column("limit_name", sa.String(32), nullable=True),
        sa.Column("limit_owner", sa.String(16), nullable=True),
        sa.Column("limit_value", sa.BigInteger(), nullable=True),
        sa.Column("needed", sa.BigInteger(), nullable=True),
        sa.Column("remaining", sa.BigInteger(), nullable=True),
        sa.Column("latency_ms", sa.BigInteger(), nullable=False),
        sa.Column("address", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_refused_requests"),
    )
    op.create_index("ix_refused_requests_at", "refused_requests", ["at"])
    op.create_index("ix_refused_requests_tenant_id_at", "refused_requests", ["tenant_id", "at"])
    op.create_index("ix_refused_requests_tenant_at", "refused_requests", ["tenant", "at"])
    op.create_table(
        "refusal_counts",
        sa.Column("level", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("start", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("limit_name", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "level", "start", "tenant_id", "code", "status", "limit_name", name="pk_refusal_counts"
        ),
    )
    op.create_index("ix_refusal_counts_tenant_id_level_start", "refusal_counts", ["tenant_id", "level", "start"])


def downgrade() -> None:
    op.drop_table("refusal_counts")
    op.drop_table("refused_requests")
    for name, _ in reversed(DETAILS):
        op.drop_column("usage", name)
