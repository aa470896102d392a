"""The adapter that an answer was computed with, by the engine's receipt."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # NULL is "unknown": rows that there are, vLLM's, and those that a gateway of the release before goes on adding.
    op.add_column("usage", sa.Column("served_digest", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("usage", "served_digest")
