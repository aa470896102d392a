"""Service of all tenants under fair share, by counts: seats fill, and prompts have the rows of empty seats.

Simulated as in `test_light_tenants.py`.
"""

import pytest

from adapters.tiers.device_pool import Residency
from engine.scheduling.request import NewRequest, Request, SamplingParams
from tests.engine.scheduling.test_light_tenants import Machine, flood
from tests.engine.scheduling.world import Pool

SEATS = 64


def filling(beside: int) -> tuple[Machine, int]:
    """Let 64 requests of a tenant arrive beside `beside` streams of another. Return the machine once all seats are
    taken, and the number of steps until then.
    """
    machine = Machine()
    for _ in range(beside):
        machine.ask(0.0, "quiet", 16, 2000)
    machine.run(5)
    before = len(machine.steps)
    for _ in range(SEATS):
        machine.ask(machine.now, "flood", 64, 2000)
    while len(machine.engine.running) < SEATS:
        machine.run(machine.now + 1e-6)
    return machine, len(machine.steps) - before


@pytest.mark.parametrize("beside", [1, 4])
def test_seats_fill_beside_another_tenants_streams(beside: int) -> None:
    """Before, prompts had a share of the few streams' time, steps had half as many rows, and seats stayed empty."""
    machine, steps = filling(beside)
    rows = [decodes + prompts for _, decodes, prompts in machine.steps[-steps:] if prompts]
    assert min(rows) >= SEATS
    assert steps <= 70, "181 and 148 before, 90 with one row for each free seat"


def test_seats_stay_filled_if_prompts_are_as_long_as_answers() -> None:
    """Before, each step had as many prompt tokens as replace the streams that end once half of the seats were taken."""
    machine = Machine()
    for _ in range(2):
        machine.ask(0.0, "quiet", 16, 2000)
    for _ in range(500):
        machine.ask(1.0, "steady", 48, 48)
    machine.run(40)
    streams = [decodes for _, decodes, prompts in machine.steps[-100:] if prompts]
    assert sum(streams) / len(streams) >= 0.7 * SEATS, "0.5 before"


def test_a_tenant_that_comes_and_goes_costs_little_service() -> None:
    """The other tenant's backlog takes the free seats also while the former's last streams run. 0.987 before."""
    service = {}
    for scheduler in ("fair", "fcfs"):
        machine = Machine(scheduler, row_s=0.0014)
        for number in range(600):
            machine.ask(number / 12, "steady", 43, 43)
        for start in range(0, 50, 8):
            for number in range(12):
                machine.ask(start + number / 3, "onoff", 43, 43)
        machine.run(50)
        service[scheduler] = sum(machine.service.values())
    assert service["fair"] >= 0.995 * service["fcfs"]


def test_a_prompt_beside_seats_that_nobody_waits_for_is_paced() -> None:
    """Free seats alone give a long prompt no more of the other tenant's time."""
    machine = Machine()
    for tenant_id in ("quiet", "long") * 4:
        machine.ask(0.0, tenant_id, 16, 2000)
    machine.run(5)
    before = len(machine.steps)
    machine.ask(machine.now, "long", 600, 8)
    machine.run(machine.now + 2)
    beside = [prompts for _, _, prompts in machine.steps[before:] if prompts]
    assert len(beside) > 20
    assert sum(beside) / len(beside) <= 16, "1.8 times a step of 8 streams has room for 13"


def test_a_flood_costs_no_service() -> None:
    """Before, the fair share had 0.982 of the service."""
    fair, fcfs = flood("fair"), flood("fcfs")
    assert sum(fair.service.values()) >= 0.99 * sum(fcfs.service.values())


def median_gap(machine: Machine) -> float:
    gaps = sorted(machine.gaps["quiet"])
    return gaps[len(gaps) // 2]


def test_requests_that_lack_blocks_do_not_slow_others_streams() -> None:
    """Long prompts in progress had the rows of free seats that no request could take: 0.256 s between tokens."""
    gaps = []
    for waiting in (2, 100):
        machine = Machine(blocks=400)
        for _ in range(4):
            machine.ask(0.0, "quiet", 16, 800)
        for _ in range(waiting):
            machine.ask(1.0, "bulk", 2000, 30)
        machine.run(20)
        gaps.append(median_gap(machine))
    assert gaps[1] < 1.5 * gaps[0] < 0.1


def test_requests_that_lack_their_adapter_do_not_slow_others_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 requests for an adapter that never loads gave their tenant's other prompts five times the rows."""
    monkeypatch.setattr(Pool, "ensure", lambda *args: Residency.LOADING)
    gaps = []
    for waiting in (0, 60):
        machine = Machine()
        for _ in range(4):
            machine.ask(0.0, "quiet", 16, 800)
        machine.ask(1.0, "sender", 2000, 1, again=True)
        machine.run(1)
        for number in range(waiting):
            machine.engine.add(Request(NewRequest(f"cold-{number}", [number], SamplingParams(), "cold", "sender")))
        machine.run(20)
        gaps.append(median_gap(machine))
    assert gaps[1] < 1.5 * gaps[0] < 0.1
