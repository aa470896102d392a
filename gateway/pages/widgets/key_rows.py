"""Table of keys, on the page of all keys and on a tenant's."""

from datetime import UTC, datetime
from typing import Any

from gateway.limits.kinds import REQUEST_KINDS
from gateway.pages.widgets.forms import terms_text
from gateway.pages.widgets.tables import Column, Table
from gateway.records.keys.keys import ApiKey
from gateway.records.keys.list import key_state


def limits_text(key: ApiKey) -> str:
    values = {kind.name: getattr(key.limits, kind.name) for kind in REQUEST_KINDS}
    return terms_text({name: value for name, value in values.items() if value is not None})


KEY_COLUMNS = (
    Column("label", "Key"),
    Column("tenant", "Tenant", value=lambda key: key.tenant.name if key.tenant else "admin"),
    Column("state", "State", sortable=False, value=lambda key: key_state(key, datetime.now(UTC))),
    Column("scopes", "Scopes", sortable=False, value=lambda key: " ".join(sorted(key.scopes))),
    Column("models", "Models", sortable=False, value=lambda key: " ".join(key.allowed_models or ())),
    Column("limits", "Limits", sortable=False, value=limits_text),
    Column("created_at", "Created"),
    Column("expires_at", "Expires"),
    Column("last_used_at", "Last use"),
)
CSV_COLUMNS = (Column("id", "Id"), *KEY_COLUMNS)
TONES = {
    "valid": ("valid", "good"),
    "never_used": ("never used", "info"),
    "expiring": ("expires soon", "warn"),
    "expired": ("expired", "quiet"),
    "revoked": ("revoked", "bad"),
}


def key_context(table: Table) -> dict[str, Any]:
    """Return the variables of `templates/widgets/key_table.html`."""
    now = datetime.now(UTC)
    states = {key.id: TONES[key_state(key, now)] for key in table.rows}
    lives = {key.id for key in table.rows if key.valid(now)}
    return {"table": table, "states": states, "lives": lives, "limits_text": limits_text}
