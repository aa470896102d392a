"""Add the longest times to the sums for charts, so that no percentile is above the largest measured value."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

TABLES = ("activity_minute", "activity_hour", "activity_day")
COLUMNS = ("latency_max", "ttft_max")


def upgrade() -> None:
    # A nullable column without a default rewrites no row. Earlier releases, which leave it NULL, work with it.
    for table in TABLES:
        for column in COLUMNS:
            op.add_column(table, sa.Column(column, sa.Integer(), nullable=True))


def downgrade() -> None:
    for table in TABLES:
        for column in COLUMNS:
            op.drop_column(table, column)
