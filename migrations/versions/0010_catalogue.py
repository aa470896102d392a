"""Add states of versions, aliases with weights, and the version that a request was served with."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_STATE = ("state", "reasons", "expires_at", "pinned")


def upgrade() -> None:
    # Existing versions, and versions added by gateways of the previous release, are ready and keep their numbers.
    op.add_column("adapter_versions", sa.Column("state", sa.String(16), nullable=False, server_default="ready"))
    op.add_column("adapter_versions", sa.Column("reasons", sa.Text(), nullable=True))
    op.add_column("adapter_versions", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("adapter_versions", sa.Column("pinned", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("adapters", sa.Column("latest_tag", sa.String(32), nullable=True))
    op.add_column("adapters", sa.Column("latest_history", sa.Text(), nullable=True))
    op.add_column("removed_versions", sa.Column("version", sa.Integer(), nullable=True))
    op.add_column("usage", sa.Column("version", sa.Integer(), nullable=True))
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(32), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("tag", sa.String(32), nullable=False),
        sa.Column("history", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_aliases_adapter_id_adapters", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_adapter_aliases"),
    )
    op.create_table(
        "adapter_alias_targets",
        sa.Column("adapter_id", sa.String(32), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_alias_targets_adapter_id_adapters", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "alias", "version", name="pk_adapter_alias_targets"),
    )


def downgrade() -> None:
    op.drop_table("adapter_alias_targets")
    op.drop_table("adapter_aliases")
    op.drop_column("usage", "version")
    op.drop_column("removed_versions", "version")
    op.drop_column("adapters", "latest_history")
    op.drop_column("adapters", "latest_tag")
    op.execute("DELETE FROM adapter_versions WHERE digest = ''")
    for column in reversed(_STATE):
        op.drop_column("adapter_versions", column)
