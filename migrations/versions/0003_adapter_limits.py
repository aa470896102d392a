"""Add tenants' limits on their own adapters."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL means the defaults: for existing tenants, and for tenants added by gateways of the previous release.
    op.add_column("tenants", sa.Column("adapter_limits", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "adapter_limits")
