"""Tables of events, of the webhooks that receive them, and of leases that one gateway holds at a time."""

from sqlalchemy import Column, ForeignKey, Index, Integer, String, Table, Text

from gateway.records.sql.schema import UtcDateTime, metadata

# once: identifies the event, with the same text in all gateways, so that it has one row. tenant_id: NULL for an event
# without a tenant; rows outlive their tenant.
events = Table(
    "events",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("once", String(200), nullable=False, unique=True),
    Column("type", String(32), nullable=False),
    Column("tenant_id", String(32), nullable=True),
    Column("tenant", String(64), nullable=True),
    # JSON; never a secret or a prompt.
    Column("data", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False, index=True),
    Index("ix_events_type_tenant_id_created_at", "type", "tenant_id", "created_at"),
)

# tenant_id: NULL for webhooks of operators, which receive the events of all tenants. types: ",budget.exhausted,", or
# "*" for all. failures: since the last delivery. retry_at: time of the next attempt at the earliest.
webhooks = Table(
    "webhooks",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), nullable=True),
    Column("url", String(1024), nullable=False),
    Column("types", String(512), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("retry_at", UtcDateTime, nullable=True),
    Column("delivered_at", UtcDateTime, nullable=True),
    Column("error", String(256), nullable=True),
)

# state: pending, delivered, or failed after a day.
event_deliveries = Table(
    "event_deliveries",
    metadata,
    Column("event_id", String(32), ForeignKey("events.id", ondelete="CASCADE"), primary_key=True),
    Column("webhook_id", String(32), ForeignKey("webhooks.id", ondelete="CASCADE"), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Index("ix_event_deliveries_webhook_id_state", "webhook_id", "state"),
)

turns = Table(
    "turns",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("owner", String(32), nullable=False),
    Column("until", UtcDateTime, nullable=False),
)
