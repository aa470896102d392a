"""API keys: what they look like, how they are kept, and who is asking.

A key is `lpx_<id>_<secret>`. The database holds the id and HMAC-SHA256 of the secret under the deployment's pepper, so
a stolen table opens nothing. Looked-up keys are cached for less than a second: that is how long a revoked one may live.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from datetime import UTC, datetime

import msgspec

from gateway.errors import Forbidden, InvalidKey
from gateway.records.tenants import ApiKey, Tenant, Tenants

TENANT_SCOPES = frozenset({"inference", "adapters", "usage"})
ADMIN_SCOPE = "admin"
BOOTSTRAP_KEY_ID = "bootstrap"

KEY_ID_BYTES = 8
SECRET_BYTES = 24  # 192 bits
CACHE_SECONDS = 0.5
CACHE_ENTRIES = 10_000

_KEY = re.compile(r"lpx_([0-9a-f]{16})_([0-9a-f]{48})")


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asking. tenant is None exactly for admins."""

    key_id: str
    tenant: Tenant | None
    scopes: frozenset[str]


class TenantPrincipal(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's key that has been found to hold the scope asked for."""

    key_id: str
    tenant: Tenant


class Authenticator:
    """Issues keys and recognises them. Raises InvalidKey (401) and Forbidden (403)."""

    def __init__(self, tenants: Tenants, pepper: str, admin_key: str) -> None:
        self._tenants = tenants
        self._pepper = pepper.encode()
        self._admin_hash = self._hash(BOOTSTRAP_KEY_ID, admin_key)
        # key id -> (the moment it was asked for, the key or None); oldest first.
        self._cache: OrderedDict[str, tuple[float, ApiKey | None]] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[ApiKey | None]] = {}

    def issue(self, tenant: Tenant | None, scopes: frozenset[str], label: str) -> tuple[ApiKey, str]:
        """A new key and its one and only clear text. Not stored yet: that is `Tenants.add_key`."""
        key_id, secret = secrets.token_hex(KEY_ID_BYTES), secrets.token_hex(SECRET_BYTES)
        key = ApiKey(
            id=key_id,
            tenant=tenant,
            label=label,
            scopes=scopes,
            secret_hash=self._hash(key_id, secret),
            created_at=datetime.now(UTC),
            revoked_at=None,
        )
        return key, f"lpx_{key_id}_{secret}"

    async def tenant(self, authorization: str | None, scope: str) -> TenantPrincipal:
        """The tenant behind an Authorization header, if its key may do `scope`."""
        principal = await self._principal(_bearer(authorization))
        if principal.tenant is None:
            raise Forbidden("This is an admin key; tenants' routes need a tenant's key.")
        if scope not in principal.scopes:
            raise Forbidden(f"This API key does not have the '{scope}' scope.")
        return TenantPrincipal(key_id=principal.key_id, tenant=principal.tenant)

    async def admin(self, authorization: str | None) -> str:
        """The id of the admin key in an Authorization header."""
        return await self.admin_key(_bearer(authorization))

    async def admin_key(self, key: str) -> str:
        """The id of an admin key given in the clear."""
        principal = await self._principal(key)
        if ADMIN_SCOPE not in principal.scopes:
            raise Forbidden("This route needs an admin key.")
        return principal.key_id

    def forget(self, key_id: str) -> None:
        """Drops a key from this process's cache: a revocation asked for here acts here at once."""
        self._cache.pop(key_id, None)

    async def _principal(self, presented: str) -> Principal:
        match = _KEY.fullmatch(presented)
        if match is None:
            if hmac.compare_digest(self._hash(BOOTSTRAP_KEY_ID, presented), self._admin_hash):
                return Principal(key_id=BOOTSTRAP_KEY_ID, tenant=None, scopes=frozenset({ADMIN_SCOPE}))
            raise InvalidKey
        key = await self._find(match[1])
        # An unknown key is hashed as well, so that its answer takes as long as a known key's with a wrong secret.
        expected = key.secret_hash if key is not None else self._admin_hash
        right = hmac.compare_digest(self._hash(match[1], match[2]), expected)
        if key is None or not right or key.revoked_at is not None:
            raise InvalidKey
        return Principal(key_id=key.id, tenant=key.tenant, scopes=key.scopes)

    async def _find(self, key_id: str) -> ApiKey | None:
        now = time.monotonic()
        cached = self._cache.get(key_id)
        if cached is not None and now - cached[0] < CACHE_SECONDS:
            return cached[1]
        lookup = self._lookups.get(key_id)
        if lookup is None:
            # One question for all the requests that wait for the same key; none of them may cancel it for the others.
            lookup = self._lookups[key_id] = asyncio.create_task(self._look_up(key_id, asked_at=now))
            lookup.add_done_callback(lambda _: self._lookups.pop(key_id, None))
        return await asyncio.shield(lookup)

    async def _look_up(self, key_id: str, asked_at: float) -> ApiKey | None:
        key = await self._tenants.find_key(key_id)
        self._cache[key_id] = (asked_at, key)
        self._cache.move_to_end(key_id)
        while len(self._cache) > CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return key

    def _hash(self, key_id: str, secret: str) -> str:
        return hmac.new(
            self._pepper, f"{key_id}.{secret}".encode("utf-8", "surrogateescape"), hashlib.sha256
        ).hexdigest()


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("You didn't provide an API key. Send it in the header: Authorization: Bearer <key>.")
    return key.strip()
