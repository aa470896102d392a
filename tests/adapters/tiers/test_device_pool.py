"""The device tier: pages by rank, pins and eviction."""

import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.manifest import GROUPS, AdapterError, BaseShape
from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from adapters.tiers.device_pool import AdapterPool, Residency
from adapters.tiers.host_cache import HostCache
from adapters.tiers.page_writer import NUM_BUFFERS, PIECE_BYTES, PageWriter
from adapters.tiers.pages import PAGE_RANK, RankPages
from kernels.reference import take
from testing.adapter_files import BASE
from testing.device_pools import Make, wait_for

DEVICE = torch.device("cpu")
ALL = tuple((layer, p) for layer in range(BASE.num_layers) for p in BASE.projections)


def check_pages(pool: AdapterPool, host: HostCache, digest: str, slot: int) -> None:
    """Assert that the pool's pages hold the adapter, and zeros in the rest of its last page."""
    held = host.get(digest)
    assert held is not None
    pages = -(-held.rank // PAGE_RANK)
    assert int(pool.ranks[slot]) == held.rank
    assert (pool.page_table[slot, pages:] == -1).all()
    table = pool.page_table[slot, :pages].long()
    for layer, groups in enumerate(pool.groups):
        for name, group in groups.items():
            for s, projection in enumerate(GROUPS[name]):
                module = held.modules.get((layer, projection))
                if module is None:
                    assert float(group.scales[slot, s]) == 0.0
                    continue
                assert float(group.scales[slot, s]) == pytest.approx(module.scale)
                a = take(group.a_pages, table)[:, s].flatten(0, 1).float()
                b = take(group.b_pages, table).flatten(0, 1)[:, group.offsets[s] : group.offsets[s + 1]].float()
                assert not a[held.rank :].any(), "rows beyond the rank must be zero"
                assert not b[held.rank :].any()
                if group.row_scales is None:
                    assert torch.equal(a[: held.rank], module.a)
                    assert torch.equal(b[: held.rank], module.b.T)
                else:
                    delta = module.b @ module.a
                    scaled = a * group.row_scales[table, s].flatten()[:, None]
                    assert (b.T @ scaled - delta).norm() / delta.norm() < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 16])
def test_an_adapter_takes_pages_by_its_own_rank_and_reads_back(
    make: Make, host: HostCache, adapter: Callable[..., str], rank: int, dtype: torch.dtype
) -> None:
    pool = make(6, dtype=dtype)
    other = adapter(rank=16, seed=9)
    wait_for(pool, other)
    assert pool.evict(other), "its bytes stay behind in the pages"
    digest = adapter(rank=rank, seed=1, modules=tuple(m for m in ALL if m != (1, "k_proj")))
    wait_for(pool, digest)
    assert pool.num_free_pages == 6 - -(-rank // PAGE_RANK)
    check_pages(pool, host, digest, pool.pin(digest))


class LateCopyStream:
    """A device that copies as late as possible: when a caller waits, with the source's content at that moment.

    A step is over when `step_ended` is set; copies queued behind it run no sooner.
    """

    in_place = False

    class Event:
        def __init__(self, copy_stream: "LateCopyStream") -> None:
            self._copy_stream, self._at = copy_stream, len(copy_stream.queue)

        def synchronize(self) -> None:
            self._copy_stream.run_to(self._at)

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.step_ended = threading.Event()
        self.most_in_flight = 0

    def record_event(self) -> Any:
        return self.step_ended

    def wait(self, event: Any) -> None:
        self.queue.append(event.wait)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self.queue.append(lambda: target.copy_(source))
        self.most_in_flight = max(self.most_in_flight, len(self.queue) - self.done)
        return LateCopyStream.Event(self)

    def upload(self, tensor: Tensor) -> Tensor:
        self.run_to(len(self.queue))
        return tensor

    def run_to(self, end: int) -> None:
        while self.done < end:
            self.queue[self.done]()
            self.done += 1


def test_pages_are_written_behind_the_steps_that_read_them_and_read_when_the_last_copy_is_done(
    make: Make, host: HostCache, adapter: Callable[..., str]
) -> None:
    copy_stream = LateCopyStream()
    copy_stream.step_ended.set()
    pool = make(2, copy_stream=copy_stream)
    first, second = adapter(rank=16, seed=1), adapter(rank=16, seed=2)
    wait_for(pool, first)
    slot = pool.pin(first)
    check_pages(pool, host, first, slot)
    copy_stream.step_ended.clear()
    pool.unpin(first)  # its request has ended, but a step launched with it still runs
    try:
        deadline = time.monotonic() + 60
        while pool.resident:
            assert pool.ensure(second) is Residency.LOADING
            assert time.monotonic() < deadline
            pool.poll()
        for _ in range(20):
            assert pool.ensure(second) is Residency.LOADING
            pool.poll()
            check_pages(pool, host, first, slot)
            time.sleep(0.002)
    finally:
        copy_stream.step_ended.set()
    wait_for(pool, second)
    check_pages(pool, host, second, pool.pin(second))
    message = "a step's own upload waits for a piece in flight, not for an adapter"
    assert copy_stream.most_in_flight <= NUM_BUFFERS + 4, message


class CountingCopyStream(LateCopyStream):
    """A late device without a step in progress, which records the bytes of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.step_ended.set()

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self.sizes.append(source.nbytes)
        return super().copy(target, source)


class Write:
    """A write of an adapter of rank 16 on all projections, all as wide as `width`, to the pages 3 and 1."""

    def __init__(self, layers: int, width: int, memory: int) -> None:
        rank = 16
        shape = BaseShape(layers, dict.fromkeys(BASE.projections, (width, width)))
        self.pages = RankPages(shape, memory=memory, max_rank=rank, dtype=torch.bfloat16, device=DEVICE)
        self.copy_stream = CountingCopyStream()
        self._writer = PageWriter(self.pages, GROUPS, self.copy_stream)
        self.modules = {
            (layer, name): LoraModule(torch.randn(rank, width).bfloat16(), torch.randn(width, rank).bfloat16(), 0.5)
            for layer in range(layers)
            for name in BASE.projections
        }
        self._adapter = HostAdapter("a", rank, self.modules, 0)

    def run(self) -> None:
        self._writer.write(self._adapter, 0, [3, 1], self.copy_stream.step_ended)

    def check(self) -> None:
        """Assert that the pages hold the last layer's last projection."""
        last, module = self.pages.groups[-1]["down"], self.modules[len(self.pages.groups) - 1, "down_proj"]
        assert torch.equal(last.a_pages[[3, 1], 0].flatten(0, 1), module.a)
        assert torch.equal(last.b_pages[[3, 1]].flatten(0, 1), module.b.T)

    @property
    def slot_bytes(self) -> list[int]:
        """Return the bytes of each row of the slot's tables."""
        pages = self.pages
        return [row.nbytes for row in (pages.scales[0], pages.page_table[0], pages.ranks[:1])]


def test_a_write_of_an_8b_models_adapter_is_a_copy_a_page_and_little_python() -> None:
    """Rank 16 on 32 layers of 7 projections. Python competes with the step loop for the interpreter: at most 13 calls
    for each of the 448 matrices, 2 to 5 ms in all.
    """
    write = Write(layers=32, width=32, memory=1 << 21)
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        write.run()
    finally:
        sys.setprofile(None)
    assert write.copy_stream.sizes == [write.pages.page_bytes] * 2 + write.slot_bytes
    write.check()
    assert calls < 13 * 2 * len(write.modules)


def test_a_page_larger_than_a_piece_is_copied_in_pieces() -> None:
    """A step's own upload waits for a piece of 4 MiB, and a page of an 8B model has 40."""
    write = Write(layers=2, width=20_000, memory=1 << 26)
    write.run()
    write.check()
    page_bytes = write.pages.page_bytes
    assert page_bytes > 2 * PIECE_BYTES
    assert page_bytes % PIECE_BYTES, "the last piece is smaller"
    pieces = [PIECE_BYTES] * (page_bytes // PIECE_BYTES) + [page_bytes % PIECE_BYTES]
    assert len(pieces) == math.ceil(page_bytes / PIECE_BYTES)
    assert write.copy_stream.sizes == pieces * 2 + write.slot_bytes


@pytest.mark.gpu
def test_pages_on_a_gpu(host: HostCache, adapter: Callable[..., str]) -> None:
    """Pages on a GPU stay correct while adapters take each other's pages and the stream of the steps is busy."""
    device = torch.device("cuda")
    pool = AdapterPool(BASE, host, memory=1 << 20, max_rank=16, dtype=torch.float32, device=device)
    matrix = torch.randn(2048, 2048, device=device)
    for seed in range(12):
        for _ in range(20):
            matrix = (matrix @ matrix).tanh()
        digest = adapter(rank=16, seed=seed)
        wait_for(pool, digest)
        slot = pool.pin(digest)
        held = host.get(digest)
        assert held is not None
        table = pool.page_table[slot, :2].long()
        found = pool.groups[1]["down"].a_pages[table, 0].flatten(0, 1)
        assert torch.equal(found.cpu(), held.modules[1, "down_proj"].a)
        pool.unpin(digest)
        pool.evict(digest)
    pool.close()


def test_the_least_recently_pinned_goes_first_and_a_pinned_one_never(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(2)
    first, second, third = (adapter(seed=seed) for seed in range(3))
    wait_for(pool, first)
    wait_for(pool, second)
    pool.pin(second)
    pool.unpin(second)
    pool.pin(first)
    wait_for(pool, third)
    assert set(pool.resident) == {first, third}
    pool.pin(third)
    assert pool.ensure(second) is Residency.LOADING or pool.ensure(second) is Residency.NO_ROOM
    wait_for(pool, second, Residency.NO_ROOM)
    assert not pool.evict(first)
    pool.unpin(first)
    wait_for(pool, second)
    assert set(pool.resident) == {second, third}
    assert pool.num_evictions == 2


def test_what_cannot_be_loaded_says_why_once_and_can_be_tried_again(make: Make, adapter: Callable[..., str]) -> None:
    large = adapter(rank=32, seed=5)
    pool = make(4, max_rank=16)
    wait_for(pool, "0" * 64, Residency.FAILED)
    assert "0000" in str(pool.error("0" * 64))
    assert pool.ensure("0" * 64) is Residency.LOADING
    wait_for(pool, large, Residency.FAILED)
    error = pool.error(large)
    assert isinstance(error, AdapterError)
    assert "rank is 32, the limit is 16" in str(error)
    assert pool.num_free_pages == 4


def test_a_failure_that_nobody_waits_for_is_not_the_next_requests(
    make: Make, host: HostCache, adapter: Callable[..., str], tmp_path: Path
) -> None:
    pool, digest = make(4), adapter(seed=7)
    (tmp_path / "4-7").rename(tmp_path / "away")
    assert pool.ensure(digest) is Residency.LOADING
    assert host.fetch(digest).exception(60) is not None
    pool.no_longer_wanted(digest)
    pool.poll()
    assert not pool.is_loading
    (tmp_path / "away").rename(tmp_path / "4-7")
    wait_for(pool, digest)
    wait_for(pool, "0" * 64, Residency.FAILED)
    pool.no_longer_wanted("0" * 64)
    assert pool.ensure("0" * 64) is Residency.LOADING


def test_a_pool_too_small_for_one_adapter_is_refused(host: HostCache) -> None:
    with pytest.raises(ValueError, match="adapter_memory"):
        AdapterPool(BASE, host, memory=100, max_rank=16, dtype=torch.float32, device=DEVICE)


def test_a_copy_that_fails_after_its_last_request_left_is_no_later_requests_error(
    make: Make, adapter: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(2)
    digest = adapter(seed=1)
    may_fail = threading.Event()

    def fail(*_: object) -> None:
        may_fail.wait(60)
        raise OSError("the device is gone")

    monkeypatch.setattr(pool._writer, "write", fail)
    while digest not in pool._residents.by_digest:
        pool.ensure(digest)
        pool.poll()
        time.sleep(0.002)
    pool.no_longer_wanted(digest)
    may_fail.set()
    deadline = time.monotonic() + 60
    while digest in pool._residents.by_digest:
        assert time.monotonic() < deadline
        pool.poll()
        time.sleep(0.002)
    monkeypatch.undo()
    wait_for(pool, digest)
