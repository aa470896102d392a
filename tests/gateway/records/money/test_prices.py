"""The cost of tokens: prices by model, in whole micro-units, reserved before and billed after."""

from datetime import UTC, datetime, timedelta
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from gateway.records.adapters.catalog import Model
from gateway.records.money.prices import FREE, Price, PriceList, Prices
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import only
from testing.gateway.running import BASE_MODEL, HI_TOKENS, Gateway, until
from wire.money import format_money

amounts = st.integers(0, 10**9)
tokens = st.integers(0, 10**6)


@given(st.builds(Price, input=amounts, cached=amounts, output=amounts), tokens, tokens, st.floats(0, 1))
def test_a_cost_is_rounded_up_once_and_never_over_what_was_reserved(
    price: Price, prompt: int, completion: int, part: float
):
    cached = int(prompt * part)
    exact = Fraction((prompt - cached) * price.input + cached * price.cached + completion * price.output, 10**6)
    cost = price.cost(prompt, completion, cached)
    assert 0 <= cost - exact < 1
    assert cost <= price.highest_cost(prompt, completion)


def test_money_is_said_as_the_currency_is_written():
    amounts = {
        0: "0.00",
        1: "0.000001",
        38: "0.000038",
        500_000: "0.50",
        12_500_000: "12.50",
        10**15: "1,000,000,000.00",
    }
    assert {amount: format_money(amount) for amount in amounts} == amounts


def adapter(name: str) -> Model:
    return Model(name=name, digest="a" * 64, names=(name,))


async def test_the_nearest_price_holds(database: Database):
    prices = Prices(database)
    known = PriceList(prices, only())
    everything, base, own = Price(output=1), Price(output=2), Price(output=3)
    await known.refresh()
    pirate, json, base_model = adapter("pirate"), adapter("json"), Model(name="base", digest=None)
    assert known.price("acme", pirate) == FREE
    for model, price in (("*", everything), ("base", base), ("acme/pirate", own)):
        await prices.put(model, price, "test")
        await prices.put(model, price, "test")
    await known.refresh()
    assert [known.price("acme", model) for model in (pirate, json, base_model)] == [own, base, base]
    assert known.price("other", pirate) == base
    await prices.delete("base", "test")
    await known.refresh()
    assert [known.price("acme", model) for model in (pirate, json, base_model)] == [own, everything, everything]


async def test_a_tenants_prices_end_with_it(database: Database):
    """Another tenant may get the name. The base model's price stays, even if the model's name looks like a tenant's."""
    prices, tenants = Prices(database), Tenants(database)
    await tenants.create("a_b", {}, actor="test")
    kept = ["*", "A_B/pirate", "a_b", "a_b/base", "a_bc/pirate", "axb/pirate"]
    for model in [*kept, "a_b/pirate", "a_b/json"]:
        await prices.put(model, FREE, "test")
    await tenants.delete("a_b", "test", base_models=["a_b/base"])
    assert {each.model for each in await prices.list()} == set(kept)


async def test_prices_are_an_operators_to_set(gateway: Gateway):
    acme = await gateway.tenant("acme")
    path = "/admin/api/prices/acme/pirate?force=true"
    assert (await acme.call("PUT", path, json={"input": 1, "output": 2})).status == 403
    put = await gateway.admin.call("PUT", path, json={"input": 500_000, "output": 1_500_000})
    assert put.status == 200
    listed = (await gateway.admin.get("/admin/api/prices")).json["data"]
    assert listed == [put.json]
    expected = {"object": "price", "model": "acme/pirate", "input": 500_000, "cached": 500_000, "output": 1_500_000}
    assert expected.items() <= put.json.items()
    for body, param in (({"input": -1, "output": 1}, "input"), ({"input": 1, "output": 10**9 + 1}, "output")):
        got = await gateway.admin.call("PUT", path, json=body)
        assert (got.status, got.error["param"]) == (400, param)
    assert (await gateway.admin.call("PUT", "/admin/api/prices/%20x", json={"input": 1, "output": 1})).status == 400
    path = path.removesuffix("?force=true")
    assert (await gateway.admin.call("DELETE", path)).status == 200
    assert (await gateway.admin.call("DELETE", path)).status == 404


async def test_a_price_may_come_before_its_tenant_where_that_is_forced(gateway: Gateway):
    path, price = "/admin/api/prices/nobody/pirate", {"input": 1, "output": 2}
    refused = await gateway.admin.call("PUT", path, json=price)
    assert (refused.status, refused.error["code"]) == (400, "unknown_model")
    assert (await gateway.admin.call("PUT", f"{path}?force=true", json=price)).status == 200


async def test_a_request_costs_what_it_used_and_a_budget_ends_it(gateway: Gateway):
    priced = {"input": 1_000_000, "cached": 0, "output": 2_000_000}
    assert (await gateway.admin.call("PUT", f"/admin/api/prices/{BASE_MODEL}", json=priced)).status == 200
    # The price of a request of HI_TOKENS and 10 answer tokens. The budget adds a micro-unit.
    whole = HI_TOKENS + 2 * 10
    acme = await gateway.tenant("acme", budget_per_month=whole + 1)
    assert (await acme.chat(max_tokens=11)).error["code"] == "request_exceeds_limit"
    answer = await acme.chat(max_tokens=10)
    assert answer.status == 200
    usage = answer.json["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    cost = usage["prompt_tokens"] - cached + 2 * usage["completion_tokens"]

    async def recorded() -> bool:
        return [row["cost_micros"] for row in await acme.usage()] == [cost]

    await until(recorded)
    left = whole + 1 - cost
    refused = await acme.chat(max_tokens=left // 2 + 1)
    assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "insufficient_quota", "budget")
    assert f"{format_money(left)} USD is left." in refused.error["message"]
    # The message has money and a readable date; the header has the seconds.
    month = (datetime.now(UTC).replace(day=1) + timedelta(days=32)).replace(day=1)
    assert f"Try again on 1 {month:%B %Y} 00:00 UTC." in refused.error["message"]
    assert int(refused.headers["Retry-After"]) > 0


async def test_an_answer_is_shortened_through_to_the_engine(gateway: Gateway):
    acme = await gateway.tenant("acme", max_concurrent_tokens=HI_TOKENS + 3, on_token_limit="shorten")
    got = await acme.chat(max_tokens=20, x_engine={"tokens": 20})
    assert (got.status, got.headers["x-loraplex-max-tokens"]) == (200, "3")
    assert got.json["usage"]["completion_tokens"] == 3
