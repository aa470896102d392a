"""The charge for each ending, and the cost of log-probabilities."""

import io
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.billing.charges import CUT, Ending, TokenRateWeights, Used, charge, check_answer_size, weights_of
from gateway.errors import BadRequest
from gateway.records.money.prices import Price
from testing.gateway.running import CONTEXT, HI, Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from wire.errors import BadRequest as ProtocolError
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.responses import FinishedRequest

HEARD, TOLD = Used(10, 4, 2), Used(10, 7, 2)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"model": "m", "prompt": "x", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"model": "m", "messages": HI, **fields}, ChatCompletionRequest)


@pytest.mark.parametrize(
    ("ending", "reported", "requests", "tokens", "billed"),
    [
        (Ending.FINISHED, None, 1, 14, HEARD),
        (Ending.CANCELLED, None, 1, 14, HEARD),
        (Ending.CANCELLED, TOLD, 1, 17, TOLD),
        (Ending.REVOKED, TOLD, 1, 17, TOLD),
        (Ending.BROKEN, TOLD, 1, 17, TOLD),
        (Ending.NOT_BEGUN, None, 1, 0, Used()),
        (Ending.NOT_BEGUN, TOLD, 1, 17, TOLD),
        (Ending.REFUSED, None, 1, 9, Used()),
        (Ending.REFUSED, TOLD, 1, 17, TOLD),
        (Ending.REFUSED, Used(), 1, 9, Used()),
        (Ending.OVERLOADED, None, 1, 0, Used()),
        (Ending.OVERLOADED, TOLD, 1, 17, TOLD),
        (Ending.UNABLE, None, 0, 0, Used()),
        (Ending.UNABLE, TOLD, 1, 17, TOLD),
        (Ending.NO_ENGINE, None, 0, 0, Used()),
        (Ending.NO_ENGINE, TOLD, 1, 17, TOLD),
        (Ending.NO_ENGINE, Used(), 1, 0, Used()),
        (Ending.MISMATCHED, None, 0, 0, Used()),
    ],
)
def test_who_pays(ending: Ending, reported: Used | None, requests: int, tokens: int, billed: Used):
    charged = charge(ending, 9, HEARD, reported, TokenRateWeights())
    assert (charged.requests, charged.rate_tokens, charged.billed) == (requests, tokens, billed)
    assert charged.is_recorded == (ending is not Ending.NO_ENGINE or reported is not None)
    # Money is charged only for an answer that a client could receive.
    has_answer = ending is Ending.FINISHED or ending in CUT
    assert charged.is_free == (not has_answer and ending is not Ending.MISMATCHED)


async def test_a_request_with_which_the_only_engine_died_has_a_row(gateway: Gateway, upstream: Upstream):
    """The engine's books have the request with no tokens; the client gets a 503, because no engine is left."""

    class Books(dict):
        def __contains__(self, _: object) -> bool:
            return True

        def __getitem__(self, request_id: str) -> dict[str, Any]:
            return msgspec.structs.asdict(FinishedRequest(request_id, "killed", 0, 0, 0))

    tenant = await gateway.tenant("acme")
    upstream.finished, upstream.refuses = Books(), None
    got = await tenant.complete()
    assert (got.status, got.error["code"]) == (503, "engine_died")
    assert "costs no money" in got.error["message"]

    async def has_row() -> bool:
        return bool(await tenant.usage())

    await until(has_row, 60)
    [row] = await tenant.usage()
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"], row["cost_micros"]) == (1, 0, 0, 0)


class Pair:
    """Two engines. The first request to either ends it after some work; the other follows the request's `x_engine`."""

    class Engine(Upstream):
        pair: "Pair"

        async def _generate(self, request: web.Request) -> web.StreamResponse:
            if self.pair.dead is not None:
                return await super()._generate(request)
            self.pair.dead = self
            request_id = request.headers["x-request-id"]
            self.finished[request_id] = msgspec.structs.asdict(FinishedRequest(request_id, "killed", 11, 40, 0))
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

    def __init__(self) -> None:
        self.dead: Upstream | None = None
        self.engines = [Pair.Engine(), Pair.Engine()]
        for engine in self.engines:
            engine.pair = self


@pytest.mark.parametrize(
    ("answer", "status", "charged"),
    [
        ({"status": 400}, "refused", (11, 40)),
        ({"status": 429}, "error", (11, 40)),
        ({"status": 503}, "error", (11, 40)),
        ({"status": 404}, "error", (11, 40)),
        # The tenant pays the tokens of the engine that served it; the lost work is the operator's.
        ({"tokens": 3}, "ok", (11, 3)),
    ],
)
async def test_work_of_an_engine_that_died_counts_but_costs_nothing(
    answer: dict[str, int],
    status: str,
    charged: tuple[int, int],
    tmp_path: Path,
    model_dir: Path,
    redis_url: str,
):
    pair = Pair()
    async with AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(engine.serving())).url for engine in pair.engines]
        gateway = await stack.enter_async_context(running(settings(tmp_path, model_dir, urls, redis_url)))
        priced = await gateway.admin.call("PUT", "/admin/api/prices/base", json={"input": 10**6, "output": 10**6})
        assert priced.status == 200
        tenant = await gateway.tenant("acme", budget_per_month=1000)
        await tenant.complete(max_tokens=50, x_engine=answer)

        async def has_row() -> bool:
            return bool(await tenant.usage())

        await until(has_row, 60)
        [row] = await tenant.usage()
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (1, *charged)
        assert row["cost_micros"] == (sum(charged) if status == "ok" else 0)
        with sqlite3.connect(tmp_path / "gateway.db") as connection:
            [found] = connection.execute("SELECT status, engine FROM usage").fetchall()
        assert pair.dead is not None
        assert (found[0], found[1] == pair.dead.url) == (status, status != "ok")


def test_every_ending_is_in_the_table():
    assert charge.__doc__ is not None
    assert all(f"| {ending.name} " in charge.__doc__ for ending in Ending)


@pytest.mark.parametrize(
    ("request_", "weights"),
    [
        (completion(), TokenRateWeights(1, 1)),
        (completion(logprobs=0), TokenRateWeights(1, 1)),
        (completion(logprobs=20), TokenRateWeights(1, 5)),
        (completion(logprobs=1, echo=True), TokenRateWeights(2, 2)),
        (completion(prompt_logprobs=0), TokenRateWeights(2, 1)),
        (completion(prompt_logprobs=20, n=3), TokenRateWeights(13, 1)),
        (chat(logprobs=True, top_logprobs=20), TokenRateWeights(1, 5)),
    ],
)
def test_log_probabilities_cost_tokens(request_: Any, weights: TokenRateWeights):
    assert weights_of(request_) == weights


def test_the_money_of_a_weighed_reservation_is_that_of_the_real_tokens():
    price = Price(input=200_001, cached=100_001, output=600_001)
    weights = TokenRateWeights(5, 3)
    weighed = weights.price(price).highest_cost(8000 * 5, 1000 * 3)
    assert 0 <= weighed - price.highest_cost(8000, 1000) <= 1


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (completion(prompt_logprobs=20), "prompt_logprobs"),
        (completion(logprobs=20, echo=True), "echo"),
        (completion(logprobs=20, echo=True, stream=True), "echo"),
        (chat(logprobs=True, top_logprobs=20, n=16), "top_logprobs"),
        (chat(logprobs=True, n=16), "logprobs"),
        (chat(n=16), "n"),
        (chat(max_completion_tokens=10), "max_completion_tokens"),
    ],
)
def test_an_answer_that_could_be_too_large_names_the_field(request_: Any, field: str):
    prompt, tokens = (8000, 10) if "echo" in field or "prompt" in field else (10, 160_000)
    with pytest.raises(BadRequest) as refused:
        check_answer_size(request_, prompt, tokens, 2**20)
    assert (refused.value.param, refused.value.code) == (field, "answer_too_large")
    check_answer_size(request_, 10, 10, 2**20)


def test_a_stream_may_be_of_any_length():
    check_answer_size(chat(logprobs=True, top_logprobs=20, stream=True), 10, 10**6, 2**20)


async def test_log_probabilities_are_reserved_and_settled(gateway: Gateway):
    """A prompt of 2 tokens with 20 log-probabilities each costs 10, and 8 generated tokens with 20 cost 40."""
    tight = await gateway.tenant("tight", tokens_per_minute=49)
    asked = {"prompt_logprobs": 20, "logprobs": 20, "max_tokens": 8, "x_engine": {"tokens": 2}}
    refused = await tight.complete(**asked)
    assert (refused.status, refused.error["code"]) == (400, "request_exceeds_limit")
    tenant = await gateway.tenant("enough", tokens_per_minute=50)
    got = await tenant.complete(**asked)
    assert got.status == 200
    # The double counts 11 prompt tokens: 55 and 10 were used, more than the limit.
    assert (await tenant.complete(max_tokens=1)).error["type"] == "tokens"


async def test_too_many_log_probabilities_are_refused(gateway: Gateway):
    tenant = await gateway.tenant("acme")
    got = await tenant.complete(prompt=["x" * 200] * 900, prompt_logprobs=20, n=16, max_tokens=CONTEXT - 200)
    assert (got.status, got.error["param"], got.error["code"]) == (400, "prompt_logprobs", "answer_too_large")


def test_the_requests_above_are_what_the_wire_takes():
    with pytest.raises(ProtocolError):
        chat(top_logprobs=3).check()


@pytest.mark.parametrize("value", ["[" + "[]," * 150_000 + "1]", "[" + "1," * 600_000 + "1]"])
async def test_a_body_of_very_many_values_is_refused(value: str, gateway: Gateway):
    """A decoded body of very many values would take many times its bytes for the whole request."""
    tenant = await gateway.tenant("acme")
    body = f'{{"model": "base", "prompt": "Hi", "metadata": {value}}}'.encode()
    got = await tenant.call("POST", "/v1/completions", data=io.BytesIO(body))
    assert got.status == 400
    assert "too many values" in got.error["message"]
