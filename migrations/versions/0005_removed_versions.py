"""Record the removed versions of adapters, and mark a tenant's own audit entries."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "removed_versions",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_removed_versions_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", "digest", "name", name="pk_removed_versions"),
    )
    op.create_index("ix_removed_versions_digest", "removed_versions", ["digest"])
    # NULL, in rows added by gateways of the previous release, means an operator's change.
    op.add_column("audit", sa.Column("own", sa.Boolean(), nullable=True))
    op.execute("UPDATE audit SET own = TRUE WHERE actor IN (SELECT id FROM api_keys WHERE tenant_id IS NOT NULL)")


def downgrade() -> None:
    op.drop_column("audit", "own")
    op.drop_table("removed_versions")
