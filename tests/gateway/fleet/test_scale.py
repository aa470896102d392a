"""The simulation of a large installation (`benchmarks/scale.py`), at a small size."""

import asyncio
import time

import pytest

from benchmarks.scale import Costs, parts
from benchmarks.scale_costs import Cost
from benchmarks.scale_fleet import SLOTS, Scale, Simulation, simulate

SMALL = Scale(gateways=2, engines=36, adapters=150, tenants=500, seconds=2.0, warmup=1.0)


def test_simulated_gateways_share_a_large_fleet_and_load_hardly_more_adapters_than_with_all_engines_compared():
    began = time.monotonic()
    found, exact = simulate(SMALL), simulate(SMALL._replace(among_all=True))
    # Simulated time is not the machine's.
    assert time.monotonic() - began < 60.0
    assert found.requests == exact.requests > 1500
    assert found.refused == exact.refused == found.over_quota == 0
    assert found.loads <= 1.3 * exact.loads + 10
    # Without a wait it is 50 ms.
    assert found.percentile(0.5) < exact.percentile(0.5) + 0.05
    assert found.percentile(0.99) < 1.2 * exact.percentile(0.99)
    assert max(found.busy) <= 2 * SLOTS + SLOTS // 2
    # The most popular adapter has 18 % of the requests.
    assert 5 <= len(found.engines_of["adapter-0"]) <= 25


def test_the_same_seed_gives_the_same_result():
    tiny = SMALL._replace(engines=4, seconds=1.0)
    assert simulate(tiny) == simulate(tiny) != simulate(tiny._replace(seed=2))


def test_simulated_tenants_that_send_too_much_share_the_rest_by_weight():
    scale = Scale(gateways=2, engines=4, adapters=150, tenants=100, load=1.5, flooders=6, flood=0.7)
    scale = scale._replace(seconds=16.0, warmup=9.0)
    found = simulate(scale)
    assert found.jain is not None
    assert found.jain > 0.97
    heavy, light = (sum(found.served[f"flooder-{i}"] for i in numbers) for numbers in ((0, 2, 4), (1, 3, 5)))
    assert 1.5 < heavy / light < 2.2
    # The others hardly wait: at 50 ms without a wait.
    assert found.percentile(0.5) < 0.3


@pytest.mark.parametrize("part", ["_exchange", "_push", "_serve"])
def test_a_failure_in_a_part_of_the_simulation_ends_it(part: str, monkeypatch: pytest.MonkeyPatch):
    async def fail(*_: object) -> float:
        await asyncio.sleep(0.1)
        raise ZeroDivisionError

    monkeypatch.setattr(Simulation, part, fail)
    with pytest.raises(ExceptionGroup) as failed:
        simulate(SMALL._replace(engines=4, seconds=1.0))
    assert failed.group_contains(ZeroDivisionError)


def test_a_part_breaks_where_it_needs_a_core():
    names = ["choice", "choice among all", "sums over engines", "index of holders", "service to engines", "report"]
    names += ["service to all engines"]
    names += ["admission", "attempt to admit", "changes of keys", "quota, process", "quota, Redis"]
    names += ["exchange, process", "exchange, Redis"]
    costs = Costs([Cost(name, "", 10, 1e-4) for name in names])
    # A cost that grows with the number is scaled up from the largest number measured.
    assert costs.at("choice", 100) == 1e-3
    assert costs.at("choice", 100, grows=False) == 1e-4
    found = {(part.name, part.where): part for part in parts(costs, Scale(gateways=10, engines=100), 50)}
    exchange = found["exchange of counters", "Redis"]
    assert exchange.limit(exchange.load) == "500 gateways"
    assert abs(exchange.load - 10 * 5e-4 / 0.25) < 1e-9
    loads = [part.load for part in parts(costs, Scale(), 50)]
    assert loads == sorted(loads, reverse=True)
