"""OpenID Connect: the provider's documents and keys, the exchange of a code, and the verification of ID tokens."""

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import jwt
import msgspec

from gateway.access.roles import ADMIN_ROLES, TENANT_ROLES, Role
from gateway.errors import Forbidden, GatewayError, Unavailable
from wire.http_errors import HTTP_ERRORS

# Signatures that only the provider's private key can make. `none` and the symmetric HS... are refused.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KEY_TYPES = ("RSA", "EC", "OKP")
LEEWAY_SECONDS = 60
DOCUMENT_SECONDS = 3600.0
# Minimum time between two fetches of the keys because of an unknown key id.
KEYS_AGAIN_SECONDS = 30.0
TIMEOUT = aiohttp.ClientTimeout(total=10)
MAX_BYTES = 256 * 2**10
MAX_TOKEN_CHARS = 64 * 2**10
AWAY = "The log-in provider does not answer as expected; try again shortly."
REFUSED = "The log-in provider's answer was refused"


class LoginRefused(GatewayError):
    """The provider's answer does not prove an identity."""

    status, kind, code = 401, "invalid_request_error", "login_refused"


class Grant(msgspec.Struct, frozen=True):
    """Role of a group. tenant: its name, for a tenant's role."""

    group: str
    role: Role
    tenant: str | None


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a provider. claim: the ID token's claim that holds the person's groups."""

    issuer: str
    client_id: str
    client_secret: str | None
    claim: str
    grants: tuple[Grant, ...]

    @property
    def proof(self) -> str:
        """Return a digest of the settings on which sessions rely. Sessions end when it changes."""
        parts = (self.issuer, self.client_id, self.claim, *(repr(grant) for grant in self.grants))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def grant_of(self, claims: Mapping[str, Any], roles: Sequence[str]) -> Grant:
        """Return the highest of `roles` that the person's groups grant. Raises Forbidden."""
        given = claims.get(self.claim)
        listed = given if isinstance(given, list) else [given]  # a provider may send a single group, or anything else
        groups = {group for group in listed if isinstance(group, str)}
        for role in reversed(roles):
            for grant in self.grants:
                if grant.role == role and grant.group in groups:
                    return grant
        raise Forbidden("Your groups give you no role here. Ask the operator to map one of them.", code="role_needed")


def parse_grant(text: str) -> Grant:
    """Parse `group=role` or `group=role:tenant`. Raises ValueError."""
    group, _, given = text.rpartition("=")
    role, _, tenant = given.partition(":")
    if not group or (role in TENANT_ROLES) != bool(tenant) or role not in (*ADMIN_ROLES, *TENANT_ROLES):
        raise ValueError("expected pairs like ops=operator, finance=billing or acme-dev=tenant_member:acme")
    return Grant(group, role, tenant or None)


def challenge_of(verifier: str) -> str:
    """Return the PKCE challenge (S256) of a verifier."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")


class Oidc:
    """Client of one provider. Its documents are cached; an unknown key id makes it fetch the keys again."""

    def __init__(self, provider: Provider, session: aiohttp.ClientSession) -> None:
        self.provider = provider
        self._session = session
        self._documents: dict[str, tuple[float, dict[str, Any]]] = {}
        self._lock = asyncio.Lock()

    async def authorization_url(self, *, redirect: str, state: str, nonce: str, verifier: str) -> str:
        """Return the provider's URL that begins a log-in. Raises Unavailable."""
        endpoint = await self._endpoint("authorization_endpoint")
        query = {
            "response_type": "code",
            "client_id": self.provider.client_id,
            "redirect_uri": redirect,
            "scope": "openid profile email",
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge_of(verifier),
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def redeem(self, code: str, *, redirect: str, verifier: str) -> str:
        """Return the ID token for a code. Raises LoginRefused, Unavailable."""
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect, "code_verifier": verifier}
        headers = {}
        if self.provider.client_secret is None:
            form["client_id"] = self.provider.client_id
        else:
            # RFC 6749: both parts are form-encoded before they are joined.
            pair = f"{quote(self.provider.client_id, safe='')}:{quote(self.provider.client_secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        answer = await self._fetch("POST", await self._endpoint("token_endpoint"), data=form, headers=headers)
        token = answer.get("id_token")
        if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARS:
            raise LoginRefused(f"{REFUSED}: the code is not valid, or there is no ID token.")
        return token

    async def verify(self, token: str, nonce: str) -> dict[str, Any]:
        """Return the claims of an ID token. Raises LoginRefused with the reason, Unavailable."""
        client_id = self.provider.client_id
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            if algorithm not in ALGORITHMS:
                raise LoginRefused(f"{REFUSED}: its signature is of a kind that is not accepted.")
            key = await self._key(header.get("kid"), algorithm)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=client_id,
                issuer=[self.provider.issuer, f"{self.provider.issuer}/"],
                leeway=LEEWAY_SECONDS,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )
        except jwt.PyJWTError as error:
            raise LoginRefused(f"{REFUSED}: {_reason(error)}.") from error
        audience = claims["aud"]
        azp = claims.get("azp")
        if azp not in (None, client_id) or (azp is None and isinstance(audience, list) and len(audience) > 1):
            raise LoginRefused(f"{REFUSED}: it is for another client.")
        given = claims.get("nonce")
        if not isinstance(given, str) or not hmac.compare_digest(given.encode("utf-8", "replace"), nonce.encode()):
            raise LoginRefused(f"{REFUSED}: it belongs to another log-in.")
        if not isinstance(claims["sub"], str) or not claims["sub"]:
            raise LoginRefused(f"{REFUSED}: it names no person.")
        return claims

    async def _key(self, key_id: Any, algorithm: str) -> Any:
        """Return the provider's key. Raises LoginRefused, Unavailable, jwt.PyJWTError."""
        for most in (DOCUMENT_SECONDS, KEYS_AGAIN_SECONDS):
            keys = (await self._document(await self._endpoint("jwks_uri"), most)).get("keys")
            usable = [
                key
                for key in (keys if isinstance(keys, list) else [])
                if isinstance(key, dict) and key.get("kty") in KEY_TYPES and key.get("use", "sig") == "sig"
            ]
            found = [key for key in usable if key.get("kid") == key_id] if key_id is not None else usable
            if len(found) == 1 and found[0].get("alg", algorithm) == algorithm:
                return jwt.PyJWK(found[0], algorithm=algorithm).key
        raise LoginRefused(f"{REFUSED}: it is signed by an unknown key.")

    async def _endpoint(self, name: str) -> str:
        issuer = self.provider.issuer
        found = await self._document(f"{issuer}/.well-known/openid-configuration", DOCUMENT_SECONDS)
        url = found.get(name)
        # The configured issuer has no slash at its end; a provider's own name may have one.
        if found.get("issuer") not in (issuer, f"{issuer}/") or not isinstance(url, str) or not _is_safe(url, issuer):
            raise Unavailable(AWAY, code="login_provider_unavailable")
        return url

    async def _document(self, url: str, most_seconds: float) -> dict[str, Any]:
        async with self._lock:
            known = self._documents.get(url)
            if known is None or time.monotonic() - known[0] > most_seconds:
                known = self._documents[url] = (time.monotonic(), await self._fetch("GET", url))
            return known[1]

    async def _fetch(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        """Return a JSON object. Raises LoginRefused for a 4xx to a POST, Unavailable."""
        try:
            call = self._session.request(method, url, timeout=TIMEOUT, allow_redirects=False, **options)
            async with call as response:
                body = await response.content.read(MAX_BYTES)
                if method == "POST" and 400 <= response.status < 500:
                    raise LoginRefused(f"{REFUSED}: the code is not valid.")
                found = msgspec.json.decode(body) if response.status == 200 and response.content.at_eof() else None
        except (*HTTP_ERRORS, msgspec.MsgspecError, ValueError) as error:
            raise Unavailable(AWAY, code="login_provider_unavailable") from error
        if not isinstance(found, dict):
            raise Unavailable(AWAY, code="login_provider_unavailable")
        return found


def _is_safe(url: str, issuer: str) -> bool:
    """Return whether an endpoint uses HTTPS. HTTP is accepted if the issuer uses it too."""
    return urlsplit(url).scheme == "https" or urlsplit(issuer).scheme == "http" == urlsplit(url).scheme


def _reason(error: jwt.PyJWTError) -> str:
    if isinstance(error, jwt.ExpiredSignatureError):
        return "it has expired"
    if isinstance(error, jwt.ImmatureSignatureError):
        return "it is not valid yet"
    if isinstance(error, jwt.InvalidAudienceError):
        return "it is for another client"
    if isinstance(error, jwt.InvalidIssuerError):
        return "it is from another issuer"
    if isinstance(error, jwt.MissingRequiredClaimError):
        return "a claim is missing"
    return "its signature is wrong"
