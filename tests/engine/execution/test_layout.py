"""Layouts: one made from the arrays of the step before equals one made from the plan alone."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from engine.execution.layout import Layout, LayoutBuilder, rows_by_slot
from engine.scheduling.plan import Plan
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.streams import StreamRows
from engine.speculative_config import SpeculativeConfig
from testing.engine import outputs_until_idle
from testing.tiny_engines import Make

# The next step changes them.
TABLES = ("tables", "new_blocks")


def receipts(plan: Plan) -> dict[Request, tuple[str | None, bool]]:
    return {request: (request.served_digest, request.has_news) for request in plan}


class CheckedBuilder:
    """Compare each layout of an engine with its slow twin, that of a new builder which lays out each request by itself.
    Count those with the seats of the layout before, and the others.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self._lay_out, self._last = LayoutBuilder.lay_out, np.empty(0)
        self._device = np.full((8, 8), -1)  # the tables as a device has them: only changed entries arrive

        def checked(builder: LayoutBuilder, plan: Plan) -> Layout:
            return self._checked(builder, plan)

        monkeypatch.setattr(LayoutBuilder, "lay_out", checked)

    def _checked(self, builder: LayoutBuilder, plan: Plan) -> Layout:
        self.builder = builder
        # The twin records the same receipts, so they are taken back before the engine's own builder runs.
        before = receipts(plan)
        twin = self._lay_out(LayoutBuilder(*self._device.shape, builder._slot_digests), Plan(plan))  # without streams
        expected_receipts = receipts(plan)
        for request in plan:
            request.served_digest, request.has_news = before[request]
        layout = self._lay_out(builder, plan)
        assert receipts(plan) == expected_receipts
        for name in {field.name for field in fields(Layout)} - {*TABLES}:
            found, expected = getattr(layout, name), getattr(twin, name)
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(found, expected, err_msg=name, strict=True)
            else:
                assert found == expected, name
        seats, indexes, blocks = layout.new_blocks
        self._device[seats, indexes] = blocks
        for request in plan:
            for tables in (layout.tables, self._device):
                assert tables[request.seat, : len(request.blocks)].tolist() == request.blocks
        self.counts["kept" if layout.seats is self._last else "made"] += 1
        self._last = layout.seats
        return layout


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": False},
        {
            "async_scheduling": False,
            "speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        },
    ],
    ids=["asynchronous", "synchronous", "drafts"],
)
def test_kept_arrays_are_those_of_a_new_layout(
    make_simulated: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Over arrivals, ends, aborts and preemptions of streams with and without adapters, logprobs and drafts."""
    checked, chance = CheckedBuilder(monkeypatch), random.Random(1)
    engine, digests = make_simulated(**options)
    for digest in digests:  # load the adapters, so that the counts below do not depend on their arrival
        engine.add_request(NewRequest(digest, [1], SamplingParams(max_tokens=1), adapter_digest=digest))
    list(outputs_until_idle(engine))
    # Admission expects no further blocks, so that they run out.
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    for number in range(50):
        prompt = [3 + chance.randrange(300)] * chance.randrange(1, 60)
        params = SamplingParams(
            max_tokens=chance.randrange(1, 60),
            ignore_eos=True,
            seed=number,
            prompt_logprobs=chance.choice([None, None, 1]),
        )
        engine.add_request(NewRequest(str(number), prompt, params, adapter_digest=chance.choice([None, *digests])))
        for _ in range(chance.choice([0, 1, 1, 30])):
            engine.step()
        if chance.random() < 0.2:
            engine.abort(str(chance.randrange(number + 1)))
    while engine.has_work():
        engine.step()
    assert checked.counts["kept"] > 50
    assert checked.counts["made"] > 50
    assert engine.state().num_preemptions


@pytest.mark.parametrize("change", ["streams", "adapter"])
def test_a_change_makes_a_new_layout(make_simulated: Make, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Other streams, another adapter in a slot."""
    checked = CheckedBuilder(monkeypatch)
    engine, digests = make_simulated(async_scheduling=False)
    for i in (0, 1):  # load the adapters, so that the four requests start together
        params = SamplingParams(max_tokens=1)
        engine.add_request(NewRequest(f"load {i}", [1], params, adapter_digest=digests[i]))
    list(outputs_until_idle(engine))
    for i in range(4):
        prompt = [3 + i] * (20 + i)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=digests[i % 2]))
    while checked.counts["kept"] < 5:
        engine.step()
    assert len(engine.scheduler.running) == 4
    made = checked.counts["made"]
    engine.step()
    assert checked.counts["made"] == made
    if change == "streams":
        engine.scheduler._streams.keep(None)
    else:
        digests_by_slot = [*engine.adapters.slot_digests]
        digests_by_slot[engine.scheduler.running[0].adapter_slot] = "0" * 64
        checked.builder._slot_digests = digests_by_slot
    engine.step()
    if change == "adapter":
        assert engine.scheduler.running[0].served_digest == "mixed"
    else:
        assert checked.counts["made"] == made + 1


def test_a_plan_between_two_layouts_leaves_no_block_out() -> None:
    builder, request = LayoutBuilder(2, 4), Request(NewRequest("0", [1] * 9, SamplingParams()))
    request.seat, request.blocks, request.num_computed, request.num_pending = 1, [5], 9, 1
    for number, block in ((1, 5), (3, 6)):
        plan, seats = Plan({request: 1}), np.array([1])
        plan.streams = StreamRows([request], seats, np.array([10]), [request] if number == 1 else [], number)
        layout = builder.lay_out(plan)
        assert layout.tables[1].max() == layout.new_blocks[2].max() == block
        request.blocks.append(block + 1)


def test_a_stream_resumed_beside_streams_with_tokens_in_flight(
    make_simulated: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a preempted request are cached, so the first plan of its streams has one known token."""
    checked = CheckedBuilder(monkeypatch)
    engine, _ = make_simulated(async_scheduling=True)
    for i in range(3):
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        engine.add_request(NewRequest(str(i), [3 + i] * 20, params))
    while checked.counts["kept"] < 5:
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[-1], Plan(), "")
    while len(engine.scheduler.running) < 3:
        engine.step()
    assert engine._in_flight is not None
    kept = checked.counts["kept"]
    while engine.has_work():
        engine.step()
    assert checked.counts["kept"] > kept + 5


class Loading(dict[int, str]):
    """Adapters by slot, to which the loader adds one as soon as they are iterated over."""

    def __iter__(self) -> Iterator[int]:
        for slot in super().__iter__():
            self[10 + len(self)] = "new"
            yield slot


def test_a_step_beside_a_load_finds_its_rows() -> None:
    loading = Loading({0: "a", 3: "b", 4: "c"})
    with pytest.raises(RuntimeError, match="changed size"):
        list(loading)
    rows = rows_by_slot(np.array([3, -1, 5, 3, 0]), loading)
    assert {slot: found.tolist() for slot, found in rows.items()} == {0: [4], 3: [0, 3]}
