"""Service of all tenants under fair share, by counts: seats fill, and prompts have the rows of empty seats.

Simulated as in `test_light_tenants.py`.
"""

import pytest

from tests.engine.scheduling.test_light_tenants import Machine, flood

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
    assert steps <= 100, "181 and 148 before"


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
