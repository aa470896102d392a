"""Add each tenant's target for the time to first token."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("ttft_target", sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "ttft_target")
