"""Add the engine's receipt: the adapter that an answer was computed with."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL means unknown: existing rows, vLLM's rows, and rows added by gateways of the previous release.
    op.add_column("usage", sa.Column("served_digest", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("usage", "served_digest")
