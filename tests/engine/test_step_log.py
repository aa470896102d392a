"""The steps' sums by second, and the least time that a device needs for them."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from engine.step_log import RECENT, StepLog, StepWork
from kernels import roofline
from kernels.roofline import Roofline, measure_roofline

# 1,000 elements in the layers and 100 in the head, 2 bytes for each, and 8 bytes for a token's keys and values.
WORK = StepWork(1000, 100, 2200, 8)


def test_the_least_time_is_that_of_the_bytes_or_of_the_products():
    device = Roofline(bandwidth=1000.0, flops=10_000.0)
    assert WORK.seconds(device, rows=1, decodes=1, context=100) == (2 * 1100 + 8 * 100) / 1000
    assert WORK.seconds(device, rows=50, decodes=0, context=50) == 2 * 1000 * 50 / 10_000
    assert WORK.seconds(device, rows=1, decodes=1, context=0, adapter_bytes=800) == (2200 + 800) / 1000


def test_steps_are_summed_by_second_and_the_present_second_is_left_out(monkeypatch):
    log, clock = StepLog(WORK), [100.5]
    monkeypatch.setattr(time, "time", lambda: clock[-1])
    log.add(0.1, decodes=1, prompt_tokens=0, context=10)
    assert log.recent() == ()
    device = log.roofline = Roofline(1e6, 1e6)
    for now in (101.0, 101.9, *range(103, 110)):
        clock.append(now)
        log.add(0.2, decodes=2, prompt_tokens=3, context=10)
    clock.append(110.0)
    assert [each.at for each in log.recent()] == [105, 106, 107, 108, 109]
    assert len(log.recent()) == RECENT
    [last] = log.recent()[-1:]
    assert (last.steps, last.seconds, last.longest, last.prompt_tokens, last.decodes) == (1, 0.2, 0.2, 3, 2)
    # No step is faster than the device.
    log.roofline = Roofline(1.0, 1.0)
    log.add(0.2, decodes=1, prompt_tokens=0, context=1)
    clock.append(111.0)
    assert log.recent()[-1].roofline == 0.2
    assert last.roofline == WORK.seconds(device, rows=5, decodes=2, context=10)


def test_a_device_is_measured_by_its_bytes_and_products_a_second(monkeypatch):
    """By a clock that moves on by the same time with each reading: a busy machine may stall within any run."""
    step = roofline.LONG_ENOUGH_S
    readings = itertools.count(0.0, step)
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=readings.__next__))
    found = measure_roofline(torch.device("cpu"), torch.float32, 1 << 20)
    assert found.bandwidth == pytest.approx((1 << 20) / step)
    assert found.flops == pytest.approx(2 * roofline.FIRST_SIZE**3 / step)
    assert next(readings) > 4 * step, "each is measured several times, unless that takes too long"
