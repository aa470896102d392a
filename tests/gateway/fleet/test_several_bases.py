"""Several base models behind one or two gateways, with real engines of models of different shapes and tokenizers."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.probing.base_digest import base_digest
from gateway.settings import Settings
from testing.engine import RunningServer
from testing.gateway.greedy_load import ASK, Load, text_of, tokens_of
from testing.gateway.running import Answer, Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_adapter, save_byte_fallback_tokenizer, save_model
from tests.gateway.api.adapters.test_adapters import push

pytestmark = pytest.mark.usefixtures("takes_a_core", "starts_servers")

BASES = "/admin/api/bases"


class Bench(NamedTuple):
    """A gateway of the base model `alpha`, with engines of `alpha` and `beta` and a free address, and its store.

    gateways: all gateways, this one first.
    """

    gateway: Gateway
    gateways: list[Gateway]
    settings: Settings
    folder: Path
    start: Callable[..., Awaitable[RunningServer]]
    alpha: RunningServer
    beta: RunningServer
    free: int

    def model(self, name: str) -> Path:
        return self.folder / name

    async def add(self, name: str, **fields: Any) -> Answer:
        """Add a base model, by default with its folder and digest."""
        body = {"digest": base_digest(self.model(name)), "tokenizer": str(self.model(name))} | fields
        return await self.gateway.admin.post(BASES, {"name": name, **body})

    async def change(self, name: str, *, force: bool = False, **changes: Any) -> Answer:
        params = {"force": "true"} if force else {}
        return await self.gateway.admin.call("PATCH", f"{BASES}/{name}", json=changes, params=params)

    async def are_up(self, *names: str) -> None:
        """Wait until an engine of each of the base models, and of no other, is up at every gateway."""

        async def ready() -> bool:
            for gateway in self.gateways:
                rows = (await gateway.admin.get(BASES)).json["data"]
                if {row["name"] for row in rows if row["engines"] and row["name"]} != set(names):
                    return False
            return True

        await until(ready)

    async def upload(self, client: Client, name: str, of: str, seed: int, **fields: str) -> Answer:
        """Upload an adapter for a base model's shape."""
        folder = self.folder / f"{name}-{seed}"
        save_adapter(folder, seed=seed, **({"hidden": 48, "outputs": 64} if of == "beta" else {}))
        parts = {file.name: file.read_bytes() for file in folder.iterdir()}
        return await push(client, name, parts | {field: text.encode() for field, text in fields.items()})

    async def direct(self, server: RunningServer, model: str) -> Any:
        """Return an engine's own answer to ASK."""
        headers = {"x-loraplex-internal-token": TOKEN}
        url = f"{server.url}/v1/chat/completions"
        async with self.gateway.session.post(url, json=ASK | {"model": model}, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `alpha`, `beta` of another shape and tokenizer, and `gamma` of alpha's shape."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "alpha", 512)
    save_model(folder / "beta", 384, save_byte_fallback_tokenizer, hidden=48)
    save_model(folder / "gamma", 512, seed=7)
    return folder


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    with ExitStack() as engines:
        yield engines


@pytest.fixture
async def bench(tmp_path: Path, models: Path, engines: ExitStack, redis_url: str) -> AsyncIterator[Bench]:
    store, free = str(tmp_path / "store"), free_port()

    def open_engine(name: str, port: int, served: str) -> RunningServer:
        config = {"served_model_name": served}
        server = RunningServer(models / name, Path(store), config, port=port, internal_token=TOKEN)
        return engines.enter_context(closing(server))

    async def start(name: str, port: int = 0, served: str | None = None) -> RunningServer:
        return await asyncio.to_thread(open_engine, name, port, served or name)

    alpha, beta = await start("alpha"), await start("beta")
    urls = [alpha.url, beta.url, f"http://127.0.0.1:{free}"]
    own = {"adapter_store": store, "base_model": "alpha", "database_wait": 5.0}
    of = settings(tmp_path, models / "alpha", urls, redis_url, **own)
    async with running(of) as gateway:
        for name in ("alpha", "beta", "gamma"):
            (tmp_path / name).symlink_to(models / name)
        yield Bench(gateway, [gateway], of, tmp_path, start, alpha, beta, free)


@pytest.fixture
async def other(bench: Bench) -> AsyncIterator[Gateway]:
    """Start a second gateway of the same database, Redis and engines. Operators change bases at the first one."""
    async with running(bench.settings) as other:
        bench.gateways.append(other)
        yield other


async def check_both_bases(acme: Client, wanted: dict[str, Any]) -> None:
    """Check answers (wanted: the engines' own), prompt counts, the list of models, and mixtures of two bases."""
    for model, answer in wanted.items():
        got = await acme.chat(**ASK, model=model)
        assert (text_of(got.json), tokens_of(got.json)) == (text_of(answer), tokens_of(answer))
        # The gateway's own count, which reservations use.
        refused = await acme.chat(**ASK | {"max_tokens": 384}, model=model)
        if model in ("beta", "second"):
            assert f"({answer['usage']['prompt_tokens']} in the messages" in refused.error["message"]
        else:
            assert refused.status == 200
    assert wanted["alpha"]["usage"]["prompt_tokens"] != wanted["beta"]["usage"]["prompt_tokens"]

    listed = {model["id"]: model for model in (await acme.get("/v1/models")).json["data"]}
    parents = {"alpha": None, "beta": None, "first": "alpha", "second": "beta"}
    assert {name: model.get("parent") for name, model in listed.items()} == parents
    assert [listed[name]["max_model_len"] for name in ("first", "second")] == [512, 384]
    assert [listed[name].get("price", {}).get("input") for name in ("first", "second")] == [None, "3.00"]
    mixed = await acme.chat(**ASK, model="first*0.5+second*0.5")
    assert (mixed.status, mixed.error["param"]) == (400, "model")
    assert "'first' is of 'alpha' and 'second' is of 'beta'" in mixed.error["message"]


async def usage_names_the_bases(folder: Path) -> bool:
    """Return whether the usage rows of each model name its base alone."""
    with closing(sqlite3.connect(folder / "gateway.db")) as connection:
        rows = connection.execute("SELECT DISTINCT model, base FROM usage").fetchall()
    bases = {"alpha": "alpha", "beta": "beta", "gamma": "gamma", "first": "alpha", "second": "beta", "third": "gamma"}
    return sorted(rows) == sorted(bases.items())


async def check_a_draining_base(bench: Bench, clients: tuple[Client, ...]) -> None:
    """Drain `beta`: it is listed no more and takes no new adapters, at any gateway."""
    assert (await bench.change("beta", state="draining")).json["state"] == "draining"
    for seed, client in enumerate(clients, 5):
        assert "beta" not in {model["id"] for model in (await client.get("/v1/models")).json["data"]}
        closed = await bench.upload(client, "late", "beta", seed, base="beta")
        assert "the base model 'beta' is draining and takes no new adapters" in closed.error["message"]


async def check_a_retired_base(bench: Bench, clients: tuple[Client, ...]) -> None:
    """Retire `beta`: its names are gone at every gateway, and its running streams end as usual."""
    body = ASK | {"model": "second", "max_tokens": 200, "stream": True, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        streams = []
        for client in clients:
            asked = bench.gateway.session.post(f"{client.url}/v1/chat/completions", json=body, headers=client.headers)
            streams.append(await stack.enter_async_context(asked))
            await streams[-1].content.readline()
        assert (await bench.change("beta", state="retired", force=True)).status == 200
        for client, (model, code) in product(clients, (("beta", "model_not_found"), ("second", "base_retired"))):
            gone = await client.chat(**ASK, model=model)
            assert (gone.status, gone.error["code"]) == (404, code)
        for stream in streams:
            rest = (await stream.read()).decode()
            assert '"finish_reason":"length"' in rest, "a running stream ends as usual"
            assert rest.rstrip().endswith("data: [DONE]")


async def test_two_bases_then_a_third_then_one_less(bench: Bench, other: Gateway):
    """Two gateways serve all bases without a failed request while an operator changes them at one of the two."""
    gateway = bench.gateway
    [fault] = [fault for fault in await gateway.engine_faults() if fault.startswith(bench.beta.url)]
    assert all(part in fault for part in ("engine serves beta, not alpha", "loraplex base add"))
    assert (await bench.add("beta", price={"input": 3_000_000, "output": 5_000_000})).status == 201
    await bench.are_up("alpha", "beta")

    acme = await gateway.tenant("acme")
    first, second = await bench.upload(acme, "first", "alpha", 1), await bench.upload(acme, "second", "beta", 2)
    assert [(each.status, each.json["base"]) for each in (first, second)] == [(201, "alpha"), (201, "beta")]
    wanted = {
        "alpha": await bench.direct(bench.alpha, "alpha"),
        "beta": await bench.direct(bench.beta, "beta"),
        "first": await bench.direct(bench.alpha, first.json["digest"]),
        "second": await bench.direct(bench.beta, second.json["digest"]),
    }
    assert len({text_of(answer) for answer in wanted.values()}) == 4, "the models differ"
    await check_both_bases(acme, wanted)

    elsewhere = other.client(acme.key or "")
    load = Load(acme, elsewhere)
    for model, answer in wanted.items():
        load.start(model, text_of(answer))
    await load.rounds()
    gamma = await bench.start("gamma", bench.free)
    assert (await bench.add("gamma")).status == 201
    await bench.are_up("alpha", "beta", "gamma")
    load.start("gamma", text_of(await bench.direct(gamma, "gamma")))
    unclear = await bench.upload(acme, "third", "alpha", 3)
    assert (unclear.status, unclear.error["param"]) == (400, "base")
    assert "several base models: 'alpha', 'gamma'" in unclear.error["message"]
    third = await bench.upload(acme, "third", "alpha", 4, base="gamma")
    assert (third.status, third.json["base"]) == (201, "gamma")
    load.start("third", text_of(await bench.direct(gamma, third.json["digest"])))
    await load.rounds()

    await check_a_draining_base(bench, (acme, elsewhere))
    await load.rounds()
    kept = await bench.change("beta", state="retired")
    assert (kept.status, kept.error["code"]) == (409, "conflict")
    assert "1 versions of adapters belong to 'beta': acme/second@1" in kept.error["message"]

    await load.stop("beta", "second")
    await check_a_retired_base(bench, (acme, elsewhere))
    await load.rounds()
    await load.stop()
    assert load.wrong == []

    await until(partial(usage_names_the_bases, bench.folder))


async def test_an_engine_of_another_base_at_the_same_address(bench: Bench):
    """Requests for the old base are refused, never served by the new engine, even under the old base's name."""
    gateway, acme = bench.gateway, await bench.gateway.tenant("acme")
    gamma = await bench.start("gamma", bench.free)
    assert (await bench.add("gamma")).status == 201
    assert (await bench.change("alpha", digest=base_digest(bench.model("alpha")))).status == 200
    await bench.are_up("alpha", "gamma")
    adapter = await bench.upload(acme, "third", "alpha", 4, base="gamma")
    right = {
        "gamma": text_of(await bench.direct(gamma, "gamma")),
        "third": text_of(await bench.direct(gamma, adapter.json["digest"])),
    }
    # A gateway whose record is older than the engine at an address names the digest that it expects.
    headers = {"x-loraplex-internal-token": TOKEN, "x-loraplex-base": base_digest(bench.model("alpha"))}
    asked = gateway.session.post(f"{gamma.url}/v1/chat/completions", json=ASK | {"model": "gamma"}, headers=headers)
    async with asked as stale:
        assert (stale.status, (await stale.json())["error"]["code"]) == (503, "engine_unavailable")
    statuses: list[tuple[int, str | None]] = []

    async def ask(model: str) -> None:
        while True:
            answer = await acme.chat(**ASK, model=model)
            assert answer.status != 200 or text_of(answer.json) == right[model]
            statuses.append((answer.status, None if answer.status == 200 else answer.error["code"]))

    asking = [asyncio.create_task(ask(model)) for model in right for _ in range(2)]
    await until(lambda: _has(statuses, (200, None)))
    await asyncio.to_thread(gamma.close)
    other = await bench.start("alpha", bench.free, "gamma")
    statuses.clear()

    async def is_of_alpha() -> bool:
        rows = (await gateway.admin.get(BASES)).json["data"]
        return any(other.url in row["engines"] and row["name"] == "alpha" for row in rows)

    await until(is_of_alpha)
    await until(lambda: _has(statuses, (503, "no_engine")))
    for task in asking:
        task.cancel()
    failed = [
        each for each in await asyncio.gather(*asking, return_exceptions=True) if isinstance(each, AssertionError)
    ]
    assert failed == []
    assert {status for status, _ in statuses} == {503}
    # The other engine serves the base that its weights are, under whatever name it was started.
    await asyncio.to_thread(bench.alpha.close)
    wanted = text_of(await bench.direct(other, "gamma"))

    async def is_served() -> bool:
        answer = await acme.chat(**ASK, model="alpha")
        return answer.status == 200 and text_of(answer.json) == wanted and answer.json["model"] == "alpha"

    await until(is_served)


async def _has(statuses: list[Any], wanted: Any) -> bool:
    return wanted in statuses


async def test_a_key_of_one_base_sees_no_other(bench: Bench):
    gateway = bench.gateway
    assert (await bench.add("beta")).status == 201
    await bench.are_up("alpha", "beta")
    acme = await gateway.tenant("acme")
    await bench.upload(acme, "first", "alpha", 1)
    await bench.upload(acme, "second", "beta", 2)
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"allowed_models": ["alpha", "first", "new"]},
                                    params={"force": "true"})  # fmt: skip
    limited = gateway.client(made.json["key"])
    seen = (await limited.get("/v1/models")).body.decode()
    assert [name in seen for name in ("alpha", "first", "beta", "second")] == [True, True, False, False]
    for name in ("beta", "second"):
        for answer in (await limited.chat(**ASK, model=name), await limited.get(f"/v1/models/{name}")):
            assert (answer.status, answer.error["code"]) == (403, "model_not_allowed")
            unknown = await limited.chat(**ASK, model="unknown")
            assert answer.error["message"].replace(name, "unknown") == unknown.error["message"]
    assert (await limited.chat(**ASK, model="first")).status == 200
    for refused in (
        await bench.upload(limited, "new", "beta", 3),
        await bench.upload(limited, "new", "beta", 4, base="beta"),
    ):
        assert refused.status == 400
        assert "beta" not in refused.error["message"].replace("'beta'; expected one of", "")


async def test_engines_count_the_prompts_of_a_base_without_a_folder_here(bench: Bench):
    config = json.loads((bench.model("beta") / "config.json").read_text())
    refused = await bench.add("beta", tokenizer="/nowhere")
    assert (refused.status, refused.error["param"]) == (400, "config")
    assert (await bench.add("beta", tokenizer="/nowhere", config=config)).status == 201
    acme = await bench.gateway.tenant("acme")
    await bench.are_up("alpha", "beta")
    direct = tokens_of(await bench.direct(bench.beta, "beta"))
    assert tokens_of((await acme.chat(**ASK, model="beta")).json) == direct
    refused = await acme.chat(**ASK | {"max_tokens": 384}, model="beta")
    assert f"({direct[0]} in the messages" in refused.error["message"]
    for prompt in ("one two", [1, 2, 3], ["a", "b c"]):
        body = {"model": "beta", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        assert (await acme.post("/v1/completions", body)).status == 200
    refused = await acme.chat(
        **ASK | {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, model="beta"
    )
    assert (refused.status, "no tools here" in refused.error["message"]) == (400, True)
    await asyncio.to_thread(bench.beta.close)

    async def is_refused() -> bool:
        return (await acme.chat(**ASK, model="beta")).error["code"] == "no_engine"

    await until(is_refused)
    assert (await acme.chat(**ASK, model="alpha")).status == 200


async def test_replaced_weights_take_over_without_a_failed_request(bench: Bench, other: Gateway):
    """The former weights' engine serves the base until one of the new weights is up, and its bound adapters after."""
    acme = await bench.gateway.tenant("acme")
    assert (await bench.change("alpha", digest=base_digest(bench.model("alpha")))).status == 200
    await bench.are_up("alpha")
    first = await bench.upload(acme, "first", "alpha", 1)
    old, adapter = [text_of(await bench.direct(bench.alpha, each)) for each in ("alpha", first.json["digest"])]
    elsewhere = other.client(acme.key or "")
    load = Load(acme, elsewhere)
    load.start("alpha", old)
    load.start("first", adapter)
    await load.rounds()
    assert (await bench.change("alpha", digest=base_digest(bench.model("gamma")))).status == 200
    await load.rounds()
    await load.stop("alpha")
    gamma = await bench.start("gamma", bench.free, "alpha")
    new = text_of(await bench.direct(gamma, "alpha"))

    async def is_new() -> bool:
        answers = [await client.chat(**ASK, model="alpha") for client in (acme, elsewhere)]
        assert [answer.status for answer in answers] == [200, 200]
        return all(text_of(answer.json) == new for answer in answers)

    await until(is_new)
    load.start("alpha", new)
    await load.rounds()
    await load.stop()
    assert load.wrong == []
    later = await bench.upload(acme, "later", "alpha", 2)
    assert later.status == 201
    assert text_of((await acme.chat(**ASK, model="later")).json) == text_of(
        await bench.direct(gamma, later.json["digest"])
    )
    rows = (await bench.gateway.admin.get(BASES)).json["data"]
    rows = [row for row in rows if row["name"] == "alpha"]
    found = [(row["is_former"], [each["name"] for each in row["versions"]]) for row in rows]
    assert found == [(False, ["acme/later@1"]), (True, ["acme/first@1"])]
