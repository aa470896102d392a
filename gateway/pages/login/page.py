"""`/admin/login` and `/console/login`: log-in with an API key, and log-out.

Each log-in makes a new token, so nobody who knew an earlier token can use the new session. The form has a cookie of its
own, so that no other site can log a browser in to a session of the site's choice.
"""

import hmac
import math
import secrets
import time
from datetime import timedelta
from urllib.parse import urlencode

from aiohttp import web

from gateway.access.auth import Authenticator
from gateway.access.login_audit import NOBODY, LoginAudit
from gateway.access.roles import ADMIN_PATH, CONSOLE_PATH
from gateway.access.sessions import COOKIE, VISITOR, Identity, Sessions, by_bootstrap_key, by_key
from gateway.access.signed_values import signed, verified
from gateway.access.throttle import WrongKeyThrottle
from gateway.api.page_guard import NO_STORE, continue_page, read_form, refuse_other_sites, safe_next
from gateway.caller import CALLER, client_network
from gateway.errors import Forbidden, GatewayError, InvalidKey, RecordNotFound, TooManyWrongKeys, Unavailable, WrongKey
from gateway.pages.frame.frame import Frame
from gateway.process.admin_port import is_admin_port
from gateway.process.background import run_to_end
from wire.bounded_dict import BoundedDict

LOGIN_COOKIE = "loraplex_login"
# Purpose of the signature of a refusal's message.
REFUSAL = "log-in-refusal"
# Rate of log-ins per key or person, and per tenant, which may have 100 keys: a burst, then one per interval (seconds).
# Each writes an audit entry.
LOGIN_BURST, LOGIN_SECONDS = 10, 6.0
TENANT_BURST, TENANT_SECONDS = 60, 1.0
MAX_SUBJECTS = 10_000
MAX_KEY_CHARS = 1000
# Maximum size of the log-in form, which anybody may send without a key.
MAX_LOGIN_BYTES = 16 * 2**10
TITLES = {ADMIN_PATH: "Operator log-in", CONSOLE_PATH: "Tenant log-in"}
LABELS = {ADMIN_PATH: "Admin key", CONSOLE_PATH: "API key"}
WRONG = "This key is not valid here. Check it and try again."


class TooManyLogins(Exception):
    """The person, or the tenant, has logged in too often. retry_after: seconds until the next log-in is allowed."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after


class LoginRate:
    """Token buckets of successful log-ins by subject and by tenant, since each one is a write to the database."""

    def __init__(self) -> None:
        # Subject -> time (monotonic) at which its bucket is full again.
        self._full = BoundedDict[str, float](MAX_SUBJECTS)

    def take(self, person: Identity) -> None:
        """Count a person's log-in. Raises TooManyLogins."""
        self._take(person.subject, LOGIN_BURST, LOGIN_SECONDS)
        if person.tenant is not None:
            self._take(f"tenant {person.tenant.id}", TENANT_BURST, TENANT_SECONDS)

    def _take(self, subject: str, burst: int, seconds: float) -> None:
        now = time.monotonic()
        full = max(now, self._full.get(subject, 0.0)) + seconds
        if full - now > burst * seconds:
            raise TooManyLogins(math.ceil(full - now - burst * seconds))
        self._full.put(subject, full)


class LoginPages:
    """Routes for log-in and log-out, of operators and of tenants.

    provider: name of the OpenID Connect provider. admin_port: the operators' own port, if there is one.
    """

    def __init__(
        self,
        *,
        frame: Frame,
        auth: Authenticator,
        sessions: Sessions,
        throttle: WrongKeyThrottle,
        audit: LoginAudit,
        lifetime: timedelta,
        provider: str | None = None,
        admin_port: int | None = None,
    ) -> None:
        self._auth = auth
        self._sessions = sessions
        self._throttle = throttle
        self._audit = audit
        self._max_age = int(lifetime.total_seconds())
        self._rate = LoginRate()
        self._frame = frame
        self._provider = provider
        self._admin_port = admin_port

    async def form(self, request: web.Request) -> web.Response:
        """Return the form, with the message of a refused log-in if the URL has one."""
        then = safe_next(request.query.get("next"), home_of_request(request))
        status, message = self._verified(request.query.get("refused", ""))
        return self._form(request, then, message, status)

    async def log_in(self, request: web.Request) -> web.StreamResponse:
        """Open a session for the key in the form, and go to the page that asked for it."""
        home = home_of_request(request)
        refuse_other_sites(request)
        form = await read_form(request, _owner(), MAX_LOGIN_BYTES)
        then = safe_next(form.get("next"), home)
        known = request.cookies.get(LOGIN_COOKIE, "")
        if not known or not hmac.compare_digest(
            known.encode("utf-8", "replace"), form.get("csrf", "").encode("utf-8", "replace")
        ):
            return self._refused(home, then, "The form had expired. Try again.", status=403)
        presented = form.get("key", "").strip()
        try:
            person = await self._recognise(request, home, presented)
            self.count(person)
        except (InvalidKey, Forbidden) as error:
            return await self._refuse(request, then, error, presented)
        except (TooManyWrongKeys, TooManyLogins) as error:
            return self.too_many(request, then, error.retry_after)
        return await self.admit(request, person, then)

    async def admit(
        self, request: web.Request, person: Identity, then: str, *, from_elsewhere: bool = False
    ) -> web.Response:
        """Open a session for a person whose identity is proved, and go to `then`. Ends the browser's earlier session.

        from_elsewhere: whether another site redirected here. The answer is then a page instead of a redirect, because
        after a redirect the browser would not send the cookie.
        """
        home = home_of_request(request)
        await self._end_old(request.cookies.get(COOKIE, ""))
        token = await self._sessions.open(person)
        response = web.Response(status=303, headers={"Location": then, **NO_STORE})
        if from_elsewhere:
            response = continue_page(then)
        self._set_cookie(response, COOKIE, token, home, self._max_age)
        response.del_cookie(LOGIN_COOKIE, path=f"{home}/login")
        return response

    async def log_out(self, request: web.Request) -> web.Response:
        """End the session."""
        visitor = request[VISITOR]
        await self._end(visitor.session_id, visitor.subject)
        response = web.Response(status=303, headers={"Location": f"{visitor.home}/login", **NO_STORE})
        response.del_cookie(COOKIE, path=visitor.home)
        return response

    async def _end_old(self, token: str) -> None:
        try:
            old = await self._sessions.find(token)
            if old is not None:
                await self._end(old.session_id, old.subject)
        except Unavailable:
            # The session ends by itself later; the browser has overwritten its token.
            return

    async def _end(self, session_id: str, actor: str) -> None:
        try:
            await self._sessions.close(session_id, actor, action="session.close")
        except RecordNotFound:
            # Another request has just ended it.
            return

    async def _recognise(self, request: web.Request, home: str, presented: str) -> Identity:
        """Return the owner of a key. Raises TooManyWrongKeys, WrongKey, InvalidKey or Forbidden."""
        if not presented or len(presented) > MAX_KEY_CHARS:
            raise InvalidKey("The field is empty or too long.")
        self._throttle.refuse_guess(request, presented)
        proof = self._auth.bootstrap_proof
        if home == ADMIN_PATH and proof is not None and self._auth.is_bootstrap(presented):
            return by_bootstrap_key(proof)
        key = await self._auth.recognise(presented)
        if (key.tenant is None) != (home == ADMIN_PATH):
            raise WrongKey
        return by_key(key)

    async def _refuse(self, request: web.Request, then: str, error: GatewayError, presented: str) -> web.Response:
        home, caller = home_of_request(request), CALLER.get()
        is_wrong = isinstance(error, WrongKey)
        actor = (caller.key_id if caller is not None else None) or NOBODY
        reason, guess = ("wrong key", presented) if is_wrong else (error.message, None)
        await run_to_end(self._failed(request, reason, guess, actor))
        return self._refused(home, then, WRONG if is_wrong else error.message, status=401)

    async def _failed(self, request: web.Request, reason: str, guess: str | None = "", actor: str = NOBODY) -> None:
        """Record a failed log-in, and count a guess.

        guess: the wrong secret; empty for a wrong answer of the provider; None for a failure without a guess.
        """
        if guess is not None:
            await self._throttle.count_form(request, guess)
        await self._audit.failed(home_of_request(request), reason, actor)

    def count(self, person: Identity) -> None:
        """Count a log-in of a person whose identity is proved. Raises TooManyLogins."""
        self._rate.take(person)

    def refuse_guesses(self, request: web.Request) -> None:
        """Raise TooManyWrongKeys after too many wrong keys from the request's address."""
        self._throttle.refuse_guess(request, "")

    def too_many(self, request: web.Request, then: str, retry_after: int) -> web.Response:
        """Return the form with the time after which the next attempt is allowed."""
        response = self._form(request, then, _wait_text(retry_after), status=429)
        response.headers["Retry-After"] = str(retry_after)
        return response

    async def refuse_oidc(self, request: web.Request, then: str, error: GatewayError) -> web.Response:
        """Return the form with the reason why the provider's answer opens no session."""
        if not isinstance(error, Unavailable):
            await run_to_end(self._failed(request, error.message))
        return self.refuse_stale(request, then, error)

    def refuse_stale(self, request: web.Request, then: str, error: GatewayError) -> web.Response:
        """Return the form with a reason that says nothing about the person, and does not count as a failed log-in."""
        return self._form(request, then, error.message, status=error.status)

    def _refused(self, home: str, then: str, message: str, status: int) -> web.Response:
        """Redirect to the form, so that Reload sends no key again. The URL has the message, signed against forgery."""
        query = urlencode({"refused": signed(self._auth.keyed_hash, REFUSAL, (status, message)), "next": then})
        return web.Response(status=303, headers={"Location": f"{home}/login?{query}", **NO_STORE})

    def _verified(self, refused: str) -> tuple[int, str | None]:
        """Return the status and the message of a refusal; (200, None) for one that this gateway did not sign."""
        return verified(self._auth.keyed_hash, REFUSAL, refused, tuple[int, str]) or (200, None)

    def _form(self, request: web.Request, then: str, message: str | None = None, status: int = 200) -> web.Response:
        home, csrf = home_of_request(request), request.cookies.get(LOGIN_COOKIE, "")
        if len(csrf) != 64 or not csrf.isalnum():
            csrf = secrets.token_hex(32)
        response = self._frame.render(
            request,
            "login.html",
            title=TITLES[home],
            status=status,
            label=LABELS[home],
            home=home,
            then=then,
            form_csrf=csrf,
            message=message,
            provider=self._provider,
            # The public port of a gateway with an admin port does not serve the operators' pages.
            operators=f"{ADMIN_PATH}/" if home == CONSOLE_PATH and self._serves_operators(request) else None,
        )
        self._set_cookie(response, LOGIN_COOKIE, csrf, f"{home}/login", None)
        return response

    def _serves_operators(self, request: web.Request) -> bool:
        return self._admin_port is None or is_admin_port(request, self._admin_port)

    def _set_cookie(self, response: web.Response, name: str, value: str, path: str, max_age: int | None) -> None:
        caller = CALLER.get()
        response.set_cookie(
            name,
            value,
            path=path,
            max_age=max_age,
            httponly=True,
            samesite="Strict",
            secure=caller is not None and caller.is_https,
        )


def home_of_request(request: web.Request) -> str:
    """Return the path of the pages that a log-in or log-out is for."""
    resource = request.match_info.route.resource
    assert resource is not None  # only routes of the table get here
    return ADMIN_PATH if resource.canonical.startswith(ADMIN_PATH) else CONSOLE_PATH


def _wait_text(seconds: int) -> str:
    return f"Too many log-ins from your address, with this key or by this person. Try again in {seconds} s."


def _owner() -> str:
    """Return the owner of a log-in form's memory: the client's network, so that slow forms delay no others."""
    caller = CALLER.get()
    return f"address {client_network(caller.address) if caller is not None else ''}"
