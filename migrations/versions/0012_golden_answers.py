"""Add the golden answers of adapters' versions, and their checks by the software of the engines."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "golden_answers",
        sa.Column("adapter_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("tag", sa.String(32), nullable=False),
        sa.Column("prompts", sa.Text(), nullable=False),
        sa.Column("answers", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name="fk_golden_answers_adapter_id_adapter_versions",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("adapter_id", "version", name="pk_golden_answers"),
    )
    op.create_table(
        "golden_checks",
        sa.Column("adapter_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("engine_kind", sa.String(16), nullable=False),
        sa.Column("engine_version", sa.String(64), nullable=False),
        sa.Column("base_digest", sa.String(64), nullable=False),
        sa.Column("differences", sa.Text(), nullable=False),
        sa.Column("checked_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["golden_answers.adapter_id", "golden_answers.version"],
            name="fk_golden_checks_adapter_id_golden_answers",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "adapter_id", "version", "engine_kind", "engine_version", "base_digest", name="pk_golden_checks"
        ),
    )


def downgrade() -> None:
    op.drop_table("golden_checks")
    op.drop_table("golden_answers")
