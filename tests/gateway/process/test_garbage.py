"""Full collections of garbage wait for a calm moment."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator

import pytest

from gateway.process import garbage
from gateway.process.background import running
from testing.gateway.running import until


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    """Restore the collector's thresholds, which belong to the whole process.

    Objects that a test excludes from collections stay excluded: `gc.unfreeze` would also include all imports again.
    """
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def dead_cycle() -> "weakref.ref[Cycle]":
    """Return a reference to a cycle that only a full collection frees."""
    cycle = Cycle()
    gc.collect(1)
    return weakref.ref(cycle)


async def until_freed(dead: "weakref.ref[Cycle]") -> None:
    async def is_freed() -> bool:
        return dead() is None

    await until(is_freed)


async def test_garbage_stays_while_many_requests_run_and_goes_at_a_calm_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.01)
    garbage.reduce_pauses()
    dead, num_running = dead_cycle(), garbage.CALM_REQUESTS + 1
    async with running(garbage.collect_when_calm(lambda: num_running)):
        for _ in range(garbage.DUE_AFTER):
            gc.collect(1)
        await asyncio.sleep(0.2)
        assert dead() is not None
        num_running = garbage.CALM_REQUESTS
        await until_freed(dead)


async def test_garbage_goes_after_a_while_without_a_calm_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(garbage, "BUSY_SECONDS", 3600.0)
    garbage.reduce_pauses()
    dead = dead_cycle()
    for _ in range(garbage.DUE_AFTER):
        gc.collect(1)
    async with running(garbage.collect_when_calm(lambda: 10 * garbage.CALM_REQUESTS)):
        await asyncio.sleep(0.1)
        assert dead() is not None
        monkeypatch.setattr(garbage, "BUSY_SECONDS", 0.3)
        await until_freed(dead)


async def test_collections_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(garbage, "DUE_AFTER", 0)
    monkeypatch.setattr(garbage, "PAUSE_DURATIONS", 50)
    garbage.reduce_pauses()
    kept, events = [Cycle() for _ in range(20_000)], list[tuple[str, float]]()

    def note(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            events.append((phase, time.monotonic()))

    gc.callbacks.append(note)
    try:
        async with running(garbage.collect_when_calm(lambda: 0)):

            async def three_times() -> bool:
                return len(events) >= 6

            await until(three_times)
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 20_000
    assert [phase for phase, _ in events[:6]] == ["start", "stop"] * 3
    times = [at for _, at in events[:6]]
    for start, stop, following in zip(times[::2], times[1::2], times[2::2], strict=False):
        assert following - stop >= garbage.PAUSE_DURATIONS * (stop - start)


async def test_a_long_pause_leaves_the_search_for_a_calm_moment_as_long_as_ever(monkeypatch: pytest.MonkeyPatch):
    """After a pause above BUSY_SECONDS, the next collection ran among any number of requests."""
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(garbage, "DUE_AFTER", 0)
    monkeypatch.setattr(garbage, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(garbage, "PAUSE_DURATIONS", 1.0)
    garbage.reduce_pauses()
    collected, num_running = list[float](), 0

    def collect() -> None:
        nonlocal num_running
        collected.append(time.monotonic())
        num_running = garbage.CALM_REQUESTS + 1
        time.sleep(0.6)

    monkeypatch.setattr(garbage.gc, "collect", collect)
    async with running(garbage.collect_when_calm(lambda: num_running)):

        async def twice() -> bool:
            return len(collected) >= 2

        await until(twice)
    # The collection and the pause after it take 0.6 s each.
    assert collected[1] - collected[0] >= 1.2 + garbage.BUSY_SECONDS


async def test_objects_that_stay_are_excluded_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(garbage, "WARM_SECONDS", 0.05)
    garbage.reduce_pauses()
    freeze, frozen_at = garbage._freeze, list[float]()

    def counted() -> None:
        freeze()
        frozen_at.append(time.monotonic())

    monkeypatch.setattr(garbage, "_freeze", counted)
    frozen, kept = gc.get_freeze_count(), [Cycle() for _ in range(1000)]
    async with running(garbage.collect_when_calm(lambda: 0)):

        async def twice() -> bool:
            return len(frozen_at) >= 2

        await until(twice)
    assert gc.get_freeze_count() >= frozen + len(kept)
    # The second time is at twice the age of the first one.
    assert frozen_at[1] - frozen_at[0] >= garbage.WARM_SECONDS
