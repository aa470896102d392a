"""Add key families, by which a rotated key shares its predecessor's limits, and change counters by tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL means the key's own id: gateways of the previous release add keys without it.
    op.add_column("api_keys", sa.Column("family_id", sa.String(32), nullable=True))
    op.execute("UPDATE api_keys SET family_id = id")
    op.create_index("ix_api_keys_family_id", "api_keys", ["family_id"])
    op.create_table(
        "tenant_changes",
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        sa.Column("stamp", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("scope", name="pk_tenant_changes"),
    )
    op.create_index("ix_tenant_changes_stamp", "tenant_changes", ["stamp"])


def downgrade() -> None:
    op.drop_table("tenant_changes")
    op.drop_index("ix_api_keys_family_id", "api_keys")
    op.drop_column("api_keys", "family_id")
