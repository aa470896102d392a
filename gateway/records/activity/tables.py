"""Tables of sums for charts, part of the schema of `gateway/records/sql/tables.py`."""

from sqlalchemy import BigInteger, Column, Index, Integer, String, Table

from gateway.records.sql.schema import metadata

# Kinds of series: requests of a tenant; of a tenant's adapter, or of all its mixtures; on an engine; of a tenant to a
# base model; of all tenants to a base model. Each request is in one series of its tenant, of its engine and of its
# model; a request to a base model is in both kinds of the model.
TENANT, MODEL, ENGINE, OWN_BASE, BASE = 1, 2, 3, 4, 5
STATUSES = ("ok", "cancelled", "revoked", "limited", "refused", "error", "abandoned")
SUMMED = (
    "requests",
    *STATUSES,
    *("prompt_tokens", "cached_tokens", "completion_tokens", "cost"),
    *("queue_ms", "ttft_ms", "latency_ms"),
)
# Upper bounds of both histograms' buckets, in ms. A further bucket holds the values above the last bound.
BOUNDS = (
    *(5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 750),
    *(1000, 1500, 2000, 3000, 5000, 7500, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000),
)
LATENCY = tuple(f"latency_{i}" for i in range(len(BOUNDS) + 1))
TTFT = tuple(f"ttft_{i}" for i in range(len(BOUNDS) + 1))
# Largest values in ms. An earlier release writes none, so the maximum of a period may be NULL or too small.
MAXIMA = LATENCY_MAX, TTFT_MAX = "latency_max", "ttft_max"

# Series by an id that is the hash of kind, tenant and name, so that writers need no query for it. name: the model's or
# the engine's URL; empty for a tenant, and for requests without an engine. tenant, tenant_id: empty for ENGINE, BASE.
activity_series = Table(
    "activity_series",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Integer, nullable=False),
    Column("tenant_id", String(32), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("name", String(256), nullable=False),
    Index("ix_activity_series_tenant_id", "tenant_id", "kind", "name"),
    Index("ix_activity_series_tenant", "tenant", "kind"),
    Index("ix_activity_series_name", "name", "kind"),
)


def aggregate(column: str) -> str:
    """Return the name of the SQL function that joins a column's values of several rows."""
    return "max" if column in MAXIMA else "sum"


def _sums(name: str) -> Table:
    """Return a table of sums of `usage` by series and period, updated in the transactions of the rows.

    start: start of the period, in Unix seconds. A bucket without requests is NULL, which takes no space.
    """
    return Table(
        name,
        metadata,
        Column("kind", Integer, primary_key=True, autoincrement=False),
        Column("start", BigInteger, primary_key=True, autoincrement=False),
        Column("series_id", BigInteger, primary_key=True, autoincrement=False),
        *(Column(column, BigInteger, nullable=False) for column in SUMMED),
        *(Column(column, Integer, nullable=True) for column in (*LATENCY, *TTFT, *MAXIMA)),
        Index(f"ix_{name}_series_id_start", "series_id", "start"),
        sqlite_with_rowid=False,
    )


# Tables by the length of their periods in seconds.
ACTIVITY = {60: _sums("activity_minute"), 3600: _sums("activity_hour"), 86400: _sums("activity_day")}
