"""The queue that a load into host memory joins."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from adapters.fair_threads import FairThreads
from adapters.tiers.adapter_reader import AdapterReader
from adapters.tiers.host_cache import HostCache

TIMEOUT = 60


def test_loads_join_their_tenants_queue_with_its_weight(
    host: HostCache, adapter: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load without a tenant joins the queue of the tenant that last requested the digest, with its weight."""
    joined, gate = list[tuple[str, float | None]](), threading.Event()

    def record(name: str) -> None:
        method = getattr(FairThreads, name)

        def recorded(self: FairThreads, tenant_id: str, *args: Any, **options: Any) -> Any:
            joined.append((tenant_id, options["weight"]))
            return method(self, tenant_id, *args, **options)

        monkeypatch.setattr(FairThreads, name, recorded)

    record("submit")
    record("share")
    read = AdapterReader.read

    def slow(self: AdapterReader, *args: Any) -> Any:
        gate.wait(TIMEOUT)
        return read(self, *args)

    monkeypatch.setattr(AdapterReader, "read", slow)
    first, second = adapter(seed=1), adapter(seed=2)
    loads = [host.fetch(first, "heavy", 3.0), host.fetch(first, "light", 0.5)]
    gate.set()
    assert [each.result(TIMEOUT).digest for each in loads] == [first] * 2
    host._evict(first)
    host.fetch(first).result(TIMEOUT)
    host.fetch(second).result(TIMEOUT)
    assert joined == [("heavy", 3.0), ("light", 0.5), ("light", 0.5), ("", None)]
