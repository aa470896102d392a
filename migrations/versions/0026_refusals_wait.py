"""Record the wait in the response to a refused request, so that the longest one of a limit can be shown."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("refused_requests", sa.Column("retry_after", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("refused_requests", "retry_after")
