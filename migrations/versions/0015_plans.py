"""Add plans, metadata of tenants, and the earlier values and the actor's label in the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

TENANTS = (
    ("plan", sa.String(64)),
    ("own_terms", sa.Text()),
    ("display_name", sa.String(100)),
    ("external_id", sa.String(128)),
    ("contact", sa.String(200)),
    ("note", sa.Text()),
    ("tags", sa.Text()),
)


def upgrade() -> None:
    op.create_table(
        "plans",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("terms", sa.Text(), nullable=False),
        sa.Column("prices", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_plans"),
    )
    for name, kind in TENANTS:
        op.add_column("tenants", sa.Column(name, kind, nullable=True))
    op.create_index("ix_tenants_plan", "tenants", ["plan"])
    op.create_index("ix_tenants_external_id", "tenants", ["external_id"], unique=True)
    op.add_column("audit", sa.Column("before", sa.Text(), nullable=True))
    op.add_column("audit", sa.Column("actor_label", sa.String(100), nullable=True))


def downgrade() -> None:
    op.drop_column("audit", "actor_label")
    op.drop_column("audit", "before")
    op.drop_index("ix_tenants_external_id", "tenants")
    op.drop_index("ix_tenants_plan", "tenants")
    for name, _ in reversed(TENANTS):
        op.drop_column("tenants", name)
    op.drop_table("plans")
