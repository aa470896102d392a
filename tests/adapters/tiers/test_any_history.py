"""The device tier after any sequence of requests: pages are never over-committed, and every wait ends."""

from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from adapters.manifest import AdapterError
from adapters.tiers import device_pool
from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from adapters.tiers.device_pool import AdapterPool, Residency
from adapters.tiers.reservations import PAGE_WAIT_S, Amount
from testing.adapter_files import BASE
from testing.device_pools import Worker

TENANTS, RANKS = "abc", (4, 8, 16, 20, 32, 32)
DIGESTS = [f"{tenant_id}{i}" for tenant_id in TENANTS for i in range(len(RANKS))]
PAGES, STEP_S = 9, 0.1
MISSING = "missing"


class Disk:
    """Host tier whose loads end when `finish` is called; it holds at most two adapters without pins."""

    def __init__(self) -> None:
        self.held: dict[str, HostAdapter] = {}
        self.loads: dict[str, Future[HostAdapter]] = {}

    def refuse_beyond(self, **_: int) -> None: ...

    def keep_reserved(self, _: object) -> None: ...

    def get(self, digest: str) -> HostAdapter | None:
        return self.held.get(digest)

    def fetch(self, digest: str, *_: Any, **__: Any) -> Future[HostAdapter]:
        return self.loads.setdefault(digest, Future())

    def stop_waiting(self, digest: str, _: str, load: Future[HostAdapter]) -> None:
        if self.loads.get(digest) is load:
            del self.loads[digest]

    def finish(self) -> None:
        loads, self.loads = self.loads, {}
        for digest, load in loads.items():
            if digest == MISSING:
                load.set_exception(AdapterError("adapter", f"{digest} failed"))
                continue
            rank = RANKS[int(digest[1:])]
            module = LoraModule(torch.zeros(rank, 16), torch.zeros(16, rank), 1.0)
            self.held[digest] = HostAdapter(digest, rank, {(0, "q_proj"): module}, rank * 128)
            load.set_result(self.held[digest])


class Engine:
    """A minimal scheduler: waiting requests in order, seats, and preemption of requests whose adapters hold pages."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.disk, self.worker = Disk(), Worker()
        options: Any = {"max_rank": 32, "dtype": torch.float32, "device": torch.device("cpu")}
        page_bytes = AdapterPool(BASE, self.disk, memory=1 << 22, **options).page_bytes  # type: ignore[arg-type]
        self.pool = AdapterPool(BASE, self.disk, memory=PAGES * page_bytes, **options)  # type: ignore[arg-type]
        self.pool._copier.shutdown()
        self.pool._copier = self.worker  # type: ignore[assignment]
        self.waiting: list[tuple[int, str]] = []
        self.running: list[tuple[int, str]] = []
        self.since: dict[int, float] = {}
        self.arrivals = 0

    def ask(self, digest: str) -> None:
        self.arrivals += 1
        self.waiting.append((self.arrivals, digest))

    def end(self, request: tuple[int, str]) -> None:
        if request in self.running:
            self.running.remove(request)
            self.pool.unpin(request[1])
        else:
            self.waiting.remove(request)
        if not any(digest == request[1] for _, digest in self.waiting + self.running):
            self.pool.no_longer_wanted(request[1])

    def step(self) -> None:
        self.clock[0] += STEP_S
        self.pool.poll()
        self.check()
        users = [digest for _, digest in reversed(self.running)]
        holders = self.pool.holders_to_preempt((claim, users) for claim in self.pool.claims(()))
        for request in [r for r in self.running if r[1] in holders]:
            self.running.remove(request)
            self.pool.unpin(request[1])
            self.waiting.append(request)
        for request in list(self.waiting):
            arrival, digest = request
            if request not in self.waiting:
                continue  # failed together with another request
            found = self.pool.ensure(digest, digest[0])
            if found is Residency.READY:
                self.pool.pin(digest, digest[0])
                self.waiting.remove(request)
                self.running.append(request)
                self.since[arrival] = self.clock[0]
            elif found is Residency.FAILED:
                assert str(self.pool.error(digest)) == f"adapter: {digest} failed"
                for other in [r for r in self.waiting if r[1] == digest]:
                    self.end(other)
            self.check()

    def check(self) -> None:
        pool = self.pool
        residents = pool._residents.by_digest
        pages = [page for r in residents.values() for page in r.pages]
        assert sorted(pages + pool._residents.free_pages) == list(range(PAGES)), "each page is free or has one owner"
        assert sorted([r.slot for r in residents.values()] + pool._residents.free_slots) == list(range(pool.num_slots))
        pins = Counter(digest for _, digest in self.running)
        assert {d: r.pins for d, r in residents.items() if r.pins} == pins
        held = {"all": Amount(), "pinned": Amount(), "new": Amount(), "asked": Amount()}
        for digest, resident in residents.items():
            is_new = digest in pool._residents.copying or digest in pool._residents.unused
            state = "new" if is_new else "pinned" if resident.pins else "idle"
            assert (digest in pool._residents.idle) == (state == "idle")
            held["all"].add(resident.size)
            if state != "idle":
                held[state].add(resident.size)
            elif resident.asked_in == pool._residents.step:
                held["asked"].add(resident.size)
        assert held == {
            "all": pool._residents.held, "pinned": pool._residents.pinned, "new": pool._residents.new,
            "asked": pool._residents.asked,
        }  # fmt: skip
        wanted = {digest for _, digest in self.waiting + self.running}
        reserved = [r.digest for r in pool._reservations]
        assert set(reserved) <= wanted, "reservations end with their requests"
        assert not set(reserved) & set(residents)
        assert set(pool._residents.unused) <= wanted
        assert len({r.tenant_id for r in pool._reservations}) == len(reserved)
        assert pool._reservations.reserved.pages <= PAGES
        assert set(pool._errors) <= wanted, "an error is never another request's"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(device_pool.time, "monotonic", lambda: now[0])
    return now


ACTION = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([*DIGESTS, MISSING])),
    st.tuples(st.just("end"), st.integers(0, 100)),
    st.tuples(st.just("evict"), st.sampled_from(DIGESTS)),
    st.tuples(st.sampled_from(["loads", "copies", "step", "step", "late"]), st.just(0)),
)


@settings(
    max_examples=150,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(actions=st.lists(ACTION, max_size=120))
def test_pages_are_never_over_committed_and_every_request_is_served(
    clock: list[float], actions: list[tuple[str, Any]]
) -> None:
    engine = Engine(clock)
    for name, value in actions:
        match name:
            case "ask":
                engine.ask(value)
            case "end" if requests := engine.waiting + engine.running:
                engine.end(requests[value % len(requests)])
            case "evict":
                engine.pool.evict(value)
            case "loads":
                engine.disk.finish()
            case "copies":
                engine.worker.finish()
            case "step":
                engine.step()
            case "late":
                clock[0] += PAGE_WAIT_S
        engine.check()
    served: set[int] = set()
    unserved = {arrival for arrival, _ in engine.waiting}
    # Requests that run do not end by themselves: preemption alone lets each of the others run.
    for _ in range(40 * len(engine.waiting) + 40):
        engine.disk.finish()
        engine.worker.finish()
        engine.step()
        served |= {arrival for arrival, _ in engine.running} | (unserved - {a for a, _ in engine.waiting})
        if unserved <= served:
            break
    assert unserved <= served, "a request waits for ever"
    for request in engine.waiting + engine.running:
        engine.end(request)
    engine.disk.finish()
    engine.worker.finish()
    engine.pool.poll()
    engine.check()
    assert len(engine.pool._reservations) == 0
    assert not engine.pool.is_loading
