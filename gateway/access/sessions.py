"""Sessions of browsers, by a cookie with a random token. The database holds only the token's keyed hash.

A session ends at its expiry, after a time without use, by log-out or revocation, and as soon as its key is revoked or
expires or its tenant is suspended or deleted: like keys, sessions are cached only while the change counter of their
tenant, or of the operators, is unchanged.
"""

import asyncio
import hmac
import re
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import cast

import msgspec
from aiohttp import web

from gateway.access.auth import BOOTSTRAP_KEY_ID, Authenticator, TenantPrincipal, principal_of
from gateway.access.roles import AdminRole, Role, TenantRole, admin_role, home_of, tenant_role, tenant_scopes
from gateway.caller import CALLER, note_key
from gateway.errors import Unavailable
from gateway.records.caches.changes import Changes
from gateway.records.caches.lookups import Lookups
from gateway.records.keys.keys import ApiKey
from gateway.records.keys.sessions import Session, SessionRecords
from gateway.records.keys.watched import SESSION_ITSELF, TENANT_ITSELF
from gateway.records.tenants.tenants import Tenant
from wire.bounded_dict import BoundedDict

COOKIE = "loraplex_session"
TOKEN_BYTES, CHECK_HEX = 32, 16
CACHE_ENTRIES = 10_000
# Time between two writes of the last uses, and the maximum age of a session's stored last use.
WRITE_SECONDS = 2.0
NOTE_USE_AFTER = timedelta(minutes=1)

# Lifetime of a session that the bootstrap key opens while the database is away.
EMERGENCY_SECONDS = 1800

_TOKEN = re.compile(r"([0-9a-f]{64})([0-9a-f]{16})")
_EMERGENCY = re.compile(r"e([0-9]{10})([0-9a-f]{64})")


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """Person behind a valid session.

    session_id: public id, not the token. subject: actor of the person's changes, a key's id or `oidc:...`. label: name
    to show. tenant: None for operators. scopes: what the person may do in the tenant's console; empty for operators.
    csrf: value that forms send back in the field `csrf`. principal: a tenant's person, as for a request with a key.
    """

    session_id: str
    subject: str
    label: str
    role: Role
    tenant: Tenant | None
    scopes: frozenset[str]
    csrf: str
    expires_at: datetime
    principal: TenantPrincipal | None = None

    @property
    def home(self) -> str:
        """Return the path of the pages that the visitor may see: `/admin` or `/console`."""
        return home_of(self.role)


# Visitor of a page, on routes with the scope `page`.
VISITOR = web.RequestKey("visitor", Visitor)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Person whose identity has just been proved. Fields as in `gateway.records.keys.sessions.Session`."""

    subject: str
    label: str
    role: Role
    tenant: Tenant | None = None
    key_id: str | None = None
    proof: str | None = None


class _Known(msgspec.Struct):
    """Cached answer for a token. mark: `Changes.mark` before the query."""

    session: Session
    mark: int


class Sessions:
    """Opens, finds and ends sessions. Raises Unavailable without a database, except where it says otherwise.

    lifetime, idle: time until a session ends, after the log-in and after the last use. proofs: digests of the settings
    on which sessions without a key may rely.
    """

    def __init__(
        self,
        records: SessionRecords,
        auth: Authenticator,
        changes: Changes,
        *,
        lifetime: timedelta,
        idle: timedelta,
        proofs: frozenset[str] = frozenset(),
    ) -> None:
        self._records = records
        self._auth = auth
        self._changes = changes
        self._lifetime = lifetime
        self._idle = idle
        self._note_after = min(NOTE_USE_AFTER, idle / 4)
        self._proofs = proofs
        self._known = BoundedDict[str, _Known](CACHE_ENTRIES)  # by the token's hash, least recently looked up first
        self._lookups = Lookups(self._look_up)
        self._used: dict[str, datetime] = {}

    async def open(self, person: Identity) -> str:
        """Store a session and return its token, which is not kept anywhere.

        While the database is away, the bootstrap key gets a token for reading that any gateway process accepts until
        the database is back, for EMERGENCY_SECONDS at most.
        """
        random = secrets.token_hex(TOKEN_BYTES)
        token = random + self._check(random)
        now, caller = datetime.now(UTC), CALLER.get()
        session = Session(
            id=secrets.token_hex(8),
            token_hash=self._auth.keyed_hash("session", token),
            address=None if caller is None else caller.address,
            created_at=now,
            last_used_at=now,
            expires_at=now + self._lifetime,
            **msgspec.structs.asdict(person),
        )
        try:
            await self._records.add(session)
        except Unavailable:
            if person.subject != BOOTSTRAP_KEY_ID:
                raise
            until = str(int(time.time()) + EMERGENCY_SECONDS)
            return f"e{until}{self._sign_emergency(until)}"
        return token

    async def find(self, token: str, *, is_read: bool = False, is_use: bool = True) -> Visitor | None:
        """Return the visitor of a token and note the use; None if the session is over or never existed.

        is_read: while the database is away, an operator's session that this process knows may still read, so that the
        outage can be watched. is_use: whether to note the use; a stream that checks its session does not prolong it.
        """
        if emergency := _EMERGENCY.fullmatch(token):
            return await self._find_emergency(token, emergency[1], emergency[2]) if is_read else None
        match = _TOKEN.fullmatch(token)
        if match is None or not hmac.compare_digest(match[2], self._check(match[1])):
            # Such a token was never issued, so the database is not queried.
            return None
        hashed, is_stale = self._auth.keyed_hash("session", token), False
        try:
            known = await self._find(hashed)
        except Unavailable:
            known = self._known.get(hashed)
            if not is_read or known is None or known.session.tenant is not None:
                raise
            is_stale = True
        if known is None:
            return None
        visitor = await self._visitor(known.session, self._auth.keyed_hash("csrf", token), is_stale)
        if visitor is not None:
            if is_use:
                self._note_use(hashed, known)
            tenant = visitor.tenant
            owner = (None, None) if tenant is None else (tenant.name, tenant.id)
            note_key(visitor.subject, owner[0], owner[1], visitor.session_id)
        return visitor

    async def close(self, session_id: str, actor: str, *, action: str = "session.revoke") -> None:
        """End a session. action: name of the audit entry's action. Raises RecordNotFound."""
        await self._records.remove(session_id, actor, action)
        await self._changes.catch_up()

    async def watch(self) -> None:
        """Write the times of last use until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            if self._used:
                used = dict(self._used)
                try:
                    await self._records.touch(used)
                except Unavailable:
                    continue
                for session_id, at in used.items():
                    if self._used.get(session_id) == at:
                        del self._used[session_id]

    async def sweep(self) -> int:
        """Remove the sessions that are over. Returns their number."""
        return await self._records.sweep(self._idle)

    async def _find_emergency(self, token: str, until: str, signature: str) -> Visitor | None:
        if int(until) <= time.time() or not hmac.compare_digest(signature, self._sign_emergency(until)):
            return None
        try:
            await self._changes.read()
        except Unavailable:
            note_key(BOOTSTRAP_KEY_ID, None)
            return Visitor(
                session_id="",
                subject=BOOTSTRAP_KEY_ID,
                label="bootstrap key",
                role="viewer",
                tenant=None,
                scopes=frozenset(),
                csrf=self._auth.keyed_hash("csrf", token),
                expires_at=datetime.fromtimestamp(int(until), UTC),
            )
        return None

    def _sign_emergency(self, until: str) -> str:
        return self._auth.keyed_hash("session-emergency", f"{until}.{self._auth.bootstrap_proof}")

    async def _find(self, hashed: str) -> _Known | None:
        known = self._known.get(hashed)
        if (
            known is not None
            and await self._changes.confirm(known.mark, known.session.scope)
            and not known.session.is_over(datetime.now(UTC), self._idle)
        ):
            return known
        # A session that seems idle may have been used at another gateway.
        found = await self._lookups.get(hashed)
        if found is None or found.session.is_over(datetime.now(UTC), self._idle):
            return None
        return found

    async def _look_up(self, hashed: str) -> _Known | None:
        # Read the mark before the query, so that a change during the query invalidates its answer.
        mark = self._changes.mark
        session = await self._records.find(hashed)
        if session is None:
            self._known.pop(hashed, None)
            return None
        known = _Known(session, mark)
        self._known.put(hashed, known)
        return known

    async def _visitor(self, session: Session, csrf: str, is_stale: bool) -> Visitor | None:
        if is_stale and session.is_over(datetime.now(UTC), self._idle):
            return None
        key: ApiKey | None = None
        if session.key_id is not None:
            key = await self._auth.valid_key(session.key_id, may_be_stale=is_stale)
            if key is None:
                return None
        elif session.proof not in self._proofs or (session.tenant is not None and session.tenant.suspended):
            return None
        tenant = session.tenant if key is None else key.tenant
        role, scopes, principal = _rights(session, key, tenant)
        return Visitor(
            session_id=session.id,
            subject=session.subject,
            label=session.label,
            role=role,
            tenant=tenant,
            scopes=scopes,
            csrf=csrf,
            expires_at=session.expires_at,
            principal=principal,
        )

    def _note_use(self, hashed: str, known: _Known) -> None:
        now = datetime.now(UTC)
        if now - known.session.last_used_at > self._note_after:
            session = msgspec.structs.replace(known.session, last_used_at=now)
            self._known[hashed] = _Known(session, known.mark)
            self._used[session.id] = now

    def _check(self, random: str) -> str:
        return self._auth.keyed_hash("session-check", random)[:CHECK_HEX]


def _rights(
    session: Session, key: ApiKey | None, tenant: Tenant | None
) -> tuple[Role, frozenset[str], TenantPrincipal | None]:
    """Return the present role of a session, and its scopes and principal if it is a tenant's."""
    if tenant is None:
        role = admin_role(key.scopes) if key is not None else cast(AdminRole, session.role)
        assert role is not None  # only admin keys open operators' sessions
        return role, frozenset(), None
    itself = f"{SESSION_ITSELF}{session.id}"
    if key is not None:
        principal = msgspec.structs.replace(principal_of(key, tenant), watched=(key.id, itself))
        return tenant_role(key.scopes), key.scopes, principal
    of_tenant = cast(TenantRole, session.role)
    scopes = tenant_scopes(of_tenant)
    watched = (f"{TENANT_ITSELF}{tenant.id}", itself)
    return of_tenant, scopes, TenantPrincipal(key_id=session.subject, tenant=tenant, scopes=scopes, watched=watched)


def by_key(key: ApiKey) -> Identity:
    """Return the person who has presented this key."""
    role = admin_role(key.scopes) if key.tenant is None else tenant_role(key.scopes)
    assert role is not None
    label = key.label or f"key {key.id}"
    return Identity(subject=key.id, label=label, role=role, tenant=key.tenant, key_id=key.id)


def by_bootstrap_key(proof: str) -> Identity:
    return Identity(subject=BOOTSTRAP_KEY_ID, label="bootstrap key", role="operator", proof=proof)
