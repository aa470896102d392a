"""Add the results of probes of adapters' versions, with the base model that they ran on."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_probes",
        sa.Column("adapter_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("base_digest", sa.String(64), nullable=True),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("probed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name="fk_adapter_probes_adapter_id_adapter_versions",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("adapter_id", "version", name="pk_adapter_probes"),
    )


def downgrade() -> None:
    op.drop_table("adapter_probes")
