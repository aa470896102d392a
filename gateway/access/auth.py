"""API keys: their form, their verification, and the caller that they identify.

A key is `lpx_<id>_<secret>`: a secret of 160 random bits and a check of 32 bits that only the deployment can compute,
so that a key that was never issued is refused without a database query. The database holds the id and HMAC-SHA256 of
the secret under the deployment's pepper, so a stolen table does not reveal a usable key.

While the pepper is rotated there are two. A key that only the old one verifies is hashed again under the new one; its
check digits, which its owner keeps, are then recorded, because only the old pepper can compute them.

`Authenticator` caches keys in memory and reads the database's change counters to keep them valid.
"""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gateway.access.peppers import CHECK_HEX, Peppers
from gateway.access.roles import AdminRole, admin_role
from gateway.access.running_requests import RunningRequests
from gateway.access.validity import problem_of
from gateway.caller import note_key
from gateway.errors import Forbidden, GatewayError, InvalidKey, Unavailable, WrongKey
from gateway.records.caches.changes import ASK_SECONDS, IDLE_SECONDS, Changes
from gateway.records.caches.lookups import Lookups
from gateway.records.keys.keys import ApiKey, Keys
from gateway.records.tenants.limits import Limits
from gateway.records.tenants.tenants import Tenant
from wire.bounded_dict import BoundedDict

log = logging.getLogger(__name__)

# Scope of routes that accept every valid key of a tenant.
ANY_SCOPE = "any"
BOOTSTRAP_KEY_ID = "bootstrap"

KEY_ID_BYTES = 8
SECRET_BYTES = 20

CACHE_ENTRIES = 10_000
# Scope of cached answers for keys that do not exist. They are dropped only when the database is replaced.
UNKNOWN_KEY = "unknown key"
# Maximum lag of a key's `last_used_at`, and the minimum time between two writes of it.
NOTE_USE_AFTER = timedelta(minutes=1)
WRITE_USE_SECONDS = 2.0

_KEY = re.compile(r"lpx_([0-9a-f]{16})_([0-9a-f]{40})([0-9a-f]{8})")


class TenantPrincipal(msgspec.Struct, frozen=True, kw_only=True):
    """Verified key of a tenant, with the required scope; or an operator who sends requests on the tenant's behalf.

    key_family: the id under which the key's limits are counted; a rotated key keeps its predecessor's. label, scopes,
    expires_at: end of the key's life. watched: what must stay valid: ids of keys, or of the tenant or the session, with
    their prefixes (`gateway/records/keys/watched.py`).
    """

    key_id: str
    tenant: Tenant
    key_family: str = ""
    allowed_models: tuple[str, ...] | None = None
    key_limits: Limits = Limits()
    label: str = ""
    scopes: frozenset[str] = frozenset()
    expires_at: datetime | None = None
    watched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "key_family", self.key_family or self.key_id)
        msgspec.structs.force_setattr(self, "watched", self.watched or (self.key_id,))

    def may_use(self, model: str) -> bool:
        return self.allowed_models is None or model in self.allowed_models

    def check_model(self, model: str) -> None:
        """Raise Forbidden if the key may not use the model. The error is the same whether or not the model exists."""
        if not self.may_use(model):
            names = ", ".join(self.allowed_models or ())
            message = f"This API key may not use the model '{model}', only: {names}."
            raise Forbidden(message, param="model", code="model_not_allowed")


class AdminPrincipal(msgspec.Struct, frozen=True):
    """Verified admin key."""

    key_id: str
    role: AdminRole


class _Known(msgspec.Struct):
    """Cached database answer for a key id. mark: `Changes.mark` before the query. used_at: the last recorded use."""

    key: ApiKey | None
    mark: int
    used_at: datetime | None = None

    @property
    def scope(self) -> str:
        return UNKNOWN_KEY if self.key is None else self.key.scope


class Authenticator:
    """Issuer and verifier of keys. Raises InvalidKey (401), Forbidden (403), Unavailable without a database.

    Every change of a key or a tenant increments the tenant's counter in the database, in the same transaction. While
    `watch`, which reads the counters continuously, finds a tenant's counter unchanged, its cached keys are valid, and
    no request waits for the database. After a change the tenant's keys are looked up again, and running requests of
    invalid keys are ended. If the counters cannot be read, cached keys stay valid for the time that `Changes` allows.
    """

    def __init__(
        self, keys: Keys, pepper: str, admin_key: str | None, changes: Changes, *, admin_key_anywhere: bool = True
    ) -> None:
        """pepper: one, or two during a rotation. admin_key: the bootstrap key, None if it is disabled.
        admin_key_anywhere: whether tenants' routes recognise it too, for a helpful error; if not, only the admin routes
        compare a client's key with it.
        """
        self._keys = keys
        self._changes = changes
        self._peppers = Peppers(pepper)
        self._admin_hash = None if admin_key is None else self._hash(BOOTSTRAP_KEY_ID, admin_key)
        # By key id, least recently looked up first. Missing keys have their own cache: a tenant can create and delete
        # any number of keys, and they must not evict existing ones.
        self._known = BoundedDict[str, _Known](CACHE_ENTRIES)
        self._missing = BoundedDict[str, _Known](CACHE_ENTRIES)
        self._lookups = Lookups(self._look_up)
        self._admin_key_anywhere = admin_key_anywhere
        self.running = RunningRequests()
        self._used: dict[str, datetime] = {}
        # Keys that were hashed again, by their former hash, and not written yet.
        self._rehashed: dict[str, ApiKey] = {}
        # Check digits under former peppers, by key id; None: not read yet.
        self._former_checks: dict[str, str] | None = None

    def issue(
        self, tenant: Tenant | None, scopes: frozenset[str], label: str, *, key_id: str | None = None, **fields: Any
    ) -> tuple[ApiKey, str]:
        """Return a new key and its clear text, which is not kept anywhere. fields: further fields of ApiKey.

        Does not store the key; `Keys.add` does.
        """
        key_id, random = key_id or secrets.token_hex(KEY_ID_BYTES), secrets.token_hex(SECRET_BYTES)
        secret = random + self._peppers.check(key_id, random)
        key = ApiKey(
            id=key_id,
            tenant=tenant,
            label=label,
            scopes=scopes,
            secret_hash=self._hash(key_id, secret),
            pepper=self._peppers.fingerprint,
            created_at=datetime.now(UTC),
            **fields,
        )
        return key, f"lpx_{key_id}_{secret}"

    async def tenant(self, authorization: str | None, scope: str) -> TenantPrincipal:
        """Return the tenant of an Authorization header, if its key has `scope`; ANY_SCOPE suits every key."""
        key = await self._recognise(_bearer(authorization))
        if key.tenant is None:
            raise Forbidden("This is an admin key; tenants' routes need a tenant's key.")
        if scope != ANY_SCOPE and scope not in key.scopes:
            raise Forbidden(f"This API key does not have the '{scope}' scope.")
        return principal_of(key, key.tenant)

    async def admin(self, authorization: str | None) -> AdminPrincipal:
        """Return the admin key in an Authorization header."""
        presented = _bearer(authorization)
        if self.is_bootstrap(presented):
            note_key(BOOTSTRAP_KEY_ID, None)
            return AdminPrincipal(BOOTSTRAP_KEY_ID, "operator")
        key = await self._recognise(presented)
        role = admin_role(key.scopes)
        if role is None:
            raise Forbidden("This route needs an admin key.")
        return AdminPrincipal(key.id, role)

    async def recognise(self, presented: str) -> ApiKey:
        """Return the valid key with this clear text, a tenant's or an operator's; never the bootstrap key."""
        return await self._recognise(presented)

    async def valid_key(self, key_id: str, *, may_be_stale: bool = False) -> ApiKey | None:
        """Return a key while it is valid and its tenant is not suspended, otherwise None.

        may_be_stale: while the database is unavailable, use the cached answer if there is one.
        """
        try:
            known = self._current(key_id) or await self._find(key_id)
        except Unavailable:
            last = self._cached(key_id)
            if last is None or not may_be_stale:
                raise
            known = last
        return None if problem_of(key_id, known.key) else known.key

    def keyed_hash(self, purpose: str, text: str) -> str:
        """Return a text's HMAC-SHA256 under the pepper, in hexadecimal. Each purpose has hashes of its own."""
        return self._hash(purpose, text)

    @property
    def bootstrap_proof(self) -> str | None:
        """Return a digest of the bootstrap key, which changes with the key; None if it is disabled."""
        return None if self._admin_hash is None else self._hash("bootstrap-proof", self._admin_hash)

    @asynccontextmanager
    async def while_valid(self, watched: tuple[str, ...]) -> AsyncIterator[None]:
        """Cancel the block, as a time-out would, once a key is revoked or expired or its tenant suspended or deleted.

        watched: as in TenantPrincipal. Raises InvalidKey or Forbidden on cancellation.
        """
        try:
            async with asyncio.timeout(None) as limit:
                with self.running.add(watched, limit):
                    yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise await self.problem_of(watched) from error

    async def problem_of(self, keys: Iterable[str]) -> GatewayError:
        """Return the error of a running request that was ended because of these keys."""
        problems = [problem_of(each, (await self._find(each)).key) for each in keys]
        return next(filter(None, problems), InvalidKey("This API key is no longer valid."))

    async def watch(self) -> None:
        """Keep cached keys valid until cancelled. Run it as a task."""
        last_written = time.monotonic()
        while True:
            begun = time.monotonic()
            try:
                await self.refresh()
                if (self._used or self._rehashed) and time.monotonic() - last_written > WRITE_USE_SECONDS:
                    last_written = time.monotonic()
                    await self._write_uses()
            except Unavailable:
                # Cached keys expire soon, then requests fail with 503; known revocations and expiries stay in force.
                self._end_known_invalid()
            await asyncio.sleep(max(0.0, begun + ASK_SECONDS - time.monotonic()))
            # Without running requests there is nothing to end soon.
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, begun + IDLE_SECONDS - time.monotonic())):
                    await self.running.present.wait()

    async def catch_up(self) -> None:
        """Apply a change that this process has made."""
        await self._changes.catch_up()

    async def refresh(self) -> None:
        """Read changes now and end the running requests of keys that became invalid."""
        await self._changes.read()
        if self._former_checks is None:
            self._former_checks = await self._keys.former_checks()
        if missing := [key_id for key_id in self.running.keys if self._current(key_id) is None]:
            mark = self._changes.mark
            found = await self._keys.find_all(missing)
            for key_id in missing:
                self._learn(key_id, found.get(key_id), mark)
        self._end_known_invalid()

    def _end_known_invalid(self) -> None:
        known = {key_id: found for key_id in self.running.keys if (found := self._cached(key_id)) is not None}
        if invalid := {key_id for key_id, found in known.items() if problem_of(key_id, found.key) is not None}:
            self.running.end(invalid)

    async def _recognise(self, presented: str) -> ApiKey:
        match = _KEY.fullmatch(presented)
        if match is None:
            if self._admin_key_anywhere and self.is_bootstrap(presented):
                raise Forbidden("This is an admin key; tenants' routes need a tenant's key.")
            raise WrongKey
        key_id, random, check = match.groups()
        known = self._current(key_id)
        if known is None:
            if self._former_checks is None:
                self._former_checks = await self._keys.former_checks()
            if not self._is_check(key_id, random, check):
                raise WrongKey
            known = await self._find(key_id)
        key = known.key
        pepper = None if key is None else self._peppers.match(key_id, random + check, key.secret_hash)
        if key is None or pepper is None:
            raise WrongKey
        tenant, problem = key.tenant, problem_of(key.id, key)
        names = (None, None) if tenant is None else (tenant.name, tenant.id)
        note_key(key.id, *names, is_refused=problem is not None)
        if problem is not None:
            raise problem
        self._note_use(known, key.id)
        if key.pepper != self._peppers.fingerprint:
            self._rehash(known, key, random + check, is_other=pepper != self._peppers.fingerprint)
        return key

    def _rehash(self, known: _Known, key: ApiKey, secret: str, *, is_other: bool) -> None:
        """Hash a verified key under the first pepper. is_other: whether its present hash is under another one."""
        changes: dict[str, Any] = {"pepper": self._peppers.fingerprint, "secret_hash": self._hash(key.id, secret)}
        if is_other:
            changes["check_digits"] = secret[-CHECK_HEX:]
        # The cache has the new hash at once, so that the key is hashed once and not at each request.
        known.key = self._rehashed[key.secret_hash] = msgspec.structs.replace(key, **changes)

    def is_issued(self, presented: str) -> bool:
        """Return whether the deployment has issued a key, by its check digits, which only the deployment can compute.

        The key may be revoked, expired or deleted; the database is not queried.
        """
        match = _KEY.fullmatch(presented)
        return match is not None and self._is_check(match[1], match[2], match[3])

    def is_bootstrap(self, presented: str) -> bool:
        """Return whether a text is the bootstrap admin key."""
        known = self._admin_hash
        return known is not None and hmac.compare_digest(self._hash(BOOTSTRAP_KEY_ID, presented), known)

    def _current(self, key_id: str) -> _Known | None:
        """Return the cached answer for a key, None if a query is needed."""
        known = self._cached(key_id)
        return known if known is not None and self._changes.holds(known.mark, known.scope) else None

    def _cached(self, key_id: str) -> _Known | None:
        return self._known.get(key_id) or self._missing.get(key_id)

    async def _find(self, key_id: str) -> _Known:
        known = self._cached(key_id)
        if known is not None and await self._changes.confirm(known.mark, known.scope):
            return known
        return await self._lookups.get(key_id)

    async def _look_up(self, key_id: str) -> _Known:
        # Read the mark before the query, so that a change during the query invalidates its answer.
        mark = self._changes.mark
        return self._learn(key_id, await self._keys.find(key_id), mark)

    def _learn(self, key_id: str, key: ApiKey | None, mark: int) -> _Known:
        used_at = self._used.get(key_id, key.last_used_at if key else None)
        known = _Known(key, mark, used_at)
        if key is None:
            self._known.pop(key_id, None)
            self._missing.put(key_id, known)
        else:
            self._missing.pop(key_id, None)
            self._known.put(key_id, known)
        return known

    def _note_use(self, known: _Known, key_id: str) -> None:
        now = datetime.now(UTC)
        if known.used_at is None or now - known.used_at > NOTE_USE_AFTER:
            known.used_at = self._used[key_id] = now

    async def _write_uses(self) -> None:
        if used := dict(self._used):
            await self._keys.touch(used)
            for key_id in used:
                del self._used[key_id]
        if rehashed := dict(self._rehashed):
            await self._keys.rehash(rehashed)
            for former in rehashed:
                del self._rehashed[former]

    def _is_check(self, key_id: str, random: str, digits: str) -> bool:
        return self._peppers.is_check(key_id, random, digits, (self._former_checks or {}).get(key_id))

    def _hash(self, key_id: str, secret: str) -> str:
        return self._peppers.hash(key_id, secret)


def principal_of(key: ApiKey, tenant: Tenant) -> TenantPrincipal:
    """Return the principal of a tenant's verified key."""
    return TenantPrincipal(
        key_id=key.id,
        tenant=tenant,
        key_family=key.family_id,
        allowed_models=key.allowed_models,
        key_limits=key.limits,
        label=key.label,
        scopes=key.scopes,
        expires_at=key.expires_at,
    )


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("You didn't provide an API key. Send it in the header: Authorization: Bearer <key>.")
    return key.strip()
