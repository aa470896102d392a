"""Wrong keys from one address: refused unchecked after a few, while issued keys are served."""

import secrets
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.access import throttle
from gateway.access.throttle import BURST, MAX_ADDRESSES, SECONDS_EACH, WrongKeyThrottle
from gateway.caller import client_network
from gateway.metrics import Metrics
from gateway.settings import SettingsError
from testing.gateway.clocks import Clock
from testing.gateway.running import ADMIN_KEY, Client, Gateway, running, settings
from testing.gateway.upstream import TOKEN, Upstream
from testing.ports import free_port

WRONG = "lpx_0123456789abcdef_" + "0" * 48


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which debts are paid off. It stands still, so that a stall pays off none."""
    clock = Clock()
    clock.put(monkeypatch, throttle)
    return clock


async def throttled(gateway: Gateway) -> int:
    """Send wrong keys until they are refused unchecked; return how many were checked."""
    wrong, looked_at = gateway.client(WRONG), 0
    while (got := await wrong.get("/v1/models")).status == 401 and looked_at < 1000:
        assert got.error["code"] == "invalid_api_key"
        looked_at += 1
    assert got.status == 429
    assert got.error["code"] == "too_many_wrong_keys"
    assert 1 <= int(got.headers["Retry-After"]) <= 6
    return looked_at


async def operator(gateway: Gateway) -> Client:
    made = await gateway.admin.post("/admin/api/keys", {"label": "operator"})
    assert made.status == 201, made.body
    return gateway.client(made.json["key"])


async def test_no_guess_of_a_throttled_address_is_looked_at_and_issued_keys_are_served(gateway: Gateway):
    acme, admin = await gateway.tenant("acme"), await operator(gateway)
    looked_at = await throttled(gateway)
    assert looked_at >= BURST
    # A correct chosen secret gets the same answer as a wrong one, so the answer reveals nothing.
    right = await gateway.admin.get("/admin/api/tenants")
    wrong = await gateway.client(ADMIN_KEY + "x").get("/admin/api/tenants")
    assert (right.status, right.error["code"]) == (wrong.status, wrong.error["code"]) == (429, "too_many_wrong_keys")
    async with gateway.browser(None) as browser:
        for key in (ADMIN_KEY, "wrong"):
            assert (await browser.log_in(key)).status == 429
    for token in (TOKEN, "wrong"):
        headers = {"x-loraplex-internal-token": token}
        assert (await gateway.nobody.post("/internal/engines", {"url": "http://e"}, headers=headers)).status == 429
    # An issued key is no guess, even beside guesses from its address; nor is a missing key.
    assert (await acme.get("/v1/models")).status == 200
    assert (await admin.get("/admin/api/tenants")).status == 200
    async with gateway.browser(admin.key) as browser:
        assert (await browser.get("/admin/")).status == 200
    assert (await gateway.nobody.get("/v1/models")).status == 401
    shown = (await admin.get("/metrics")).body.decode()
    assert f"loraplex_gateway_wrong_keys_total {float(looked_at)}" in shown
    assert "loraplex_gateway_refused_keys_total 7.0" in shown


async def test_refused_guesses_do_not_make_the_wait_longer(gateway: Gateway, clock: Clock):
    await throttled(gateway)
    for _ in range(50):
        assert (await gateway.admin.get("/admin/api/tenants")).status == 429
    clock.now += SECONDS_EACH
    assert (await gateway.admin.get("/admin/api/tenants")).status == 200


async def test_issued_keys_that_are_wrong_do_not_make_the_wait_of_guesses_longer(gateway: Gateway, clock: Clock):
    """Compared in spite of the wait, each added its time: 100 a minute refused an address's log-ins for hours."""
    acme, gone = await gateway.tenant("acme"), await gateway.tenant("gone")
    assert (await gateway.admin.call("DELETE", "/admin/api/tenants/gone")).status == 200
    await throttled(gateway)
    async with gateway.browser(None) as browser:
        for _ in range(5):
            assert (await browser.log_in(acme.key)).status == 401
            assert (await gone.get("/v1/models")).status == 401
    clock.now += SECONDS_EACH
    assert (await gateway.admin.get("/admin/api/tenants")).status == 200


async def test_wrong_tokens_of_engines_count_as_well(gateway: Gateway):
    for number in range(BURST + 20):
        headers = {"x-loraplex-internal-token": f"guess-{number}"}
        got = await gateway.nobody.post("/internal/engines", {"url": "http://e"}, headers=headers)
        if got.status == 429:
            break
        assert got.status == 401
    assert got.status == 429
    # A missing token is no guess.
    assert (await gateway.nobody.post("/internal/engines", {"url": "http://e"})).status == 401


async def test_a_strong_secret_is_served_from_a_throttled_address_and_guesses_are_still_refused(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream
):
    """A tenant's guesses do not lock out the operator or the engines at the same address."""
    admin_key, token = secrets.token_hex(24), secrets.token_hex(24)
    of = settings(tmp_path, model_dir, ["announced"], redis_url, admin_key=admin_key, announce_token=token)
    async with running(of) as gateway:
        await throttled(gateway)
        admin = gateway.client(admin_key)
        assert (await admin.get("/admin/api/tenants")).status == 200
        async with gateway.browser(admin_key) as browser:
            assert (await browser.get("/admin/")).status == 200
        for guess in (admin_key[:-1], admin_key + "0", admin_key.upper() + "A"):
            assert (await gateway.client(guess).get("/admin/api/tenants")).status == 429
        announced = {"x-loraplex-announce-token": token}
        assert (await gateway.nobody.post("/internal/engines", {"url": upstream.url}, headers=announced)).status == 204
        for wrong in ({"x-loraplex-announce-token": token[:-1]}, announced | {"Authorization": "Bearer guess"}):
            assert (await gateway.nobody.post("/internal/engines", {"url": "http://e"}, headers=wrong)).status == 429
        # A guess is throttled even if the request also carries a right secret.
        beside = {"x-loraplex-internal-token": "guess"}
        assert (await admin.get("/admin/api/tenants", headers=beside)).status == 429


async def test_the_admin_port_has_a_count_of_its_own_and_the_public_port_compares_no_weak_admin_key(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream
):
    port = free_port()
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, admin_port=port)
    async with running(of) as public:
        admins = Gateway(f"http://127.0.0.1:{port}", public.session)
        # The public port does not reveal whether a guess is the admin key, so only the admin port can answer guesses.
        answers = [await public.client(key).get("/v1/models") for key in (ADMIN_KEY, ADMIN_KEY + "x")]
        assert [(answer.status, answer.error) for answer in answers] == [(401, answers[0].error)] * 2
        await throttled(public)
        assert (await admins.admin.get("/admin/api/tenants")).status == 200
        guesses = [await admins.client(f"guess-{i}").get("/admin/api/tenants") for i in range(BURST + 20)]
        assert guesses[-1].status == 429
        assert (await admins.admin.get("/admin/api/tenants")).status == 429


async def test_clients_behind_a_trusted_proxy_are_told_apart(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, trusted_proxies="127.0.0.1/32")
    async with running(of) as gateway:
        attacker, neighbour = ({"X-Forwarded-For": f"198.51.100.{host}"} for host in (77, 78))
        wrong = gateway.client(WRONG)
        for _ in range(BURST + 20):
            status = (await wrong.get("/v1/models", headers=attacker)).status
        assert status == 429
        assert (await gateway.admin.get("/admin/api/tenants", headers=attacker)).status == 429
        assert (await gateway.admin.get("/admin/api/tenants", headers=neighbour)).status == 200


async def test_processes_share_the_count_through_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    # Longer than any delay of a slow machine.
    monkeypatch.setattr("gateway.access.throttle.SHARE_SECONDS", 10.0)
    async with Redis.from_url(redis_url) as redis:
        one, two, other = (WrongKeyThrottle(Metrics(), lambda _: False, redis, name) for name in ("a", "a", "b"))
        for _ in range(BURST):
            await one.count("192.0.2.177")
        assert one._wait("192.0.2.177") > 0
        # The other process has checked no key yet: it learns of the count with its first.
        assert two._wait("192.0.2.177") < 0
        await two.count("192.0.2.177")
        assert two._wait("192.0.2.177") > 0
        assert two._wait("192.0.2.178") < 0
        await other.count("192.0.2.177")
        assert other._wait("192.0.2.177") < 0
        # Debts that are paid off are dropped there too.
        keys = [key async for key in redis.scan_iter("loraplex:wrong-keys:*:192.0.2.177")]
        [key] = [key for key in keys if await redis.pttl(key) > 9000]
        assert await redis.pttl(key) <= (BURST + 1) * SECONDS_EACH * 1000


@pytest.mark.usefixtures("starts_servers")
async def test_without_redis_each_process_counts_by_itself():
    async with Redis.from_url(f"redis://127.0.0.1:{free_port()}") as redis:
        wrong_keys = WrongKeyThrottle(Metrics(), lambda _: False, redis)
        for _ in range(BURST):
            await wrong_keys.count("203.0.113.9")
        assert wrong_keys._wait("203.0.113.9") > 0


def test_proxies_that_are_no_networks_are_a_wrong_setting(tmp_path, model_dir):
    with pytest.raises(SettingsError, match=r"LORAPLEX_TRUSTED_PROXIES: expected networks"):
        settings(tmp_path, model_dir, ["http://e"], "redis://r", trusted_proxies="10.0.0.1/8")


async def test_each_address_has_its_own_count_in_bounded_memory():
    wrong_keys = WrongKeyThrottle(Metrics(), lambda _: False)
    for number in range(MAX_ADDRESSES + 5):
        await wrong_keys.count(str(number))
    assert len(wrong_keys._paid_off) == MAX_ADDRESSES
    for _ in range(BURST):
        await wrong_keys.count("192.0.2.7")
    assert wrong_keys._wait("192.0.2.7") > 0
    assert wrong_keys._wait("192.0.2.8") < 0


def test_an_ipv6_customers_whole_network_is_one():
    assert client_network("192.0.2.7") == "192.0.2.7"
    assert client_network("local") == "local"
    assert client_network("2001:db8:0:1:aaaa::1") == client_network("2001:db8:0:1::2") == "2001:db8:0:1::/64"
