"""Mixtures of a tenant's adapters, from the client's names to the engine's form, the bill and the ledger."""

from testing.gateway.running import Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push
from wire.mixtures import Mixture, parse_terms


async def test_a_mixture_is_sent_by_digests_and_billed_under_its_name(gateway: Gateway, upstream: Upstream):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    digests = {}
    for seed, name in enumerate(("a", "b", "same")):
        pushed = await push(acme, name, files(min(seed, 1)))
        digests[name] = pushed.json["digest"]
    model = "b*-.30+a*0.7"
    first, second = sorted([(digests["a"], 0.7), (digests["b"], -0.3)])
    expected = f"{first[0]}*{first[1]}+{second[0]}*{second[1]}"
    for stream in (False, True):
        answer = await acme.chat(model=model, stream=stream)
        assert answer.status == 200, answer.body
    assert [body["model"] for _, body in upstream.requests] == [expected] * 2
    assert (await acme.complete(model="b*-0.1+a*0.7+same*-0.2")).json["model"] == "b*-0.1+a*0.7+same*-0.2"
    assert upstream.requests[-1][1]["model"].count("*") == 2, "two names of one content are one part"

    async def recorded() -> bool:
        rows = {row["model"]: row["requests"] for row in await acme.usage()}
        return rows == {"a*0.7+b*-0.3": 3}

    await until(recorded)
    for asked, tenant, status, named in (
        ("a*0.7+c*0.3", acme, 404, "'c'"),
        ("a*0.7", globex, 404, "'a'"),
        (f"{digests['a']}*0.7", acme, 404, "sha256:"),
        ("a*0.7+base*0.3", acme, 400, "'base'"),
        ("a*0.7+b*x", acme, 400, "'b*x'"),
        ("+".join(["a*0.1"] * 9), acme, 400, "at most 8"),
        ("+".join([f"a*0.{'1' * 28}"] * 8), acme, 400, "256 characters"),
    ):
        refused = await tenant.chat(model=asked)
        assert (refused.status, refused.error["param"]) == (status, "model"), asked
        assert named in refused.error["message"], refused.error
    # A receipt of other weights is not the mixture's; nor is that of one part alone.
    other = Mixture.of(parse_terms("a*0.7+b*0.3"), [digests[name].removeprefix("sha256:") for name in "ab"])
    upstream.receipt = f"sha256:{other.digest}"
    mismatch = await acme.chat(model=model)
    assert (mismatch.status, mismatch.error["code"]) == (500, "adapter_mismatch")


async def test_a_mixture_has_the_permissions_prices_and_limits_of_all_its_parts(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    for seed, name in enumerate("ab"):
        assert (await push(acme, name, files(seed))).status == 201
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["a"]})
    scoped = gateway.client(made.json["key"])
    assert (await scoped.chat(model="a*0.5")).status == 200
    refused = await scoped.chat(model="a*0.5+b*0.5")
    assert (refused.status, refused.error["code"]) == (403, "model_not_allowed")
    assert "'b'" in refused.error["message"]
    # The dear base price applies to `a`, whatever the price of `b`.
    for path, price in (("base", 600_000_000), ("acme/b", 1_000_000)):
        body = {"input": price, "output": price}
        assert (await gateway.admin.call("PUT", f"/admin/api/prices/{path}", json=body)).status == 200

    async def cost() -> int:
        return sum(row["cost_micros"] for row in (await acme.usage()))

    assert (await acme.chat(model="a")).status == 200
    await until(cost)
    alone = await cost()

    async def is_dear() -> bool:
        return abs(await cost() - 2 * alone) < 1e-9

    assert (await acme.chat(model="a*1+b*1e-9")).status == 200
    await until(is_dear)
    limits = {"model_limits": {"b": {"requests_per_minute": 1}, "*": {"requests_per_minute": 2}}}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=limits)).status == 200
    statuses = [(await acme.chat(model=model)).status for model in ("a*1+b*0.1", "a*1+b*0.2", "a*1", "a", "b")]
    assert statuses == [200, 429, 200, 429, 429]


async def test_a_saved_mixture_by_http(gateway: Gateway, upstream: Upstream):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    for seed, name in enumerate("ab"):
        assert (await push(acme, name, files(seed))).status == 201
    path, text = "/v1/mixtures/blend", "a*0.7+b:latest*0.3"
    saved = await acme.call("PUT", path, json={"model": text})
    assert (saved.status, saved.json["model"], saved.headers["ETag"]) == (201, text, saved.json["etag"])
    answer = await acme.chat(model="blend")
    assert (answer.status, answer.json["model"]) == (200, "blend")
    nested = await acme.chat(model="blend*0.5+a*0.5")
    assert (nested.status, "'blend' is a saved mixture" in nested.error["message"]) == (400, True)
    assert (await acme.chat(model=text)).headers["x-loraplex-adapter-digest"] == answer.headers[
        "x-loraplex-adapter-digest"
    ]

    async def recorded() -> bool:
        return {row["model"]: row["requests"] for row in await acme.usage()} == {"a*0.7+b*0.3": 2}

    await until(recorded)
    assert "blend" in [model["id"] for model in (await acme.get("/v1/models")).json["data"]]
    assert (await acme.get("/v1/models/blend")).json["id"] == "blend"
    # A key for the name alone uses the mixture, and neither its parts nor another mixture under its name.
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["blend"]})
    scoped = gateway.client(made.json["key"])
    assert [(await scoped.chat(model=model)).status for model in ("blend", "a", "a*1")] == [200, 403, 403]
    assert (await scoped.call("PUT", path, json={"model": "a*1"}, headers={"If-Match": "*"})).status == 403
    # A key for one part does not save another part under the name.
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["blend", "a"]})
    partly, replaces = gateway.client(made.json["key"]), {"headers": {"If-Match": "*"}}
    saves = [(await partly.call("PUT", path, json={"model": model}, **replaces)).status for model in (text, "a*1")]
    assert saves == [403, 200]
    assert (await acme.call("PUT", path, json={"model": text}, **replaces)).status == 200
    # Another tenant's mixture is like an absent one.
    for method, body in (("GET", None), ("DELETE", None)):
        foreign, absent = await globex.call(method, path, json=body), await globex.call(method, "/v1/mixtures/absent")
        assert (foreign.status, absent.status) == (404, 404)
        assert foreign.body.replace(b"blend", b"absent") == absent.body
    assert (await globex.chat(model="blend")).status == 404
    assert (await globex.get("/v1/mixtures")).json["data"] == []
    assert (await acme.call("PUT", path, json={"model": "a*1"})).status == 428
    assert (await acme.call("PUT", path, json={"model": "a*1"}, headers={"If-Match": '"x"'})).status == 412
    for name, body, param in (
        ("BLEND", {"model": text}, "name"),
        ("base", {"model": text}, "name"),
        ("x", {"model": "blend*1"}, "model"),
        ("x", {"model": "a" * 300}, "model"),
        ("x", {}, None),
    ):
        refused = await acme.call("PUT", f"/v1/mixtures/{name}", json=body)
        assert refused.status == 400, refused.body
        assert param in (None, refused.error["param"]), refused.body
    assert (await push(acme, "blend", files(0))).error["param"] == "name"
    assert (await acme.call("DELETE", "/v1/adapters/a")).error["code"] == "adapter_in_use"
    assert (await acme.call("DELETE", "/v1/adapters/a?force=true")).status == 200
    lost = await acme.chat(model="blend")
    assert (lost.status, "'a'" in lost.error["message"]) == (404, True)
    assert "blend" not in [model["id"] for model in (await acme.get("/v1/models")).json["data"]]
    assert (await acme.call("DELETE", path)).status == 200
    actions = [row["action"] for row in (await gateway.admin.get("/admin/api/audit?tenant=acme")).json["data"]]
    assert {"mixture.save", "mixture.delete"} <= set(actions)
