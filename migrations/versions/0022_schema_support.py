"""Add the oldest release whose programs may run on the schema, so that gateways of two releases can share it."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "schema_support",
        sa.Column("oldest_program", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("oldest_program", name="pk_schema_support"),
    )
    op.bulk_insert(table, [{"oldest_program": "0021"}])


def downgrade() -> None:
    op.drop_table("schema_support")
