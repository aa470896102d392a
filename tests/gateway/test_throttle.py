"""Wrong keys from one address: refused sooner, while right ones are served."""

import pytest

from gateway.admission.throttle import BURST, MAX_ADDRESSES, FailedLogins, who
from gateway.errors import TooManyFailures
from gateway.metrics import Metrics
from gateway.settings import SettingsError
from tests.gateway.running import Gateway, settings
from tests.gateway.test_gateway import basic

WRONG = "lpx_0123456789abcdef_" + "0" * 48


async def test_many_wrong_keys_are_told_to_wait_and_right_ones_served(gateway: Gateway):
    acme, wrong = await gateway.tenant("acme"), gateway.client(WRONG)
    # A bucket that fills again: on a slow machine a few more pass.
    refused = 0
    while (got := await wrong.get("/v1/models")).status == 401 and refused < 1000:
        assert got.error["code"] == "invalid_api_key"
        refused += 1
    assert refused >= BURST
    assert got.status == 429
    assert got.error["code"] == "too_many_wrong_keys"
    assert 1 <= int(got.headers["Retry-After"]) <= 6
    # Not the right ones, nor who sends none.
    assert (await acme.get("/v1/models")).status == 200
    assert (await gateway.admin.get("/admin/api/tenants")).status == 200
    assert (await gateway.nobody.get("/v1/models")).status == 401
    assert (await gateway.nobody.get("/admin/", headers=basic("wrong"))).status == 429
    assert (await gateway.nobody.get("/admin/")).status == 401
    shown = (await gateway.admin.get("/metrics")).body.decode()
    assert f"loraplex_gateway_wrong_keys_total {refused + 2}.0" in shown


def test_proxies_that_are_no_networks_are_a_wrong_setting(tmp_path, model_dir):
    with pytest.raises(SettingsError, match=r"LORAPLEX_TRUSTED_PROXIES: expected networks"):
        settings(tmp_path, model_dir, ["http://e"], "redis://r", trusted_proxies="10.0.0.1/8")


def test_each_address_has_its_own_count_in_bounded_memory():
    logins = FailedLogins(Metrics())
    for number in range(MAX_ADDRESSES + 5):
        logins.count(str(number))
    assert len(logins._paid_off) == MAX_ADDRESSES
    refused = 0
    while refused == 0:
        try:
            logins.count("192.0.2.7")
        except TooManyFailures:
            refused += 1
    logins.count("192.0.2.8")


def test_an_ipv6_customers_whole_network_is_one():
    assert who("192.0.2.7") == "192.0.2.7"
    assert who("local") == "local"
    assert who("2001:db8:0:1:aaaa::1") == who("2001:db8:0:1::2") == "2001:db8:0:1::/64"
