"""Log-in by OpenID Connect, against a real provider, and forged answers of a false one."""

import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa

from gateway.access.oidc import LoginRefused, Oidc, Provider, challenge_of, parse_grant
from gateway.settings import SettingsError
from testing.gateway.running import Browser, Gateway, until

ROLES = "ops=operator,finance=billing,acme-dev=tenant_member:acme,acme-boss=tenant_admin:acme"
CLIENT = "loraplex"


@contextmanager
def provider(**people: Any) -> Iterator[str]:
    """Run the provider, whose people have these groups. Yields its URL."""
    import oidc_provider_mock

    users = [
        oidc_provider_mock.User(sub=name, claims={"groups": groups, "email": f"{name}@example.com"})
        for name, groups in people.items()
    ]
    with oidc_provider_mock.run_server_in_thread(user_claims=users) as server:
        yield f"http://localhost:{server.server_port}"


async def at_provider(browser: Browser, name: str, home: str = "/admin", then: str = "") -> str:
    """Log in as a person at the provider; return the path and query of the way back."""
    began = await browser.get(f"{home}/login/oidc", params={"next": then} if then else {})
    assert began.status == 303, began.body
    where = began.headers["Location"]
    asked = parse_qs(urlsplit(where).query)
    assert asked["code_challenge_method"] == ["S256"]
    async with aiohttp.ClientSession() as person:
        answer = await person.post(where, data={"sub": name}, allow_redirects=False)
        assert answer.status in (302, 303), await answer.text()
        back = urlsplit(answer.headers["Location"])
    return f"{back.path}?{back.query}"


# The provider's own libraries warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_people_log_in_with_the_role_of_their_groups(serve: Any):
    people = {"ann": ["ops", "finance"], "bob": "finance", "eve": ["strangers", 7], "num": 7, "dev": ["acme-dev"]}
    with provider(**people) as url:
        async with serve(oidc_issuer=url, oidc_client_id=CLIENT, oidc_client_secret="s", oidc_roles=ROLES) as gateway:
            await gateway.tenant("acme")
            for name, home, status, role in (
                ("ann", "/admin", 200, "operator"),
                ("bob", "/admin", 200, "billing"),
                ("eve", "/admin", 403, None),
                ("num", "/admin", 403, None),
                ("dev", "/admin", 403, None),
                ("dev", "/console", 200, "tenant_member"),
                ("ann", "/console", 403, None),
            ):
                async with Browser(gateway.url, home) as browser:
                    got = await browser.get(await at_provider(browser, name, home))
                    assert got.status == status, (name, got.body)
                    assert (browser.cookie() is not None) == (status == 200)
                    found = (await gateway.admin.get("/admin/api/sessions")).json["data"]
                    if role is not None:
                        expected = {"subject": f"oidc:{name}", "label": f"{name}@example.com", "role": role}
                        assert found[0] | expected == found[0]
            refused = (await gateway.admin.get("/admin/api/audit?action=login.failed")).json["data"]
            assert {entry["detail"]["reason"] for entry in refused} == {
                "Your groups give you no role here. Ask the operator to map one of them."
            }
            await check_replays(gateway)


# The provider's own libraries warn of each other.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_tenant_sees_no_person_behind_an_operators_request(serve: Any):
    """The subject may be an e-mail address. The operators' audit has it."""
    with provider(**{"ann@ops.example": ["ops"]}) as url:
        async with serve(oidc_issuer=url, oidc_client_id=CLIENT, oidc_client_secret="s", oidc_roles=ROLES) as gateway:
            acme = await gateway.tenant("acme")
            async with Browser(gateway.url, "/admin") as browser:
                assert (await browser.get(await at_provider(browser, "ann@ops.example"))).status == 200
                body = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
                chat, headers = "/admin/playground/acme/chat", {"x-csrf": await browser.csrf()}
                for limits, status in (({}, 200), ({"max_tokens": 10_000_000}, 400)):
                    asked = await browser.call("POST", chat, json=body | limits, headers=headers)
                    assert asked.status == status, asked.body

            async def are_on_record() -> bool:
                return len((await acme.get("/v1/requests")).json["data"]) == 2

            await until(are_on_record)
            paths = ("/v1/requests", "/v1/usage?group_by=key", "/v1/audit?action=playground")
            answers = [(await acme.get(path)).body.decode() for path in paths]
            assert [text.count("operator:oidc") for text in answers] == [2, 1, 0]
            assert not [text for text in answers if "ann" in text]
            audit = (await gateway.admin.get("/admin/api/audit?action=playground.request")).json["data"]
            assert {entry["actor"] for entry in audit} == {"oidc:ann@ops.example"}


async def check_replays(gateway: Gateway) -> None:
    async with Browser(gateway.url, "/admin") as browser, Browser(gateway.url, "/admin") as thief:
        back = await at_provider(browser, "ann", then="/admin/?period=7d")
        # Another browser, which did not begin the log-in, gets no session by its URL.
        assert (await thief.get(back)).status == 401
        kept = {c.key: c.value for c in browser.session.cookie_jar if c.key == "loraplex_oidc"}
        got = await browser.get(back)
        assert 'content="0;url=/admin/?period=7d"' in got.body.decode()
        assert (await browser.get("/admin/")).status == 200
        # The state is used, even with the cookie of the log-in.
        cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in kept.items())}
        assert kept
        replayed = await gateway.nobody.get(back, headers=cookie)
        assert replayed.status == 401
        assert "was used already" in replayed.body.decode()


class FalseProvider:
    """Provider with keys of its own that answers with any token."""

    def __init__(self) -> None:
        self.key, self.other = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
        self.key_id = "one"
        self.url = ""
        self.read = 0
        self.form: dict[str, str] = {}

    @property
    def jwks(self) -> dict[str, Any]:
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return {"keys": [public | {"kid": self.key_id, "use": "sig", "alg": "RS256"}]}

    async def _configuration(self, _: web.Request) -> web.Response:
        names = ("authorization_endpoint", "token_endpoint")
        urls = {name: f"{self.url}/{name}" for name in names}
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/jwks", **urls})

    async def _jwks(self, _: web.Request) -> web.Response:
        self.read += 1
        return web.json_response(self.jwks)

    async def _token(self, request: web.Request) -> web.Response:
        self.form = dict((await request.post()).items())
        is_right = self.form["code"] == "right"
        return web.json_response({"id_token": self.token()} if is_right else {}, status=200 if is_right else 400)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Oidc]:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._configuration)
        app.router.add_get("/jwks", self._jwks)
        app.router.add_post("/token_endpoint", self._token)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        named = Provider(
            issuer=self.url, client_id=CLIENT, client_secret=None, claim="groups", grants=(parse_grant("ops=operator"),)
        )
        try:
            async with aiohttp.ClientSession() as session:
                yield Oidc(named, session)
        finally:
            await runner.cleanup()

    def token(self, key: Any = None, algorithm: str = "RS256", kid: str | None = None, **claims: Any) -> str:
        now = int(time.time())
        every = {"iss": self.url, "sub": "ann", "aud": CLIENT, "exp": now + 300, "iat": now, "nonce": "n"} | claims
        given = {name: value for name, value in every.items() if value is not None}
        return jwt.encode(given, key or self.key, algorithm, headers={"kid": kid or self.key_id})


def unsigned(token: str, **header: str) -> str:
    head = base64.urlsafe_b64encode(json.dumps({"typ": "JWT"} | header).encode()).decode().rstrip("=")
    return f"{head}.{token.split('.')[1]}."


@pytest.mark.usefixtures("starts_servers")
async def test_forged_tokens_are_refused_with_the_reason():
    false = FalseProvider()
    async with false.serving() as oidc:
        assert (await oidc.verify(false.token(), "n"))["sub"] == "ann"
        assert (await oidc.verify(false.token(aud=[CLIENT, "x"], azp=CLIENT), "n"))["sub"] == "ann"
        now, good = int(time.time()), false.token()
        public = json.dumps(false.jwks["keys"][0])
        for token, reason in (
            (false.token(exp=now - 120), "has expired"),
            (false.token(iat=now + 600), "not valid yet"),
            (false.token(nbf=now + 600), "not valid yet"),
            (false.token(exp=None), "a claim is missing"),
            (false.token(sub=None), "a claim is missing"),
            (false.token(aud="another"), "another client"),
            (false.token(aud=[CLIENT, "another"]), "another client"),
            (false.token(azp="another"), "another client"),
            (false.token(iss="https://evil.example"), "another issuer"),
            (false.token(nonce="m"), "another log-in"),
            (false.token(nonce=None), "another log-in"),
            (false.token(false.other), "signature is wrong"),
            (false.token(kid="two"), "unknown key"),
            (unsigned(good, alg="none", kid="one"), "not accepted"),
            (unsigned(good, alg="None", kid="one"), "not accepted"),
            (false.token(public.encode() * 2, "HS256"), "not accepted"),
            (good[:-6] + "AAAAAA", "signature is wrong"),
            ("", "signature is wrong"),
            ("a.b.c", "signature is wrong"),
            ("é" * 20, "signature is wrong"),
        ):
            with pytest.raises(LoginRefused, match=reason):
                await oidc.verify(token, "n")


@pytest.mark.usefixtures("starts_servers")
async def test_new_keys_of_the_provider_are_read_and_not_for_every_token(monkeypatch: pytest.MonkeyPatch):
    false = FalseProvider()
    async with false.serving() as oidc:
        await oidc.verify(false.token(), "n")
        for _ in range(20):
            with pytest.raises(LoginRefused):
                await oidc.verify(false.token(kid="guess"), "n")
        assert false.read == 1
        monkeypatch.setattr("gateway.access.oidc.KEYS_AGAIN_SECONDS", 0.0)
        false.key, false.key_id = false.other, "two"
        assert (await oidc.verify(false.token(), "n"))["sub"] == "ann"


@pytest.mark.usefixtures("starts_servers")
async def test_a_code_is_redeemed_with_the_verifier_of_its_log_in():
    false = FalseProvider()
    async with false.serving() as oidc:
        await oidc.verify(await oidc.redeem("right", redirect="http://here/", verifier="v" * 43), "n")
        assert (false.form["code_verifier"], false.form["redirect_uri"]) == ("v" * 43, "http://here/")
        with pytest.raises(LoginRefused, match="not valid"):
            await oidc.redeem("wrong", redirect="http://here/", verifier="v" * 43)


def test_the_challenge_is_that_of_the_standard():
    """RFC 7636, appendix B."""
    assert challenge_of("dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk") == "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM"


@pytest.mark.parametrize(
    "wrong",
    [
        {"oidc_roles": "ops"},
        {"oidc_roles": "ops=root"},
        {"oidc_roles": "ops=operator:acme"},
        {"oidc_roles": "ops=tenant_admin"},
        {"oidc_issuer": "http://id.example.com"},
        {"oidc_issuer": "ftp://id.example.com"},
        {"oidc_client_id": None},
        {"oidc_roles": None},
    ],
)
async def test_wrong_settings(wrong: dict[str, Any], serve: Any):
    right = {"oidc_issuer": "https://id.example.com", "oidc_client_id": CLIENT, "oidc_roles": ROLES}
    with pytest.raises(SettingsError, match="OIDC"):
        async with serve(**right | wrong):
            pass


async def test_without_a_provider_there_is_no_such_page(gateway: Gateway):
    for path in ("/admin/login/oidc", "/console/login/oidc/return"):
        assert (await gateway.nobody.get(path)).status == 404


async def test_a_provider_that_is_away(serve: Any):
    async with (
        serve(oidc_issuer="http://127.0.0.1:9", oidc_client_id=CLIENT, oidc_roles=ROLES) as gateway,
        Browser(gateway.url, "/admin") as browser,
    ):
        got = await browser.get("/admin/login/oidc")
        assert got.status == 503
        assert "does not answer as expected" in got.body.decode()
