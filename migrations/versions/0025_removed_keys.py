"""Record the removed keys of families, whose usage still counts against the limits of their successors."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "removed_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("family_id", sa.String(32), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_removed_keys_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_removed_keys"),
    )
    op.create_index("ix_removed_keys_family_id", "removed_keys", ["family_id"])
    op.create_index("ix_removed_keys_tenant_id_removed_at", "removed_keys", ["tenant_id", "removed_at"])


def downgrade() -> None:
    op.drop_table("removed_keys")
