"""Add the name to the index of the series of a tenant."""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

NAME, TABLE = "ix_activity_series_tenant_id", "activity_series"


def upgrade() -> None:
    op.drop_index(NAME, TABLE)
    op.create_index(NAME, TABLE, ["tenant_id", "kind", "name"])


def downgrade() -> None:
    op.drop_index(NAME, TABLE)
    op.create_index(NAME, TABLE, ["tenant_id", "kind"])
