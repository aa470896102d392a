"""Add one column with all limits, as JSON, and copy the limits of existing tenants and keys to it."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES = ("tenants", "api_keys")
NAMES = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "max_concurrent",
    "max_concurrent_tokens",
    "budget_per_month",
)


def upgrade() -> None:
    # Rows that gateways of the previous release add keep NULL here, because these write only the former columns.
    for name in TABLES:
        op.add_column(name, sa.Column("limits", sa.Text(), nullable=True))
        table = sa.table(name, sa.column("id"), sa.column("limits"), *(sa.column(kind) for kind in NAMES))
        values = []
        for row in op.get_bind().execute(sa.select(table)).mappings():
            limits = {kind: row[kind] for kind in NAMES if row[kind] is not None}
            values.append({"row": row["id"], "json": json.dumps(limits)})
        if values:
            fill = sa.update(table).where(table.c.id == sa.bindparam("row")).values(limits=sa.bindparam("json"))
            op.get_bind().execute(fill, values)


def downgrade() -> None:
    for name in TABLES:
        op.drop_column(name, "limits")
