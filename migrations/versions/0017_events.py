"""Add events, their deliveries by webhook and e-mail, and tenants' budget thresholds."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("budget_warn_at", sa.Text, nullable=True))
    op.create_table(
        "events",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("once", sa.String(200), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=True),
        sa.Column("tenant", sa.String(64), nullable=True),
        sa.Column("data", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.UniqueConstraint("once", name="uq_events_once"),
    )
    op.create_index("ix_events_created_at", "events", ["created_at"])
    op.create_index("ix_events_type_tenant_id_created_at", "events", ["type", "tenant_id", "created_at"])
    op.create_table(
        "webhooks",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=True),
        sa.Column("url", sa.String(1024), nullable=False),
        sa.Column("types", sa.String(512), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.String(256), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_webhooks_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("name", name="pk_webhooks"),
        sa.UniqueConstraint("id", name="uq_webhooks_id"),
    )
    op.create_table(
        "event_deliveries",
        sa.Column("event_id", sa.String(32), nullable=False),
        sa.Column("webhook_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["event_id"], ["events.id"], name="fk_event_deliveries_event_id_events", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_event_deliveries_webhook_id_webhooks", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("event_id", "webhook_id", name="pk_event_deliveries"),
    )
    op.create_index("ix_event_deliveries_webhook_id_state", "event_deliveries", ["webhook_id", "state"])
    op.create_table(
        "turns",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(32), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_turns"),
    )


def downgrade() -> None:
    op.drop_table("turns")
    op.drop_table("event_deliveries")
    op.drop_table("webhooks")
    op.drop_table("events")
    op.drop_column("tenants", "budget_warn_at")
