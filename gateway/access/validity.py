"""Faults of keys whose secret is right, and of the tenants and sessions that running requests need."""

from datetime import UTC, datetime

from gateway.errors import Forbidden, GatewayError, InvalidKey
from gateway.records.keys.keys import ApiKey
from gateway.records.keys.watched import SESSION_ITSELF
from wire.error_codes import TENANT_SUSPENDED


def problem_of(key_id: str, key: ApiKey | None) -> GatewayError | None:
    """Return the error for a key, a tenant or a session that is not valid, None if it is valid.

    key: None if it does not exist.
    """
    if key_id.startswith(SESSION_ITSELF) and (key is None or not key.valid(datetime.now(UTC))):
        return InvalidKey("This session has ended; log in again.")
    if key is None:
        return InvalidKey("This API key no longer exists: its tenant has been deleted.")
    if key.revoked_at is not None:
        return InvalidKey("This API key has been revoked.")
    if not key.valid(datetime.now(UTC)):
        return InvalidKey("This API key has expired.")
    if key.tenant is not None and key.tenant.suspended:
        return Forbidden("This tenant is suspended; ask the operator.", code=TENANT_SUSPENDED)
    return None
