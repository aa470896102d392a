"""Add the engine's receipt: the adapter with which an answer was computed."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL means unknown: existing rows, vLLM's, and those that gateways of the release before add.
    op.add_column("usage", sa.Column("served_digest", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("usage", "served_digest")
