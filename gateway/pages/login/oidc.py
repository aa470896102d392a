"""`/admin/login/oidc` and `/console/login/oidc`: log-in at the OpenID Connect provider."""

import hmac
import re
import secrets
import time
from typing import Any

import msgspec
from aiohttp import web

from gateway.access.auth import Authenticator
from gateway.access.oidc import LoginRefused, Oidc
from gateway.access.roles import ADMIN_PATH, ADMIN_ROLES, TENANT_ROLES
from gateway.access.sessions import Identity
from gateway.access.signed_values import signed, verified
from gateway.api.page_guard import NO_STORE, safe_next
from gateway.caller import CALLER
from gateway.errors import Forbidden, RecordNotFound, TooManyWrongKeys, Unavailable
from gateway.pages.login.page import LoginPages, TooManyLogins, home_of_request
from gateway.records.tenants.tenants import Tenants
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import oidc_state_key
from wire.error_codes import TENANT_SUSPENDED

STATE_COOKIE = "loraplex_oidc"
# Purpose of the signature of a log-in's state.
STATE = "oidc-state"
# Maximum time for a log-in at the provider.
STATE_SECONDS = 600
MAX_USED = 10_000
# Subjects that are recorded as they are; others are hashed. They fit, with their prefix, into columns for a key's id,
# because a tenant's person can send requests from the playground.
PLAIN_SUBJECT = re.compile(r"[A-Za-z0-9._@|:-]{1,27}")
HASHED_CHARS = 24


class StaleLogin(LoginRefused):
    """The browser has begun no such log-in."""

    def __init__(self) -> None:
        super().__init__("This log-in was not begun here, has expired or was used already. Begin it again.")


class _State(msgspec.Struct, frozen=True):
    state: str
    nonce: str
    verifier: str
    then: str
    until: int


class OidcPages:
    """Routes for the log-in at the provider. oidc: None if there is none. A state is kept in a signed cookie of the
    browser that began the log-in, and is used once.
    """

    def __init__(
        self, *, oidc: Oidc | None, auth: Authenticator, tenants: Tenants, pages: LoginPages, redis: Any
    ) -> None:
        self._oidc = oidc
        self._auth = auth
        self._tenants = tenants
        self._pages = pages
        self._redis = redis
        self._used: dict[str, int] = {}

    async def begin(self, request: web.Request) -> web.Response:
        """Redirect to the provider."""
        oidc, home = self._client(), home_of_request(request)
        then = safe_next(request.query.get("next"), home)
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        kept = _State(state, nonce, verifier, then, int(time.time()) + STATE_SECONDS)
        try:
            where = await oidc.authorization_url(
                redirect=_redirect(request, home), state=kept.state, nonce=kept.nonce, verifier=kept.verifier
            )
        except Unavailable as error:
            return await self._pages.refuse_oidc(request, then, error)
        response = web.Response(status=303, headers={"Location": where, **NO_STORE})
        caller = CALLER.get()
        response.set_cookie(
            STATE_COOKIE,
            signed(self._auth.keyed_hash, STATE, kept),
            path=f"{home}/login/oidc",
            max_age=STATE_SECONDS,
            httponly=True,
            # The browser must send the cookie after the provider's redirect, which comes from another site.
            samesite="Lax",
            secure=caller is not None and caller.is_https,
        )
        return response

    async def finish(self, request: web.Request) -> web.StreamResponse:
        """Open a session for the person whom the provider names."""
        oidc, home, then = self._client(), home_of_request(request), f"{home_of_request(request)}/"
        try:
            # Each call costs a request to the provider.
            self._pages.refuse_guesses(request)
            kept = await self._verified(request)
            then = kept.then
            if "error" in request.query or not request.query.get("code"):
                raise LoginRefused("The log-in provider did not log you in.")
            redirect = _redirect(request, home)
            token = await oidc.redeem(request.query["code"], redirect=redirect, verifier=kept.verifier)
            person = await self._person(await oidc.verify(token, kept.nonce), home)
            self._pages.count(person)
        except (TooManyWrongKeys, TooManyLogins) as error:
            return self._pages.too_many(request, then, error.retry_after)
        except StaleLogin as error:
            # Not counted: it costs no request to the provider, and any site can make a browser send it.
            response = self._pages.refuse_stale(request, then, error)
        except (LoginRefused, Forbidden, Unavailable) as error:
            response = await self._pages.refuse_oidc(request, then, error)
        else:
            response = await self._pages.admit(request, person, then, from_elsewhere=True)
        response.del_cookie(STATE_COOKIE, path=f"{home}/login/oidc")
        return response

    async def _person(self, claims: dict[str, Any], home: str) -> Identity:
        """Return the person, with the highest role that the groups grant below `home`. Raises Forbidden."""
        provider = self._client().provider
        grant = provider.grant_of(claims, ADMIN_ROLES if home == ADMIN_PATH else TENANT_ROLES)
        tenant = None
        if grant.tenant is not None:
            try:
                tenant = await self._tenants.get(grant.tenant)
            except RecordNotFound as error:
                raise Forbidden("The tenant of your group does not exist.", code="role_needed") from error
            if tenant.suspended:
                raise Forbidden("This tenant is suspended; ask the operator.", code=TENANT_SUSPENDED)
        subject = claims["sub"]
        if not PLAIN_SUBJECT.fullmatch(subject):
            subject = self._auth.keyed_hash("oidc-subject", subject)[:HASHED_CHARS]
        label = next((claims[name] for name in ("email", "name", "preferred_username") if claims.get(name)), subject)
        shown = "".join(character for character in str(label) if character.isprintable())[:100]
        return Identity(subject=f"oidc:{subject}", label=shown, role=grant.role, tenant=tenant, proof=provider.proof)

    def _client(self) -> Oidc:
        if self._oidc is None:
            raise web.HTTPNotFound
        return self._oidc

    async def _verified(self, request: web.Request) -> _State:
        """Return the state of the log-in that the browser began. Raises StaleLogin."""
        kept: _State | None = verified(self._auth.keyed_hash, STATE, request.cookies.get(STATE_COOKIE, ""), _State)
        if kept is None:
            raise StaleLogin
        given = request.query.get("state", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, kept.state.encode()) or time.time() > kept.until:
            raise StaleLogin
        if not await self._use(kept):
            raise StaleLogin
        return kept

    async def _use(self, kept: _State) -> bool:
        """Return whether the state is used for the first time: at any gateway, or at this one while Redis is away.

        Anybody can fill the memory of used states, so it must not refuse log-ins while Redis answers.
        """
        now = int(time.time())
        self._used = {state: until for state, until in self._used.items() if until >= now}
        if kept.state in self._used:
            return False
        if has_room := len(self._used) < MAX_USED:
            self._used[kept.state] = kept.until
        try:
            return bool(await self._redis.set(oidc_state_key(kept.state), "1", nx=True, ex=STATE_SECONDS))
        except REDIS_ERRORS:
            return has_room


def _redirect(request: web.Request, home: str) -> str:
    """Return the URL to which the provider sends the browser back; the provider knows which ones are allowed."""
    caller = CALLER.get()
    scheme = "https" if caller is not None and caller.is_https else "http"
    return f"{scheme}://{request.host}{home}/login/oidc/return"
