"""Cost of a step on this machine as the batch, the context and the number of adapters grow. Prints tables.

    python -m benchmarks.sweep [--model DIR] [--out docs/perf/FILE.md]  # and the chart beside it, FILE.svg

Measures three things: how far each decode step is from the machine's floor (one read of the weights and the keys and
values at the bandwidth measured here, or the multiplications at the rate measured here, whichever takes longer);
whether adapters that are registered but not used cost anything; and the effect of a long prompt on the streams beside
it. The engine runs in this process, without a server. Run nothing else on the machine at the same time.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import save_file

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.plot import Points, line_chart
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.plan import Plan
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.memory import lazy_zeros
from loraplex.models import ensure_demo_model
from testing.engine import decoder_of

STEPS = 14  # the first two are not counted
MAX_TOKENS = 64 * 4096


def bandwidth() -> float:
    """Return bytes per second of reads: the sum of a tensor much larger than the caches, on huge pages like weights."""
    x = lazy_zeros((32 << 20,), torch.int64, huge_pages=True).fill_(1)
    return max(x.numel() * 8 / _seconds(x.sum) for _ in range(5))


def multiply_rate() -> float:
    """Return bf16 operations per second of a large product through oneDNN."""
    a, b = torch.randn(1024, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    return max(2 * 1024 * 2048 * 2048 / _seconds(lambda: a @ b) for _ in range(10))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def make_adapters(base: BaseShape, folder: Path, n: int, rank: int) -> list[Path]:
    """Write n random adapters on all seven projections, as PEFT does, each with one unique tensor."""
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(base.num_layers):
        for projection, (out_features, in_features) in base.projections.items():
            block = "self_attn" if projection[0] in "qkvo" else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_"
            tensors[key + "A.weight"] = (torch.randn(rank, in_features, generator=generator) * 0.01).bfloat16()
            tensors[key + "B.weight"] = (torch.randn(out_features, rank, generator=generator) * 0.01).bfloat16()
    own = next(iter(tensors))
    paths = []
    for i in range(n):
        tensors[own] = (torch.randn(tensors[own].shape, generator=generator) * 0.01).bfloat16()
        path = folder / f"r{rank}-{i}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        targets = ", ".join(f'"{p}"' for p in base.projections)
        (path / "adapter_config.json").write_text(
            f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}, "target_modules": [{targets}]}}'
        )
        paths.append(path)
    return paths


class Bench:
    """An engine in this process."""

    def __init__(self, model: Path, host: HostCache, memory: int = 8 << 30) -> None:
        """memory: bytes of keys and values, four times those of adapters."""
        config = EngineConfig(
            model=str(model), dtype="bfloat16", max_num_seqs=128, max_num_batched_tokens=MAX_TOKENS,
            kv_cache_memory=memory, adapter_memory=memory // 4, enable_prefix_caching=False,
        )  # fmt: skip
        self.engine = Engine(config, host)
        for kv in decoder_of(self.engine).kv:
            for cache in (kv.k, kv.v):  # otherwise every block is the kernel's one shared page of zeros
                cache.copy_(torch.randn(cache.shape[1:]) * 0.1)

    def decode_ms(self, batch: int, context: int, adapters: list[str]) -> float:
        """Return the median time of a decode step of `batch` requests with `context` tokens before them.

        The prompts' keys and values are marked as computed: 64 prompts of 4,096 tokens would take minutes.
        """
        engine = self.engine
        for digest in set(adapters[:batch]):
            engine.add_request(NewRequest(digest, [10], SamplingParams(max_tokens=1), adapter_digest=digest))
        while engine.has_work():
            engine.step()
            if engine.is_waiting_for_adapters:
                time.sleep(0.01)
        for i in range(batch):
            adapter = adapters[i % len(adapters)] if adapters else None
            prompt = [(31 * i + 7 * j) % 40000 + 10 for j in range(context)]
            params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
            engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=adapter))
        scheduler = engine.scheduler
        while not len(scheduler.running) == batch == sum(r.is_decoding for r in scheduler.running):
            plan = Plan((r, n) for r, n in scheduler.schedule().items() if not r.is_decoding)
            scheduler.advance(plan)
            scheduler.commit(dict.fromkeys(plan, 10))
        times = [_seconds(engine.step) for _ in range(STEPS)]
        for i in range(batch):
            engine.abort(str(i))
        return 1e3 * statistics.median(times[2:])

    def stall(self, streams: int, prompt: int) -> tuple[float, float]:
        """Return the p99 of the streams' inter-token times in ms: without and during the prefill of a prompt.

        Both cover the same token positions, because a longer context makes steps longer too.
        """
        disturbed = self._inter_token_seconds(streams, [(7 * j) % 40000 + 10 for j in range(prompt)], 0)
        calm = self._inter_token_seconds(streams, [], len(disturbed))
        return 1e3 * _p99(calm), 1e3 * _p99(disturbed)

    def _inter_token_seconds(self, streams: int, prompt: list[int], steps: int) -> list[float]:
        """Return the inter-token times until the prompt is computed, or for this many steps."""
        engine, params = self.engine, SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
        for i in range(streams):
            engine.add_request(NewRequest(str(i), [i + 10] * 32, params))
        for _ in range(150):
            engine.step()
        if prompt:
            engine.add_request(NewRequest("long", prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)))
        times: list[float] = []
        while "long" in engine.scheduler.requests or len(times) < steps:
            times.append(_seconds(engine.step))
        for i in range(streams):
            engine.abort(str(i))
        return times


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def floor_ms(bench: Bench, batch: int, context: int, read: float, rate: float) -> float:
    c = bench.engine.model_config
    w = decoder_of(bench.engine).weights
    matrices = sum(p.in_features * p.out_features for x in w.layers for p in (x.qkv, x.o, x.gate_up, x.down))
    matrices += w.lm_head.in_features * w.lm_head.out_features
    memory = (2 * matrices + 2 * c.kv_elements_per_token * batch * context) / read
    return 1e3 * max(memory, 2 * matrices * batch / rate)


def header(read: float, rate: float) -> str:
    """Return the title, the machine and the definition of the floor."""
    return (
        "# Cost of a decode step on a CPU\n\n"
        f"{date.today()}, {os.cpu_count()} cores, torch {torch.__version__}, SmolLM2-135M-Instruct in bf16, "
        f"`python -m benchmarks.sweep`. Measured in the same run: {read / 1e9:.0f} GB/s of reading, "
        f"{rate / 1e9:.0f} GFLOP/s of bf16 products. Floor: the longer of reading weights, keys and values once and of "
        "multiplying them, at those rates.\n"
    )


def decode_table(bench: Bench, digests: list[str], read: float, rate: float) -> tuple[list[str], dict[str, Points]]:
    """Measure decode steps by batch and context, and return the table's lines and the chart's curves."""
    lines = [
        "| batch | context | base, ms | floor, ms | share of floor | 16 adapters of rank 8, ms | base / adapters |",
        "|---|---|---|---|---|---|---|",
    ]
    curves: dict[str, Points] = {}
    for batch in (1, 4, 8, 16, 32, 64):
        for context in (64, 512, 2048, 4096):
            plain = bench.decode_ms(batch, context, [])
            floor = floor_ms(bench, batch, context, read, rate)
            lora = bench.decode_ms(batch, context, digests)
            lines.append(
                f"| {batch} | {context} | {plain:.1f} | {floor:.1f} | {floor / plain:.2f} | {lora:.1f} "
                f"| {plain / lora:.2f} |"
            )
            print(lines[-1], flush=True)
            curves.setdefault(f"context {context}", []).append((batch, plain))
            if context == 64:
                curves.setdefault("context 64, 16 adapters", []).append((batch, lora))
            if context in (64, 4096):
                curves.setdefault(f"context {context} (floor)", []).append((batch, floor))
    return lines, curves


def distinct_table(bench: Bench, digests: list[str]) -> list[str]:
    """Measure decode steps of one batch by the number of distinct adapters in it, and return the table's lines."""
    lines = ["\n| adapters of rank 8 asked, batch 128, context 32 | ms a step |", "|---|---|"]
    for n in (1, 16, 64, 128):
        lines.append(f"| {n} | {bench.decode_ms(128, 32, digests[:n]):.1f} |")
        print(lines[-1], flush=True)
    return lines


def stall_table(bench: Bench) -> list[str]:
    """Measure the effect of a long prompt on the streams beside it, and return the table's lines."""
    calm, disturbed = bench.stall(8, 4000)
    return [
        "\n| 8 streams, inter-token p99 | ms |",
        "|---|---|",
        f"| alone | {calm:.1f} |",
        f"| during the prefill of a prompt of 4,000 tokens | {disturbed:.1f} ({disturbed / calm:.2f}x) |",
    ]


def measure(model: Path) -> tuple[list[str], dict[str, Points]]:
    """Measure everything, and return the report's lines and the chart's curves."""
    base = BaseShape.from_config_dir(model)
    read, rate = bandwidth(), multiply_rate()
    host = HostCache(None, base, 6 << 30, torch.bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        every = make_adapters(base, Path(scratch), 128, 8)
        digests = [host.add_path(p) for p in every[:16]]
        bench = Bench(model, host)
        registered = [f"| {len(digests)} | {bench.decode_ms(16, 64, digests):.1f} |"]
        table, curves = decode_table(bench, digests, read, rate)
        every += make_adapters(base, Path(scratch), 1000 - len(every), 1)
        digests += [host.add_path(p) for p in every[16:]]
        registered.append(f"| {len(digests)} | {bench.decode_ms(16, 64, digests[:16]):.1f} |")
        lines = [header(read, rate), *table]
        lines += ["\n| adapters registered, 16 asked, batch 16, context 64 | ms a step |", "|---|---|", *registered]
        lines += distinct_table(bench, digests)
        lines += stall_table(bench)
        bench.engine.close()
    host.close()
    return lines, curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model, fetched if need be")
    parser.add_argument("--data-dir", type=Path, default=Path(".loraplex"))
    parser.add_argument("--out", type=Path, help="also write the tables here, as Markdown")
    args = parser.parse_args()
    lines, curves = measure(args.model or ensure_demo_model(args.data_dir))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        line_chart(
            args.out.with_suffix(".svg"), f"A decode step on {os.cpu_count()} CPU cores", "requests", "ms", curves
        )


if __name__ == "__main__":
    main()
