"""Host tier: the content of a file is hashed at its first load, and again after it changed."""

import os

import pytest
import torch

from adapters import checkpoint
from adapters.manifest import AdapterError
from adapters.store import DirectoryStore
from adapters.tiers import failed_loads
from adapters.tiers.host_cache import HostCache
from testing.adapter_files import BASE, tensors, write


def test_a_digest_is_verified_once_and_again_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(failed_loads, "FAILURE_SECONDS", 0.0)
    store = DirectoryStore(tmp_path / "store")
    digest = store.put(write(tmp_path / "x", tensors()), BASE).digest
    hashed, really = [], checkpoint._digest
    monkeypatch.setattr(checkpoint, "_digest", lambda *given: (hashed.append(digest), really(*given))[1])
    cache = HostCache(store, BASE, 1 << 24, torch.float32)
    try:
        for _ in range(3):
            assert cache.fetch(digest).result(20).digest == digest
            cache.drop(digest)
        assert len(hashed) == 1
        weights = store.path(digest) / "adapter_model.safetensors"
        found, raw = weights.stat(), bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(bytes(raw))
        os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))  # the change shows in the ctime
        with pytest.raises(AdapterError, match="its files have changed"):
            cache.fetch(digest).result(20)
        assert len(hashed) == 2
    finally:
        cache.close()
