"""The host tier: bounded, pins respected, one load at a time per digest, failures reported and briefly cached."""

import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest
import torch

from adapters import verified_files
from adapters.checkpoint import open_checkpoint
from adapters.fair_threads import Yielding
from adapters.manifest import AdapterError, AdapterNotFound, BaseShape
from adapters.tiers import failed_loads
from adapters.tiers.adapter_reader import AdapterReader, HostAdapter
from adapters.tiers.host_cache import HostCache
from testing.adapter_files import BASE, key, tensors, write
from tests.adapters.tiers.conftest import HOST_BYTES as SIZE

TIMEOUT = 60


def load(cache: HostCache, digest: str) -> HostAdapter:
    return cache.fetch(digest).result(TIMEOUT)


def test_the_tensors_are_those_of_the_file(make_cache, digests):
    cache = make_cache()
    assert cache.get(digests[0]) is None
    adapter = load(cache, digests[0])
    assert cache.get(digests[0]) is adapter
    assert (adapter.digest, adapter.rank, adapter.num_bytes) == (digests[0], 4, SIZE)
    assert sorted(adapter.modules) == [(0, "q_proj"), (0, "v_proj"), (2, "down_proj")]
    for (layer, projection), module in adapter.modules.items():
        for side, tensor in (("A", module.a), ("B", module.b)):
            _, shape, data = tensors()[key(layer, projection, side)]
            assert torch.equal(tensor, torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape))
        assert module.scale == 2.0


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_in_the_caches_dtype(make_cache, store, tmp_path, source, dtype):
    file_dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[source]
    content, expected = {}, {}
    for name, (_, shape, data) in tensors().items():
        values = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape).to(file_dtype)
        content[name] = (source, shape, values.view(torch.uint8).numpy().tobytes())
        expected[name] = values.to(dtype)
    adapter = load(make_cache(dtype=dtype), store.put(write(tmp_path / "x", content), BASE).digest)
    assert adapter.num_bytes == SIZE // 4 * dtype.itemsize
    for (layer, projection), module in adapter.modules.items():
        assert torch.equal(module.a, expected[key(layer, projection, "A")])
        assert torch.equal(module.b, expected[key(layer, projection, "B")])


def test_the_least_recently_used_goes_first_and_the_bound_holds(make_cache, digests):
    cache = make_cache(3 * SIZE + SIZE // 2)
    for digest in digests[:3]:
        load(cache, digest)
    assert cache.get(digests[0]) is not None
    load(cache, digests[3])
    assert [cache.get(d) is not None for d in digests[:4]] == [True, False, True, True]
    stats = cache.stats()
    assert (stats.num_adapters, stats.num_bytes, stats.loads, stats.evictions) == (3, 3 * SIZE, 4, 1)


def test_the_bound_holds_while_all_load_at_once(make_cache, digests, monkeypatch):
    cache, seen, read = make_cache(2 * SIZE), [], AdapterReader.read

    def watched(*call):
        """Look while an adapter is being read and once it has been."""
        seen.append(cache.stats().num_bytes)
        adapter = read(*call)
        seen.append(cache.stats().num_bytes)
        return adapter

    monkeypatch.setattr(AdapterReader, "read", watched)
    futures = [cache.fetch(digest) for _ in range(20) for digest in digests]
    assert {future.result(TIMEOUT).digest for future in futures} == set(digests)
    assert 0 < max(seen) <= 2 * SIZE


def test_pinned_adapters_stay_and_a_load_waits_for_their_room(make_cache, digests):
    cache = make_cache(2 * SIZE)
    for digest in digests[:2]:
        load(cache, digest)
        cache.pin(digest)
    cache.pin(digests[0])
    waiting = cache.fetch(digests[2])
    cache.unpin(digests[0])
    assert wait([waiting], 0.3).done == set()
    assert [cache.get(d) is not None for d in digests[:3]] == [True, True, False]
    cache.unpin(digests[0])
    assert waiting.result(TIMEOUT).digest == digests[2]
    assert [cache.get(d) is not None for d in digests[:3]] == [False, True, True]
    with pytest.raises(KeyError):
        cache.unpin(digests[0])


def test_a_pin_before_arrival_counts(make_cache, digests):
    cache = make_cache(2 * SIZE)
    cache.pin(digests[0])
    for digest in digests[:4]:
        load(cache, digest)
    assert cache.get(digests[0]) is not None


def test_one_load_serves_all_who_ask(make_cache, digests, monkeypatch):
    cache, gate, reads = make_cache(), threading.Event(), []
    read = AdapterReader.read

    def slow(self, checkpoint, size):
        reads.append(checkpoint.digest)
        gate.wait(TIMEOUT)
        return read(self, checkpoint, size)

    monkeypatch.setattr(AdapterReader, "read", slow)
    futures: list[Future[HostAdapter]] = []
    threads = [threading.Thread(target=lambda: futures.append(cache.fetch(digests[0]))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, futures))) == 1
    gate.set()
    adapter = futures[0].result(TIMEOUT)
    assert cache.fetch(digests[0]).result(0) is adapter
    assert reads == [digests[0]]


def test_an_adapter_that_was_not_there_is_found_as_soon_as_it_is(make_cache, store, tmp_path):
    cache, folder = make_cache(), write(tmp_path / "late", tensors(seed=9))
    digest = open_checkpoint(folder).digest
    with pytest.raises(AdapterNotFound, match="no adapter with digest"):
        load(cache, digest)
    store.put(folder, BASE)
    assert load(cache, digest).digest == digest
    assert cache.stats().num_bytes == SIZE


def test_a_failed_read_gives_its_room_back(make_cache, digests, monkeypatch):
    cache = make_cache(SIZE)

    def broken(self, checkpoint, size):
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(AdapterReader, "read", broken)
        patch.setattr(failed_loads, "FAILURE_SECONDS", 0.0)
        with pytest.raises(OSError, match="disk on fire"):
            load(cache, digests[0])
    assert cache.stats().num_bytes == 0
    assert load(cache, digests[0]).digest == digests[0]


def test_damage_at_rest_is_noticed(make_cache, store, digests):
    weights = store.path(digests[0]) / "adapter_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    with pytest.raises(AdapterError, match="its files have changed"):
        load(make_cache(), digests[0])


def test_what_can_never_fit_is_refused(make_cache, digests):
    with pytest.raises(AdapterError, match=f"takes {SIZE} bytes of host memory, the limit is {SIZE - 1}"):
        load(make_cache(SIZE - 1), digests[0])


def test_another_bases_adapter_is_refused(make_cache, digests):
    with pytest.raises(AdapterError, match="another model"):
        load(make_cache(base=BaseShape(1, BASE.projections)), digests[0])


def test_values_too_large_for_the_dtype_are_refused(make_cache, store, tmp_path):
    name = key(0, "q_proj", "A")
    large = (torch.full((4, 16), 70000.0)).numpy().tobytes()
    digest = store.put(write(tmp_path / "x", {**tensors(), name: ("F32", [4, 16], large)}), BASE).digest
    assert load(make_cache(), digest).rank == 4
    cache = make_cache(dtype=torch.float16)
    with pytest.raises(AdapterError, match=r"too large for torch\.float16"):
        load(cache, digest)
    assert cache.stats().num_bytes == 0


def test_the_largest_values_of_a_file_are_finite_in_bf16(make_cache, store, tmp_path):
    """The reader therefore checks only conversions to fp16. The store refuses larger values as NaN or infinite."""
    name, almost = key(0, "q_proj", "A"), b"\xff\xff\xff\x7e"
    digest = store.put(write(tmp_path / "x", {**tensors(), name: ("F32", [4, 16], 64 * almost)}), BASE).digest
    adapter = load(make_cache(dtype=torch.bfloat16), digest)
    assert torch.isfinite(adapter.modules[0, "q_proj"].a).all()
    with pytest.raises(AdapterError, match="NaN or infinite"):
        store.put(write(tmp_path / "y", {**tensors(), name: ("F32", [4, 16], 64 * b"\0\0\0\x7f")}), BASE)


def test_a_tenant_with_many_loads_rests_between_them_and_delays_no_other(make_cache, digests, monkeypatch):
    monkeypatch.setattr("adapters.fair_threads.MAX_REST_SECONDS", 60.0)
    cache = make_cache(yielding=Yielding(after_seconds=0.0, nice=0, rest=1e6))
    # Two run at once, and the rest begins with their ends.
    many = [cache.fetch(digest, "many") for digest in digests[:4]]
    wait(many[:2], TIMEOUT)
    assert cache.fetch(digests[4], "few").result(TIMEOUT).digest == digests[4]
    assert [load.done() for load in many] == [True, True, False, False]


def test_folders_are_registered_without_rests(make_cache, tmp_path, monkeypatch):
    """A server registers its folders one after the other at its start, when no request runs."""
    monkeypatch.setattr("adapters.fair_threads.MAX_REST_SECONDS", 1e6)
    cache = make_cache(yielding=Yielding(after_seconds=0.0, nice=0, rest=1e6))
    for seed in range(3):
        folder = write(tmp_path / f"outside{seed}", tensors(seed=seed))
        assert cache.register(str(folder)).result(TIMEOUT) == open_checkpoint(folder).digest


def test_folders_outside_the_store(tmp_path):
    cache = HostCache(None, BASE, 3 * SIZE, torch.float32)
    try:
        folder = write(tmp_path / "x")
        digest = cache.add_path(folder)
        assert load(cache, digest).digest == digest
        cache.drop(digest)
        assert cache.get(digest) is None
        assert cache.stats().num_bytes == 0
        with pytest.raises(AdapterNotFound):
            load(cache, digest)
        assert cache.add_path(str(folder)) == digest
        write(folder, tensors(seed=1))
        with pytest.raises(AdapterError, match="its files have changed"):
            load(cache, digest)
        with pytest.raises(AdapterNotFound):
            cache.add_path(tmp_path / "nothing")
    finally:
        cache.close()


def test_drop_waits_for_the_pins(make_cache, digests):
    cache = make_cache()
    load(cache, digests[0])
    cache.pin(digests[0])
    cache.drop(digests[0])
    assert cache.get(digests[0]) is not None
    cache.unpin(digests[0])
    assert cache.get(digests[0]) is None
    cache.drop("f" * 64)
    assert cache.stats().num_bytes == 0


def test_drop_during_a_load_keeps_nothing(make_cache, digests, monkeypatch):
    cache, gate, begun = make_cache(), threading.Event(), threading.Event()
    read = AdapterReader.read

    def slow(self, checkpoint, size):
        begun.set()
        gate.wait(TIMEOUT)
        return read(self, checkpoint, size)

    monkeypatch.setattr(AdapterReader, "read", slow)
    future = cache.fetch(digests[0])
    assert begun.wait(TIMEOUT)
    cache.drop(digests[0])
    gate.set()
    assert future.result(TIMEOUT).digest == digests[0]
    assert cache.get(digests[0]) is None
    assert cache.stats().num_bytes == 0
    assert load(cache, digests[0]) is cache.get(digests[0])


def test_fetch_returns_at_once(make_cache, digests, monkeypatch):
    read, gate = AdapterReader.read, threading.Event()

    def slow(self, checkpoint, size):
        gate.wait(TIMEOUT)
        return read(self, checkpoint, size)

    monkeypatch.setattr(AdapterReader, "read", slow)
    cache = make_cache()
    futures = [cache.fetch(digest) for digest in digests[:3]]
    assert not any(future.done() for future in futures)
    gate.set()
    assert len(wait(futures, TIMEOUT).done) == 3


def test_close_ends_loads_that_wait(make_cache, digests):
    cache = make_cache(SIZE)
    load(cache, digests[0])
    cache.pin(digests[0])
    waiting = cache.fetch(digests[1])
    deadline = time.monotonic() + TIMEOUT
    while not waiting.running():  # a job that has not begun would be cancelled
        assert time.monotonic() < deadline
        time.sleep(0.002)
    cache.close()
    with pytest.raises(AdapterError, match="shutting down"):
        waiting.result(TIMEOUT)


def test_a_failing_adapter_is_read_once_for_all_who_wait(make_cache, store, digests, monkeypatch):
    weights = store.path(digests[0]) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    cache, opened, really = make_cache(), [], verified_files.open_checkpoint
    monkeypatch.setattr(
        verified_files, "open_checkpoint", lambda folder, known=None: (opened.append(folder), really(folder, known))[1]
    )
    now = [1000.0]
    monkeypatch.setattr(failed_loads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(20):
        with pytest.raises(AdapterError, match="its files have changed"):
            load(cache, digests[0])
    assert len(opened) == 1
    weights.write_bytes(whole)
    with pytest.raises(AdapterError, match="its files have changed"):
        load(cache, digests[0])
    now[0] += failed_loads.FAILURE_SECONDS + 1
    assert load(cache, digests[0]).digest == digests[0]


def test_what_the_device_cannot_place_is_refused_before_it_is_read(make_cache, digests, monkeypatch):
    cache = make_cache()
    cache.refuse_beyond(max_rank=3, max_embedding_head_bytes=0)
    monkeypatch.setattr(AdapterReader, "read", lambda *_: pytest.fail("it was read"))
    for _ in range(2):
        with pytest.raises(AdapterError, match="its rank is 4, the limit is 3"):
            load(cache, digests[0])
