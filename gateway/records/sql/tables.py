"""The schema, for SQLite and PostgreSQL alike. `migrations/versions` creates it; a test checks that both are equal."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from gateway.records.sql.schema import UtcDateTime as UtcDateTime
from gateway.records.sql.schema import metadata as metadata

# Limits that the previous release stores in columns of their own, in `tenants` and `api_keys`; see
# gateway.records.tenants.limits. NULL: not limited.
FORMER_COLUMNS = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "max_concurrent",
    "max_concurrent_tokens",
    "budget_per_month",
)


def _former_limits() -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=True) for name in FORMER_COLUMNS]


tenants = Table(
    "tenants",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    *_former_limits(),
    Column("weight", Float, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("on_token_limit", String(16), nullable=False),
    Column("suspended", Boolean, nullable=False),
    # JSON: a model's name -> its limits.
    Column("model_limits", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # JSON (gateway/records/tenants/limits.py); NULL means the defaults.
    Column("adapter_limits", Text, nullable=True),
    # All limits on requests, as JSON, here and in api_keys (gateway/records/tenants/limits.py).
    Column("limits", Text, nullable=True),
    # JSON: a list of shares of the budget; NULL means the default (gateway/records/tenants/tenants.py).
    Column("budget_warn_at", Text, nullable=True),
    # Seconds; NULL means no target.
    Column("ttft_target", Float, nullable=True),
    # Name of the tenant's plan. The columns above contain the effective values (gateway/records/tenants/terms.py).
    Column("plan", String(64), nullable=True, index=True),
    # JSON: the terms that the tenant sets itself, which override its plan's; NULL in a row of the previous release.
    Column("own_terms", Text, nullable=True),
    Column("display_name", String(100), nullable=True),
    # Id of the tenant in another system, such as billing.
    Column("external_id", String(128), nullable=True),
    Column("contact", String(200), nullable=True),
    Column("note", Text, nullable=True),
    # Tags with a comma before and after each, so that a filter finds whole tags; NULL means none.
    Column("tags", Text, nullable=True),
    Index("ix_tenants_external_id", "external_id", unique=True),
)

# Named terms of tenants (gateway/records/money/plans.py). terms, prices: JSON.
plans = Table(
    "plans",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("terms", Text, nullable=False),
    Column("prices", Text, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    # NULL for an admin's key, which belongs to no tenant.
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), nullable=True, index=True),
    # Shared by a key and its successors by rotation; limits are counted by it. NULL means the key's own id.
    Column("family_id", String(32), nullable=True, index=True),
    Column("label", String(100), nullable=False),
    # Comma separated; see gateway.access.auth.
    Column("scopes", String(100), nullable=False),
    Column("secret_hash", String(64), nullable=False),
    # JSON: a list of names; NULL is "all of them".
    Column("allowed_models", Text, nullable=True),
    *_former_limits(),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=True),
    Column("revoked_at", UtcDateTime, nullable=True),
    Column("last_used_at", UtcDateTime, nullable=True),
    Column("limits", Text, nullable=True),
    # Fingerprint of the pepper of secret_hash; NULL: unknown, as a gateway of the previous release writes it.
    Column("pepper", String(8), nullable=True),
    # Check digits under a former pepper, of a key that was hashed again; see gateway.access.auth.
    Column("check_digits", String(8), nullable=True),
)

# See gateway.records.money.prices: micro-units of the deployment's currency per million tokens.
prices = Table(
    "prices",
    metadata,
    Column("model", String(256), primary_key=True),
    Column("input", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# A row for each tenant that has changed, and for the other scopes; see gateway.records.caches.changes.
tenant_changes = Table(
    "tenant_changes",
    metadata,
    Column("scope", String(32), primary_key=True),
    Column("changes", BigInteger, nullable=False),
    # Orders changes: PostgreSQL's transaction id, or a counter on SQLite.
    Column("stamp", BigInteger, nullable=False, index=True),
)

# A single row with the number of all changes, which only gateways of the previous release write.
access_changes = Table(
    "access_changes",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("changes", BigInteger, nullable=False),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("name", String(64), nullable=False),
    # Version of the alias `latest`; 0 means none. Its row may be gone or not ready.
    Column("current_version", Integer, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Change tag and earlier states of `latest`, as in adapter_aliases.
    Column("latest_tag", String(32), nullable=True),
    Column("latest_history", Text, nullable=True),
    UniqueConstraint("tenant_id", "name"),
)

adapter_versions = Table(
    "adapter_versions",
    metadata,
    Column("adapter_id", String(32), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("digest", String(64), nullable=False, index=True),
    Column("rank", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # gateway.records.adapters.rows.State. The digest of a refused upload is empty.
    Column("state", String(16), nullable=False, server_default="ready"),
    # JSON: the reasons of a rejection.
    Column("reasons", Text, nullable=True),
    # Time from which a version is no longer served.
    Column("expires_at", UtcDateTime, nullable=True),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    # Id of the base model; NULL for the deployment's first one (gateway/records/bases).
    Column("base_id", String(32), nullable=True),
)

# Newest probe of each version (gateway/records/adapters/probes.py). result: JSON of `AdapterProbe`.
adapter_probes = Table(
    "adapter_probes",
    metadata,
    Column("adapter_id", String(32), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("base_digest", String(64), nullable=True),
    Column("result", Text, nullable=False),
    Column("probed_at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"], ondelete="CASCADE"
    ),
)

# Golden answers of versions (gateway/records/adapters/golden.py). prompts, answers: JSON. tag: new for each set.
golden_answers = Table(
    "golden_answers",
    metadata,
    Column("adapter_id", String(32), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("tag", String(32), nullable=False),
    Column("prompts", Text, nullable=False),
    Column("answers", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"], ondelete="CASCADE"
    ),
)

# Last check of golden answers under each engine software; its fields are empty where unknown. differences: JSON.
golden_checks = Table(
    "golden_checks",
    metadata,
    Column("adapter_id", String(32), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("engine_kind", String(16), primary_key=True),
    Column("engine_version", String(64), primary_key=True),
    Column("base_digest", String(64), primary_key=True),
    Column("differences", Text, nullable=False),
    Column("checked_at", UtcDateTime, nullable=False),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["golden_answers.adapter_id", "golden_answers.version"], ondelete="CASCADE"
    ),
)

# Aliases beside `latest` (gateway/records/adapters/aliases.py).
adapter_aliases = Table(
    "adapter_aliases",
    metadata,
    Column("adapter_id", String(32), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True),
    Column("alias", String(32), primary_key=True),
    # Random; replaced by each move.
    Column("tag", String(32), nullable=False),
    # JSON: earlier states, the newest last.
    Column("history", Text, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

adapter_alias_targets = Table(
    "adapter_alias_targets",
    metadata,
    Column("adapter_id", String(32), ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True),
    Column("alias", String(32), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("weight", Integer, nullable=False),
    # Time from which the alias no longer refers to the version.
    Column("expires_at", UtcDateTime, nullable=True),
)

# Mixtures that a tenant has saved under a name (gateway/records/adapters/saved_mixtures.py). tag: new at each change.
saved_mixtures = Table(
    "saved_mixtures",
    metadata,
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("model", String(256), nullable=False),
    Column("tag", String(32), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# Versions that a deletion or a newer version has removed (gateway/records/adapters/removed_versions.py). num_bytes: 0
# once the content no longer counts against the tenant's limit.
removed_versions = Table(
    "removed_versions",
    metadata,
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("digest", String(64), primary_key=True, index=True),
    Column("name", String(64), primary_key=True),
    Column("num_bytes", BigInteger, nullable=False),
    Column("removed_at", UtcDateTime, nullable=False),
    # The newest of the name's versions with this digest; NULL if a gateway of the previous release removed it.
    Column("version", Integer, nullable=True),
)

# Uploads that arrive in parts (gateway/records/adapters/uploads.py). The bytes are in the adapter store.
adapter_uploads = Table(
    "adapter_uploads",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("received", BigInteger, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

adapter_upload_parts = Table(
    "adapter_upload_parts",
    metadata,
    Column("upload_id", String(32), ForeignKey("adapter_uploads.id", ondelete="CASCADE"), primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("part_id", String(32), nullable=False),
)

# Rows outlive their tenant, key and adapter, so they have no foreign keys and store the tenant's name.
usage = Table(
    "usage",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("tenant_id", String(32), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("endpoint", String(32), nullable=False),
    Column("model", String(256), nullable=False),
    Column("adapter_digest", String(64), nullable=True),
    Column("engine", String(256), nullable=True),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    # Micro-units of the deployment's currency, here and in the sums.
    Column("cost", BigInteger, nullable=False),
    Column("latency_ms", BigInteger, nullable=False),
    Column("ttft_ms", BigInteger, nullable=True),
    Column("status", String(16), nullable=False),
    Column("finish_reason", String(32), nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
    # The engine's receipt: a digest, "base" or "mixed"; NULL if it sent none.
    Column("served_digest", String(64), nullable=True),
    # Tokens charged to the token rates beyond the counted ones, here and in the sums: log-probabilities cost some.
    Column("surcharge", BigInteger, nullable=False, server_default="0"),
    # The adapter's version; NULL for the base model and for mixtures.
    Column("version", Integer, nullable=True),
    # These five are NULL in rows that a gateway of the previous release wrote.
    Column("admission_ms", BigInteger, nullable=True),
    Column("queue_ms", BigInteger, nullable=True),
    Column("reserved_tokens", BigInteger, nullable=True),
    Column("end_user", String(128), nullable=True),
    Column("error_code", String(64), nullable=True),
    # Name of the base model.
    Column("base", String(256), nullable=True),
    # Name of the limit that ended the answer; NULL in rows of the previous release.
    Column("limit_name", String(64), nullable=True),
    Index("ix_usage_tenant_id_created_at", "tenant_id", "created_at"),
    Index("ix_usage_tenant_created_at", "tenant", "created_at"),
    Index("ix_usage_created_at", "created_at"),
)


def _usage_sums(name: str, period: str) -> Table:
    """Return a table of sums of `usage` over one UTC hour or day, updated in the transactions of the rows.

    period: the name of the column with the start of the hour or day.
    """
    return Table(
        name,
        metadata,
        Column("tenant_id", String(32), primary_key=True),
        Column(period, UtcDateTime, primary_key=True),
        Column("key_id", String(32), primary_key=True),
        Column("model", String(256), primary_key=True),
        Column("tenant", String(64), nullable=False),
        Column("requests", BigInteger, nullable=False),
        Column("prompt_tokens", BigInteger, nullable=False),
        Column("completion_tokens", BigInteger, nullable=False),
        Column("cached_tokens", BigInteger, nullable=False),
        Column("cost", BigInteger, nullable=False),
        Column("surcharge", BigInteger, nullable=False, server_default="0"),
        Index(f"ix_{name}_tenant_{period}", "tenant", period),
        Index(f"ix_{name}_{period}", period),
    )


usage_hourly = _usage_sums("usage_hourly", "hour")
usage_daily = _usage_sums("usage_daily", "day")

# Usage events that could not become rows, kept for inspection. id: the event's SHA-256, so that none is kept twice.
usage_rejected = Table(
    "usage_rejected",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("rejected_at", UtcDateTime, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("at", UtcDateTime, nullable=False, index=True),
    Column("actor", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(256), nullable=False),
    Column("tenant", String(64)),
    Column("address", String(64)),
    Column("request_id", String(64)),
    Column("detail", Text, nullable=False),
    # Whether a tenant's own key made the change; NULL: no.
    Column("own", Boolean, nullable=True),
    # JSON: the earlier values of the fields in `detail`; NULL: unknown, or nothing was there before.
    Column("before", Text, nullable=True),
    # Label of the actor's key at that time.
    Column("actor_label", String(100), nullable=True),
    # The browser's session that made the change; NULL: none.
    Column("session_id", String(16), nullable=True),
    Index("ix_audit_tenant_at", "tenant", "at"),
)
