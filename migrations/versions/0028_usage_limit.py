"""Record the limit that ended an answer in its usage row, so that refusals and the request log name it."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A nullable column without a default rewrites no row. Earlier releases, which leave it NULL, work with it.
    op.add_column("usage", sa.Column("limit_name", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("usage", "limit_name")
