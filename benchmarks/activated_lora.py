"""Time to first token of activated LoRAs after a base turn, against plain LoRAs, on the engine in one process.

    python -m benchmarks.activated_lora

A base request has computed a context of 2,000 tokens. Then five adapters answer on the same context, one after the
other: as plain LoRAs, which compute it anew, and as activated LoRAs, which find the base model's blocks.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.sweep import make_adapters
from engine.answering.activation import adapter_start
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from loraplex.models import ensure_demo_model

CONTEXT, ADAPTERS, RANK = 2000, 5, 16
INVOCATION = [11, 12, 13, 14]


def first_token_ms(engine: Engine, prompt: list[int], digest: str | None, start: int) -> float:
    """Return the time to first token of one request, with its adapter on the device."""
    while digest is not None and not engine.adapter_ready(digest):
        engine.adapters.poll()
        engine.adapters.ensure(digest)
        time.sleep(0.001)
    began = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0)
    engine.add_request(NewRequest("r", prompt, params, adapter_digest=digest, adapter_start=start))
    while not any(output.token_ids for output in engine.step()):
        pass
    ms = 1e3 * (time.perf_counter() - began)
    while engine.has_work():
        engine.step()
    return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model, fetched if need be")
    parser.add_argument("--data-dir", type=Path, default=Path(".loraplex"))
    args = parser.parse_args()
    model = args.model or ensure_demo_model(args.data_dir)
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 30, torch.bfloat16)
    config = EngineConfig(model=str(model), dtype="bfloat16", kv_cache_memory=1 << 30, adapter_memory=256 << 20)
    engine = Engine(config, host)
    generator = torch.Generator().manual_seed(1)
    context = torch.randint(1000, 40000, (CONTEXT,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        plain = make_adapters(BaseShape.from_config_dir(model), Path(scratch), 2 * ADAPTERS, RANK)
        for folder in plain[ADAPTERS:]:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"alora_invocation_tokens": INVOCATION}))
        digests = [host.add_path(path) for path in plain]
        first_token_ms(engine, context[::-1], digests[0], 0)  # warm-up
        base = first_token_ms(engine, context, None, 0)
        prompt = [*context, *INVOCATION]
        times = [
            [first_token_ms(engine, prompt, digest, start) for digest in chosen]
            for chosen, start in ((digests[:ADAPTERS], 0), (digests[ADAPTERS:], adapter_start(prompt, INVOCATION)))
        ]
    print(f"base turn over {CONTEXT} tokens: {base:.0f} ms")
    for name, found in zip(("plain LoRA", "activated LoRA"), times, strict=True):
        print(f"{name}: median {statistics.median(found):.1f} ms, all {', '.join(f'{ms:.1f}' for ms in found)}")
    ratio = max(times[1]) / min(times[0])
    print(f"slowest activated / fastest plain: {ratio:.3f}, the limit is 0.15")
    engine.close()
    host.close()


if __name__ == "__main__":
    main()
