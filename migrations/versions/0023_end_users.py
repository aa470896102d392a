"""Add the sums of usage by end user, and their number and maxima by tenant and day."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

SUMMED = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost")


def upgrade() -> None:
    op.create_table(
        "usage_end_users",
        sa.Column("day", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("end_user", sa.String(128), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMMED),
        sa.PrimaryKeyConstraint("day", "tenant_id", "end_user", name="pk_usage_end_users"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "usage_end_user_days",
        sa.Column("day", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("end_users", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        *(sa.Column(f"most_{name}", sa.BigInteger(), nullable=False) for name in SUMMED),
        sa.PrimaryKeyConstraint("day", "tenant_id", name="pk_usage_end_user_days"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("usage_end_user_days")
    op.drop_table("usage_end_users")
