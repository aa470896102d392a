"""Arrivals beside streams at the real engine with async scheduling, in virtual time."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling import launch_timer
from testing.tiny_engines import Make, engine_maker, save_base_and_adapters
from testing.virtual_engine import VirtualEngine

STEP_S = 0.02


@pytest.fixture
def make_engine(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(save_base_and_adapters(tmp_path, 1024), request, kv_cache_memory=1 << 30, max_num_seqs=128)


def p99(waits: Sequence[float]) -> float:
    return sorted(waits)[int(0.99 * len(waits))]


def beside_streams(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int]:
    """Return the waits of arrivals beside eight streams, in steps, and the number of steps in 10 s."""
    with monkeypatch.context() as patch:
        engine = VirtualEngine(make_engine, patch, device=f"simulated:{1000 * STEP_S},0")
        for _ in range(8):
            engine.arrive(0.0, "streams", 1, 900)
        engine.run(6.0)
        before = engine.num_steps
        engine.arrive_randomly(16.0, 12.0, "arrivals", 1, 1)
        engine.run(16.0)
    return [wait / STEP_S for _, wait in engine.waits["arrivals"]], engine.num_steps - before


def test_an_arrival_joins_the_next_step(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the rest of the running step and for its own, and the device is never idle."""
    waits, steps = beside_streams(make_engine, monkeypatch)
    monkeypatch.setattr(launch_timer, "MAX_SHARE", 0.0)
    late, steps_at_once = beside_streams(make_engine, monkeypatch)
    assert len(waits) == len(late) > 100
    assert statistics.mean(waits) < 1.75
    # The next step is planned as soon as a step begins.
    assert statistics.mean(late) > 2.4
    assert steps == pytest.approx(steps_at_once, abs=1) == pytest.approx(10 / STEP_S, abs=2)


def beside_a_flood(make_engine: Make, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[float, float, int]:
    """Return the p99 of a tenant's waits without and beside 64 requests of another, and the service of both in 40 s."""
    with monkeypatch.context() as patch:
        engine = VirtualEngine(make_engine, patch, **options)
        engine.arrive_randomly(80.0, 1.0, "quiet", 64, 16)
        engine.run(40.0)
        before = sum(engine.service.values())
        for _ in range(64):
            engine.arrive(40.0, "flood", 64, 64, is_closed=True)
        engine.run(80.0)
    waits = engine.waits["quiet"]
    alone, beside = (p99([wait for at, wait in waits if (at >= 40.0) == is_beside]) for is_beside in (False, True))
    return alone, beside, sum(engine.service.values()) - before


def test_a_flood_of_another_tenant(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quiet tenant's slowest first tokens stay within 1.6 times of those without the flood, at no cost in service."""
    device = "simulated:60,0.2"
    alone, beside, service = beside_a_flood(make_engine, monkeypatch, device=device)
    _, unfair, service_unfair = beside_a_flood(make_engine, monkeypatch, device=device, scheduler="fcfs")
    assert beside < 1.6 * alone
    assert unfair > 4 * alone
    assert service >= 0.97 * service_unfair
