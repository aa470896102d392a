"""Add the base models, the base of each adapter's version, and the base of each usage row."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bases",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("digest", sa.String(64), nullable=True),
        sa.Column("former", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tokenizer", sa.Text(), nullable=True),
        sa.Column("context_length", sa.BigInteger(), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_bases"),
        sa.UniqueConstraint("name", name="uq_bases_name"),
    )
    op.add_column("adapter_versions", sa.Column("base_id", sa.String(32), nullable=True))
    op.add_column("usage", sa.Column("base", sa.String(256), nullable=True))


def downgrade() -> None:
    op.drop_column("usage", "base")
    op.drop_column("adapter_versions", "base_id")
    op.drop_table("bases")
