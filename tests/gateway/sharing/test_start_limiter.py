"""Bursts of requests begin over several iterations of the event loop, and owners take calls."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from gateway.api import health
from gateway.api.inference.admission import Admission
from gateway.pages.console import access
from gateway.sharing import start_limiter
from gateway.sharing.start_limiter import MAX_REST_SECONDS, StartLimiter
from testing.gateway.upstream import Upstream


async def test_a_burst_leaves_iterations_to_others():
    limiter, begun, seen = StartLimiter(per_iteration=4), [], []

    async def one(owner: str) -> None:
        await limiter.begin(owner)
        begun.append(owner)

    burst = [asyncio.ensure_future(one("noisy")) for _ in range(100)]
    late = asyncio.ensure_future(one("quiet"))
    while not all(task.done() for task in burst):
        seen.append(len(begun))
        await asyncio.sleep(0)
    await late
    assert len(begun) == 101
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2
    # Not after all earlier requests of the burst.
    assert begun.index("quiet") < 10


async def test_an_owner_with_a_burst_gets_its_part_of_an_iteration_only():
    limiter, begun = StartLimiter(per_iteration=4), []

    async def one(owner: str) -> None:
        await limiter.begin(owner)
        begun.append(owner)

    tasks = [asyncio.ensure_future(one("noisy")) for _ in range(30)]
    tasks += [asyncio.ensure_future(one(f"quiet-{i}")) for i in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # Each iteration has room for the quiet ones, however many requests arrived before theirs.
    assert Counter(begun).items() >= {"quiet-0": 1, "quiet-1": 1, "quiet-2": 1}.items()
    await asyncio.gather(*tasks)
    assert len(begun) == 33


async def test_requests_of_a_resting_owner_begin_after_its_rests_and_others_do_not_wait():
    limiter, loop = StartLimiter(), asyncio.get_running_loop()
    started = loop.time()
    limiter.rest("noisy", 0.05)
    limiter.rest("noisy", 0.05)
    noisy = asyncio.ensure_future(limiter.begin("noisy"))
    await limiter.begin("quiet")
    assert not noisy.done()
    await noisy
    assert loop.time() - started >= 0.1
    # The rests are over, and nothing is left of them.
    await asyncio.wait_for(limiter.begin("noisy"), 10)


def test_a_short_rest_lasts_at_least_a_tick_of_the_clock():
    """A rest below a millisecond was none."""

    async def test() -> None:
        limiter, loop = StartLimiter(), asyncio.get_running_loop()
        for _ in range(20):
            started = loop.time()
            limiter.rest("noisy", 0.0005)
            await asyncio.wait_for(limiter.begin("noisy"), 10)
            assert loop.time() - started >= 0.0005

    with asyncio.Runner() as runner:
        runner.run(test())


async def test_rests_have_a_limit_however_many_they_are():
    limiter = StartLimiter()
    for _ in range(100_000):
        limiter.rest("noisy", 0.005)
    # Without a limit, the rests would last 500 s.
    await asyncio.wait_for(limiter.begin("noisy"), MAX_REST_SECONDS + 60)


async def test_requests_that_leave_during_a_rest_are_removed_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_limiter, "MAX_REST_SECONDS", 3600.0)
    limiter = StartLimiter()
    limiter.rest("noisy", 3600.0)
    tasks = [asyncio.ensure_future(limiter.begin("noisy")) for _ in range(100)]
    await asyncio.sleep(0)
    for task in tasks[:99]:
        task.cancel()
    await asyncio.gather(*tasks[:99], return_exceptions=True)
    assert [len(queue) for queue in limiter._waiting.values()] == [1]
    tasks[99].cancel()
    await asyncio.gather(tasks[99], return_exceptions=True)
    assert not limiter._waiting


async def test_those_who_leave_hold_nobody_up():
    limiter = StartLimiter(per_iteration=2)
    tasks = [asyncio.ensure_future(limiter.begin(f"owner-{i % 3}")) for i in range(50)]
    await asyncio.sleep(0)
    for task in tasks[10:40]:
        task.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert sum(result is None for result in done) >= 20
    await asyncio.wait_for(limiter.begin("another"), 10)


async def test_a_request_that_comes_in_the_iteration_of_a_released_one_waits():
    limiter = StartLimiter()

    async def released() -> None:
        await limiter.begin("owner")
        further = limiter.begin("owner")
        assert isinstance(further.send(None), asyncio.Future)
        further.close()

    await asyncio.gather(limiter.begin("owner"), released())


class CallsByIteration:
    """Numbers of calls in each iteration of the event loop, from `begin` to `end`."""

    def __init__(self) -> None:
        self.calls = Counter[int]()
        self._number = 0
        self._handle: asyncio.Handle | None = None

    def counted(self, do: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose calls are counted."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls[self._number] += 1
            return do(*arguments, **named)

        return call

    def begin(self) -> None:
        self.calls.clear()
        self._tick()

    def _tick(self) -> None:
        self._number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def end(self) -> list[int]:
        """Return the number of all calls and the most in an iteration."""
        assert self._handle is not None
        self._handle.cancel()
        return [self.calls.total(), max(self.calls.values())]


@pytest.mark.parametrize("waits_for", ["the key's look-up", "the end of the delay"])
async def test_requests_that_wait_for_one_event_continue_over_several_iterations(
    waits_for: str, serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    calls = CallsByIteration()
    monkeypatch.setattr(Admission, "admit", calls.counted(Admission.admit))
    async with serve(unserved_per_second=10.0 if "delay" in waits_for else 10_000.0) as gateway:
        acme = await gateway.tenant("acme", requests_per_minute=10_000)
        if "delay" in waits_for:
            await asyncio.gather(*(acme.get("/v1/models") for _ in range(60)))
        calls.begin()
        await asyncio.gather(*(acme.complete(max_tokens=0) for _ in range(100)))
        assert calls.end() == [100, 1]


async def test_pages_that_wait_for_the_look_up_of_their_session_continue_over_several_iterations(
    serve: Any, monkeypatch: pytest.MonkeyPatch
):
    calls = CallsByIteration()
    monkeypatch.setattr(access, "check_scope", calls.counted(access.check_scope))
    async with serve(unserved_per_second=10_000.0) as gateway:
        acme = await gateway.tenant("acme")
        async with gateway.browser(acme.key, "/console") as browser:
            calls.begin()
            await asyncio.gather(*(browser.get("/console/help") for _ in range(100)))
            assert calls.end() == [100, 1]


async def test_probes_of_an_address_begin_one_in_each_iteration(serve: Any, monkeypatch: pytest.MonkeyPatch):
    """They have no rate, and anybody may send them."""
    calls = CallsByIteration()
    monkeypatch.setattr(health, "json_response", calls.counted(health.json_response))
    async with serve() as gateway:
        await asyncio.gather(*(gateway.nobody.get("/healthz") for _ in range(100)))
        calls.begin()
        await asyncio.gather(*(gateway.nobody.get("/healthz") for _ in range(100)))
        assert calls.end() == [100, 1]


def test_a_rest_has_few_timers_with_a_clock_of_milliseconds(monkeypatch: pytest.MonkeyPatch):
    """A timer for the last fraction of a millisecond would fire in each iteration of the event loop."""
    ends, end_rest = list[float](), StartLimiter._end_rest

    def counted(limiter: StartLimiter, owner: str) -> None:
        ends.append(asyncio.get_running_loop().time())
        end_rest(limiter, owner)

    monkeypatch.setattr(StartLimiter, "_end_rest", counted)

    async def test() -> None:
        limiter = StartLimiter()
        for _ in range(20):
            limiter.rest("noisy", 0.005)
            async with asyncio.timeout(10):
                await limiter.begin("noisy")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
    # The rest sets a timer, which fires once or twice.
    assert len(ends) <= 20 * 3
