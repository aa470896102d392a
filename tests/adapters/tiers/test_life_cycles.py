"""Random life cycles of adapters against a model: every page, byte and file ends where it belongs.

The store, its files, the host tier with its threads and the device tier with its copy thread are real.
"""

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapters.checkpoint import WEIGHTS_NAME
from adapters.manifest import AdapterError
from adapters.store import DirectoryStore
from adapters.tiers import failed_loads
from adapters.tiers.adapter_reader import AdapterReader
from adapters.tiers.device_pool import AdapterPool, Residency
from adapters.tiers.host_cache import HostCache
from testing.adapter_files import BASE, CONFIG, tensors, write
from wire.mixtures import Mixture, Term

RANKS = (4, 8, 16, 4, 8)
PAGES, TIMEOUT_S = 3, 60.0
INDEX = st.integers(0, len(RANKS) - 1)


class LifeCycles(RuleBasedStateMachine):
    """Adapters of a store, a folder that is replaced, a mixture, and requests that wait for them or run."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = DirectoryStore(self.folder / "store")
        self.sources = [self.make(f"source {i}", rank, seed=i) for i, rank in enumerate(RANKS)]
        self.digests = [self.store.put(source, BASE).digest for source in self.sources]
        self.stored = set(self.digests)
        self.damaged: set[str] = set()
        self.patches = [mock.patch.object(failed_loads, "FAILURE_SECONDS", 0.0)]
        self.crashes, read = 0, AdapterReader.read

        def read_or_crash(*given):
            if self.crashes:
                self.crashes -= 1
                raise OSError("the disk is gone")
            return read(*given)

        self.patches.append(mock.patch.object(AdapterReader, "read", read_or_crash))
        for patch in self.patches:
            patch.start()
        self.host = HostCache(self.store, BASE, 1 << 18, torch.float32)
        options = {"max_rank": 16, "dtype": torch.float32, "device": torch.device("cpu")}
        page_bytes = AdapterPool(BASE, self.host, memory=1 << 22, **options).page_bytes
        self.pool = AdapterPool(BASE, self.host, memory=PAGES * page_bytes, **options)
        self.mixture = Mixture.of([Term("a", 0.5), Term("b", 2.0)], [self.digests[0], self.digests[3]])
        self.host.add_mixture(self.mixture)
        self.version = 0
        self.replaced = self.host.add_path(self.make("replaced", 4, seed=100))
        self.waiting: list[str] = []
        self.running: list[tuple[str, int]] = []

    def make(self, name: str, rank: int, seed: int) -> Path:
        return write(self.folder / name, tensors(rank=rank, seed=seed), {**CONFIG, "r": rank})

    @rule(index=st.integers(0, len(RANKS) + 1))
    def ask(self, index: int) -> None:
        self.waiting.append([*self.digests, self.mixture.digest, self.replaced][index])

    @rule(index=st.integers(0, 99))
    def end(self, index: int) -> None:
        """End a request in any state, like a client that leaves."""
        if not self.waiting + self.running:
            return
        index %= len(self.waiting) + len(self.running)
        if index < len(self.waiting):
            digest = self.waiting.pop(index)
        else:
            digest, _ = self.running.pop(index - len(self.waiting))
            self.pool.unpin(digest)
        self.leave(digest)

    def leave(self, digest: str) -> None:
        if digest not in self.waiting and not any(digest == running for running, _ in self.running):
            self.pool.no_longer_wanted(digest)

    @rule()
    def step(self) -> None:
        self.pool.poll()
        for digest in list(self.waiting):
            if digest not in self.waiting:
                continue  # failed together with another request
            found = self.pool.ensure(digest, "tenant")
            if found is Residency.READY:
                self.waiting.remove(digest)
                self.running.append((digest, self.pool.pin(digest, "tenant")))
            elif found is Residency.FAILED:
                self.fail(digest, self.pool.error(digest))

    def fail(self, digest: str, error: Exception) -> None:
        needed = {part for part, _ in self.mixture.parts} if digest == self.mixture.digest else {digest}
        is_crash = isinstance(error, OSError)
        assert is_crash or needed & self.damaged or needed - self.stored, f"an intact adapter failed: {error}"
        assert is_crash or isinstance(error, AdapterError)
        self.waiting = [other for other in self.waiting if other != digest]
        self.leave(digest)

    @rule()
    def settle(self) -> None:
        """Run steps until no load and no copy is in flight."""
        deadline = time.monotonic() + TIMEOUT_S
        self.step()
        while self.pool.is_loading or self.host._loads:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.step()
        held = self.host._resident
        assert self.host._num_bytes == sum(adapter.num_bytes for adapter in held.values())
        for digest, resident in self.pool._residents.by_digest.items():
            assert self.pool.slot_digests[resident.slot] == digest
            if digest in held:
                self.check_pages(digest, resident.slot)

    def check_pages(self, digest: str, slot: int) -> None:
        adapter = self.host._resident[digest]
        table = [page for page in self.pool.page_table[slot].tolist() if page >= 0]
        assert table == self.pool._residents.by_digest[digest].pages
        a = self.pool.groups[0]["qkv"].a_pages[table, 0].flatten(0, 1)
        module = adapter.modules[0, "q_proj"]
        assert torch.equal(a[: adapter.rank], module.a)
        assert not a[adapter.rank :].any()

    @rule(index=INDEX)
    def evict(self, index: int) -> None:
        self.pool.evict(self.digests[index])

    @rule(index=INDEX)
    def unload(self, index: int) -> None:
        """Free both tiers, as after the last name of an adapter."""
        self.host.drop(self.digests[index])
        self.pool.evict(self.digests[index])

    @rule()
    def replace(self) -> None:
        """Write other content into a folder whose adapter requests may still use."""
        self.version += 1
        before, self.replaced = self.replaced, self.host.add_path(self.make("replaced", 4, seed=100 + self.version))
        assert before != self.replaced
        self.stored.discard(before)

    @rule()
    def crash_the_next_load(self) -> None:
        self.crashes += 1

    @rule(index=INDEX)
    def damage(self, index: int) -> None:
        digest = self.digests[index]
        if digest in self.stored:
            path = self.store.path(digest)
            if path is not None:  # a load of another damage may have discarded it
                weights = bytearray((path / WEIGHTS_NAME).read_bytes())
                weights[-1] ^= 1
                (path / WEIGHTS_NAME).write_bytes(bytes(weights))
            self.damaged.add(digest)

    @precondition(lambda self: self.damaged)
    @rule()
    def upload_again(self) -> None:
        for digest in self.damaged:
            self.store.discard(digest)
            assert self.store.put(self.sources[self.digests.index(digest)], BASE).digest == digest
        self.settle()  # loads of the damaged files may still be in flight
        for digest in self.damaged:
            if self.store.path(digest) is None:
                self.store.put(self.sources[self.digests.index(digest)], BASE)
        self.damaged.clear()

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        residents = pool._residents.by_digest
        pages = [page for resident in residents.values() for page in resident.pages]
        assert sorted(pages + pool._residents.free_pages) == list(range(PAGES)), "each page is free or has one owner"
        assert sorted([r.slot for r in residents.values()] + pool._residents.free_slots) == list(range(pool.num_slots))
        assert {d: r.pins for d, r in residents.items() if r.pins} == Counter(digest for digest, _ in self.running)
        for digest, slot in self.running:
            assert pool.slot_digests[slot] == digest, "a running request reads its adapter's pages"
        assert self.host._num_bytes <= self.host._max_bytes
        assert set(pool._errors) <= set(self.waiting)
        assert {r.digest for r in pool._reservations} <= set(self.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        try:
            while self.waiting or self.running:
                self.end(0)
            self.settle()
            self.host.remove_mixture(self.mixture.digest)
            for digest in list(self.pool._residents.by_digest):
                assert self.pool.evict(digest)
            for digest in list(self.host._resident):
                self.host.drop(digest)
            pool, host = self.pool, self.host
            assert (pool.num_free_pages, len(pool._reservations)) == (PAGES, 0)
            assert len(pool._residents.free_slots) == pool.num_slots
            assert not any(pool.slot_digests)
            assert not pool._wanted
            assert (host.stats().num_adapters, host.stats().num_bytes) == (0, 0)
            assert not any((host._loads, host._askers, host._dropped, host._pins))
            kept = {path.parent.name for path in self.store.root.rglob(WEIGHTS_NAME)}
            assert set(self.digests) - self.damaged <= kept <= set(self.digests), "files end in the store"
        finally:
            self.pool.close()
            self.host.close()
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.folder)


TestLifeCycles = LifeCycles.TestCase
TestLifeCycles.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
