"""Time until an adapter is in host memory: from memory, from a directory, from an S3 store's local copy, from S3.

    python -m benchmarks.s3_cold_start [--rounds 20]

The S3 server is SeaweedFS on this machine, so a round trip takes no network time. The adapter has rank 16 on all
projections of SmolLM2-135M. It needs three round trips: the config, the weights' first 8 MiB, and the further ranges
together (at most four at a time).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from adapters.manifest import BaseShape
from adapters.open_store import open_store
from adapters.store import DirectoryStore, put
from adapters.tiers.host_cache import HostCache
from testing.adapter_files import tensors, write
from testing.s3_server import s3_server

SMOLLM2_135M = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
}
RANK = 16


def measure(rounds: int, prepare: Callable[[], object], load: Callable[[], object]) -> str:
    times = []
    for _ in range(rounds):
        prepare()
        begun = time.perf_counter()
        load()
        times.append((time.perf_counter() - begun) * 1000)
    return f"p50 {statistics.median(times):7.1f} ms   p99 {sorted(times)[int(0.99 * (rounds - 1))]:7.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    base = BaseShape.from_config(SMOLLM2_135M)
    with tempfile.TemporaryDirectory() as text, s3_server(Path(text) / "s3") as server:
        folder = Path(text)
        os.environ.update(server.environment)
        modules = tuple((layer, name) for layer in range(base.num_layers) for name in base.projections)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": list(base.projections)}
        write(folder / "a", tensors(modules, RANK, base=base), config)
        directory = DirectoryStore(folder / "store")
        remote = open_store(server.url("cold"), folder / "copies", 1 << 32)
        digest = put(directory, folder / "a", base).digest
        put(remote, folder / "a", base)
        size = sum(file.stat().st_size for file in directory.folder(digest).iterdir())
        print(f"adapter of {size / 1e6:.1f} MB, rank {RANK}, {len(modules)} modules, {rounds} rounds each")
        for name, store in (("directory", directory), ("S3", remote)):
            cache = HostCache(store, base, 1 << 32, torch.float32)
            cache.fetch(digest).result(60)
            copies = folder / "copies" / digest[:2]

            def fetch(cache: HostCache = cache) -> None:
                cache.fetch(digest).result(60)

            def away(cache: HostCache = cache) -> None:
                cache.drop(digest)

            def away_with_copy(cache: HostCache = cache, copies: Path = copies) -> None:
                cache.drop(digest)
                shutil.rmtree(copies, ignore_errors=True)

            print(f"{name:10} in host memory      {measure(rounds, lambda: None, fetch)}")
            print(f"{name:10} from disk, verified {measure(rounds, away, fetch)}")
            if name == "S3":
                print(f"{name:10} from the service    {measure(rounds, away_with_copy, fetch)}")
            cache.close()
        remote.close()


if __name__ == "__main__":
    main()
