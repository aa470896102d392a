"""Add the fingerprint of each key's pepper, and the check digits of keys that were hashed under a new pepper."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("pepper", sa.String(8), nullable=True))
    op.add_column("api_keys", sa.Column("check_digits", sa.String(8), nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "check_digits")
    op.drop_column("api_keys", "pepper")
