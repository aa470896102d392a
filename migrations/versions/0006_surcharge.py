"""Add the surcharge: tokens charged at the token rates beyond a request's prompt and completion."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLES = ("usage", "usage_hourly", "usage_daily")


def upgrade() -> None:
    # Existing rows, and rows added by gateways of the previous release, have none.
    for table in TABLES:
        op.add_column(table, sa.Column("surcharge", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_column(table, "surcharge")
