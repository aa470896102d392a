"""Add resumable uploads of adapters."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_uploads",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapter_uploads_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_uploads"),
    )
    op.create_index("ix_adapter_uploads_tenant_id", "adapter_uploads", ["tenant_id"])
    op.create_table(
        "adapter_upload_parts",
        sa.Column("upload_id", sa.String(32), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("part_id", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"],
            ["adapter_uploads.id"],
            name="fk_adapter_upload_parts_upload_id_adapter_uploads",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("upload_id", "start", name="pk_adapter_upload_parts"),
    )


def downgrade() -> None:
    op.drop_table("adapter_upload_parts")
    op.drop_table("adapter_uploads")
