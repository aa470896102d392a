"""Tenants' limits on their own adapters."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL is "the defaults": for tenants there are, and for those that a gateway of the release before goes on adding.
    op.add_column("tenants", sa.Column("adapter_limits", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "adapter_limits")
