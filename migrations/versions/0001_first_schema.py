"""Add tenants, keys, adapters and their versions, usage, audit."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Migrations never import the live tables: those change later, this file does not.
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_day", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrent", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrent_tokens", sa.BigInteger(), nullable=True),
        sa.Column("budget_per_month", sa.BigInteger(), nullable=True),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("on_token_limit", sa.String(16), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.Column("model_limits", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=True),
        sa.Column("label", sa.String(100), nullable=False),
        sa.Column("scopes", sa.String(100), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("allowed_models", sa.Text(), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_day", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrent", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrent_tokens", sa.BigInteger(), nullable=True),
        sa.Column("budget_per_month", sa.BigInteger(), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("expires_at", MOMENT, nullable=True),
        sa.Column("revoked_at", MOMENT, nullable=True),
        sa.Column("last_used_at", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "prices",
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("model", name="pk_prices"),
    )
    access_changes = op.create_table(
        "access_changes",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_access_changes"),
    )
    op.bulk_insert(access_changes, [{"id": 1, "changes": 0}])
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("current_version", sa.Integer(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("adapter_id", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "version", name="pk_adapter_versions"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_versions_adapter_id_adapters", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_versions_digest", "adapter_versions", ["digest"])
    op.create_table(
        "usage",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("adapter_digest", sa.String(64), nullable=True),
        sa.Column("engine", sa.String(256), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.Column("latency_ms", sa.BigInteger(), nullable=False),
        sa.Column("ttft_ms", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage"),
    )
    op.create_index("ix_usage_tenant_id_created_at", "usage", ["tenant_id", "created_at"])
    op.create_index("ix_usage_tenant_created_at", "usage", ["tenant", "created_at"])
    op.create_index("ix_usage_created_at", "usage", ["created_at"])
    for name, period in (("usage_hourly", "hour"), ("usage_daily", "day")):
        op.create_table(
            name,
            sa.Column("tenant_id", sa.String(32), nullable=False),
            sa.Column(period, MOMENT, nullable=False),
            sa.Column("key_id", sa.String(32), nullable=False),
            sa.Column("model", sa.String(256), nullable=False),
            sa.Column("tenant", sa.String(64), nullable=False),
            sa.Column("requests", sa.BigInteger(), nullable=False),
            sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
            sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
            sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
            sa.Column("cost", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("tenant_id", period, "key_id", "model", name=f"pk_{name}"),
        )
        op.create_index(f"ix_{name}_tenant_{period}", name, ["tenant", period])
        op.create_index(f"ix_{name}_{period}", name, [period])
    op.create_table(
        "usage_rejected",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("rejected_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_usage_rejected"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("at", MOMENT, nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(256), nullable=False),
        sa.Column("tenant", sa.String(64)),
        sa.Column("address", sa.String(64)),
        sa.Column("request_id", sa.String(64)),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])


def downgrade() -> None:
    for table in (
        "audit",
        "usage_rejected",
        "usage_daily",
        "usage_hourly",
        "usage",
        "adapter_versions",
        "adapters",
        "access_changes",
        "prices",
        "api_keys",
        "tenants",
    ):
        op.drop_table(table)
