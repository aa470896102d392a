"""Service that whole gateways count for their queue and report to engines: what the engines have computed.

The double says that it has computed 8 prompt tokens, whatever the prompt; the gateway counts 40.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.queueing.service_counters import ServiceCounters
from testing.gateway.running import Client, becomes, running, settings
from testing.gateway.upstream import Upstream
from testing.gateway.upstream_bodies import CACHED_TOKENS, PROMPT_TOKENS

PROMPT = "x" * 40
COMPUTED = PROMPT_TOKENS - CACHED_TOKENS
Pair = tuple[Upstream, Upstream]
Case = Callable[[Client, Pair], Awaitable[None]]


def answered(**body: Any) -> Case:
    async def ask(acme: Client, _: Pair) -> None:
        assert (await acme.complete(prompt=PROMPT, **body)).status == 200

    return ask


def refused(engine_status: int, status: int) -> Case:
    async def ask(acme: Client, _: Pair) -> None:
        assert (await acme.complete(prompt=PROMPT, x_engine={"status": engine_status})).status == status

    return ask


async def leave_a_stream(acme: Client, pair: Pair) -> None:
    asking = asyncio.create_task(acme.complete(prompt=PROMPT, stream=True, x_engine={"tokens": 9, "pause": True}))
    await becomes(lambda: sum(each.events for each in pair) == 1)
    asking.cancel()
    await becomes(lambda: sum(each.cancelled for each in pair) == 1)


async def leave_before_the_first_token(acme: Client, pair: Pair) -> None:
    for each in pair:
        each.holds = True
    asking = asyncio.create_task(acme.complete(prompt=PROMPT, stream=True))
    await becomes(lambda: sum(len(each.requests) for each in pair) == 1)
    asking.cancel()
    await becomes(lambda: sum(each.cancelled for each in pair) == 1)
    for each in pair:
        each.holds = False


def try_another_engine(status: int) -> Case:
    async def ask(acme: Client, pair: Pair) -> None:
        """Ask twice. A conversation stays with its engine, which answers the second request with this status."""
        await answered(max_tokens=2)(acme, pair)
        first, _ = pair if pair[0].requests else pair[::-1]
        first.refuses = status, "c"
        assert (await acme.complete(prompt=PROMPT, stream=True, x_engine={"tokens": 4})).status == 200
        assert [len(each.requests) for each in pair if each is not first] == [1]
        first.refuses = False

    return ask


CASES: dict[str, tuple[Case, int]] = {
    "a whole answer": (answered(max_tokens=2), COMPUTED + 2 * 2),
    "a stream": (answered(stream=True, x_engine={"tokens": 4}), COMPUTED + 2 * 4),
    "two choices, of which the engine begins one": (answered(stream=True, n=2), COMPUTED + 2 * 2),
    "a stream whose client leaves": (leave_a_stream, COMPUTED + 2),
    "a client that leaves before the first token": (leave_before_the_first_token, len(PROMPT)),
    "a refused request": (refused(400, 400), 0),
    "a request that two engines fail": (refused(500, 502), 2 * len(PROMPT)),
    "a second engine after a refusal": (try_another_engine(503), 2 * COMPUTED + 2 * 2 + 2 * 4),
    "a second engine after a failure": (try_another_engine(500), 2 * COMPUTED + 2 * 2 + len(PROMPT) + 2 * 4),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_counters_and_the_engines_get_what_was_computed(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, case: str
):
    """Each engine gets the service at the other one, so the two sums together are all service.

    A last request shows that the reports of the ones before it have arrived.
    """
    expected: list[float] = []
    charges: list[float] = []
    record(monkeypatch, "expect", expected)
    record(monkeypatch, "add_service", charges)
    ask, cost = CASES[case]
    async with (
        Upstream().serving() as one,
        Upstream().serving() as two,
        running(settings(tmp_path, model_dir, [one.url, two.url], redis_url)) as gateway,
    ):
        await gateway.engines_up(2)
        acme = await gateway.tenant("acme")
        await ask(acme, (one, two))
        assert expected[0] == len(PROMPT), "the next admission counts the whole prompt"
        await answered(max_tokens=2)(acme, (one, two))
        whole = cost + COMPUTED + 2 * 2
        await becomes(lambda: one.service.total() + two.service.total() == whole)
        assert (sum(charges), sum(expected)) == (whole, 0)


def record(monkeypatch: pytest.MonkeyPatch, name: str, values: list[float]) -> None:
    """Record the values that a method of the counters is called with."""
    method = getattr(ServiceCounters, name)

    def recorded(self: ServiceCounters, tenant_id: str, value: float) -> None:
        values.append(value)
        method(self, tenant_id, value)

    monkeypatch.setattr(ServiceCounters, name, recorded)
