"""The receipt of each answer: the adapter whose pages its steps read, not the one that the request named."""

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from testing.engine import outputs_until_idle
from testing.tiny_engines import Make, engine_maker, save_base_and_adapters

NUM_ADAPTERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 256, ranks=[8] * NUM_ADAPTERS)


@pytest.fixture
def make_engine(model: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(
        model,
        request,
        dtype="float32",
        device="cpu",
        max_lora_rank=8,
        adapter_memory=4 << 20,
        max_num_seqs=4,
        kv_cache_memory=1 << 20,
        max_num_batched_tokens=32,
    )


def ask(engine: Engine, name: str, adapter: str | None, max_tokens: int = 3) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.add_request(NewRequest(name, list(range(5, 45)), params, adapter_digest=adapter))


def run(engine: Engine) -> dict[str, str | None]:
    """Return the receipt in each request's last output. Every output with a token has one."""
    receipts: dict[str, str | None] = {}
    for output in outputs_until_idle(engine):
        assert output.error is None
        assert output.served_digest is not None
        receipts[output.request_id] = output.served_digest
    return receipts


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_receipt_names_the_adapter_whose_pages_were_read(make_engine: Make, async_scheduling: bool) -> None:
    engine, digests = make_engine(async_scheduling=async_scheduling)
    for i in range(2 * NUM_ADAPTERS):
        ask(engine, str(i), digests[i % NUM_ADAPTERS])
    ask(engine, "base", None)
    expected = {str(i): f"sha256:{digests[i % NUM_ADAPTERS]}" for i in range(2 * NUM_ADAPTERS)}
    assert run(engine) == expected | {"base": "base"}


def test_the_receipt_follows_a_slot_through_its_owners(make_engine: Make) -> None:
    """The pool has room for one adapter, so all adapters use the same slot in turn, and the receipt follows."""
    engine, _ = make_engine()
    small, digests = make_engine(adapter_memory=engine.adapters.page_bytes)
    assert small.adapters.num_slots == 1
    for i in (0, 1, 2, 0):
        ask(small, "x", digests[i])
        assert run(small) == {"x": f"sha256:{digests[i]}"}
    assert small.unload_adapter(digests[0])
    assert small.adapters.slot_digests == [""]


def test_pages_of_another_adapter_are_reported(make_engine: Make) -> None:
    """The receipt shows a slot that holds another adapter's weights, by whatever defect, against the request's name.

    A change between two steps makes it mixed.
    """
    engine, digests = make_engine()
    ask(engine, "warm", digests[0])
    ask(engine, "other", digests[1])
    run(engine)
    pool = engine.adapters
    wrong, right = (pool.slot_digests.index(digest) for digest in digests[:2])
    # The defect: the pool's entry points at another adapter's weights.
    pool._residents.by_digest[digests[1]].slot = wrong
    ask(engine, "x", digests[1])
    assert run(engine) == {"x": f"sha256:{digests[0]}"}

    ask(engine, "y", digests[1], max_tokens=8)
    engine.step()
    engine.step()
    engine.scheduler.requests["y"].adapter_slot = right
    assert run(engine) == {"y": "mixed"}


def test_pages_of_no_adapter_count_as_mixed(make_engine: Make) -> None:
    engine, digests = make_engine()
    ask(engine, "warm", digests[0])
    run(engine)
    engine.adapters.slot_digests[:] = [""] * engine.adapters.num_slots
    ask(engine, "x", digests[0])
    assert run(engine) == {"x": "mixed"}


def test_a_slot_that_changes_its_adapter_under_a_stream_is_reported(make_engine: Make) -> None:
    engine, digests = make_engine()
    ask(engine, "x", digests[0], max_tokens=20)
    request = engine.scheduler.requests["x"]
    while request.num_output_tokens < 3:
        engine.step()
    assert request.served_digest == f"sha256:{digests[0]}"
    engine.adapters.slot_digests[:] = [digests[1]] * engine.adapters.num_slots
    assert run(engine) == {"x": "mixed"}


def test_a_preempted_request_keeps_one_receipt(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # Admission expects no further blocks, so that they run out.
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 16
    engine, digests = make_engine(kv_cache_memory=9 * block_bytes, max_model_len=128, enable_prefix_caching=False)
    for i in range(3):
        ask(engine, str(i), digests[i], max_tokens=40)
    assert run(engine) == {str(i): f"sha256:{digests[i]}" for i in range(3)}
    assert engine.state().num_preemptions
