"""Index the audit log by tenant and time, so that a tenant's changes are found among those of all tenants."""

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_audit_tenant_at", "audit", ["tenant", "at"])


def downgrade() -> None:
    op.drop_index("ix_audit_tenant_at", "audit")
