"""Weights in 8 and 4 bits beside bf16, in one run: memory, decode steps, prompts, and the quality of the answers; then
keys and values in int8 beside bf16, on long contexts.

    python -m benchmarks.quantised [--shape demo|1b] [--rounds 5] [--out docs/perf/FILE.md]
    python -m benchmarks.quantised --only-kv

`demo` is SmolLM2-135M-Instruct, with perplexity and top-1 agreement against fp32 on a fixed text (quantised_text.txt),
also of quantised checkpoints that are written from it: GGUF Q8_0, Q4_0 and Q4_1, GPTQ, AWQ and FP8, each rounded to the
nearest value without calibration. Its weights come from a Q4_1 file (`loraplex.models`), so Q4_1 shows that file's own
loss only where it is rounded again. `1b` has the shape of Llama-3.2-1B and random weights, which fit no cache. All
engines are in this process, and each round measures all of them, so that the machine's changes meet all alike; figures
are medians of the rounds. Run nothing else on the machine at the same time.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.random_models import save_random_model
from benchmarks.report_file import publish
from benchmarks.sweep import make_adapters
from engine.config import DType, EngineConfig, KvCacheDType, Quantization
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.batch import Batch
from kernels.weights import LinearWeights
from loraplex.models import ensure_demo_model
from testing import gguf_files, quantised_files
from testing.engine import decoder_of, outputs_until_idle
from wire.text.tokenizer import Tokenizer

SCHEMES: dict[str, Quantization] = {"bf16": "none", "int8": "int8", "int4": "int4"}
TEXT = Path(__file__).with_name("quantised_text.txt")
CHUNK = 512  # tokens of the text that are predicted from one another
KV_CHUNKS = 8  # chunks of the text with keys and values in int8
NUM_ADAPTERS, RANK, PROMPT = 16, 16, 512
STEPS = 14  # decode steps measured in a round
LONG, LONG_STREAMS = 4000, 4  # tokens of a long prompt, and streams after such prompts
# Checkpoints that are written for the quality table: their quantization_config, and the writer of a matrix.
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], quantised_files.Written]]] = {
    "GPTQ int4": ({"quant_method": "gptq", "bits": 4}, partial(quantised_files.gptq, bits=4, symmetric=True)),
    "AWQ int4": ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, quantised_files.awq),
    "FP8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        partial(quantised_files.fp8, kind="channel"),
    ),
}
# Aims against bf16, by scheme: memory at most, the others at least. Decode steps at c=1 are aims of the 1B shape.
AIMS = {"int8": (0.55, 1.7, 1.0, 0.9), "int4": (0.32, 2.2, 1.0, 0.9)}


@dataclass
class Measured:
    """An engine and its figures. decode, with_adapters, prefill: milliseconds by round."""

    engine: Engine
    host: HostCache
    digests: list[str]
    load_s: float
    decode: list[float] = field(default_factory=list)
    with_adapters: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        model: Path,
        adapters: list[Path],
        quantization: Quantization,
        dtype: DType = "bfloat16",
        kv_dtype: KvCacheDType = "auto",
        base: Path | None = None,
    ) -> "Measured":
        """base: folder with the model's config.json; default: the model."""
        host = HostCache(None, BaseShape.from_config_dir(base or model), 1 << 30, getattr(torch, dtype))
        began = time.perf_counter()
        config = EngineConfig(
            model=str(model), dtype=dtype, quantization=quantization, device="cpu", max_lora_rank=RANK,
            kv_cache_memory=512 << 20, adapter_memory=640 << 20, enable_prefix_caching=False, kv_cache_dtype=kv_dtype,
        )  # fmt: skip
        engine = Engine(config, host)
        return cls(engine, host, [host.add_path(path) for path in adapters], time.perf_counter() - began)

    def weight_bytes(self) -> int:
        """Return the bytes of the weights in memory, each tensor once."""
        w = decoder_of(self.engine).weights
        layers = [getattr(layer, name) for layer in w.layers for name in ("qkv", "o", "gate_up", "down")]
        linears: list[LinearWeights] = [w.embedding, w.lm_head, *layers]
        tensors = {t.data_ptr(): t for linear in linears for t in linear.tensors.values()}
        return sum(t.numel() * t.itemsize for t in tensors.values())

    def run_round(self, vocab_size: int) -> None:
        self.decode.append(self._decode_ms(1, [], vocab_size))
        self.with_adapters.append(self._decode_ms(16, self.digests, vocab_size))
        request = NewRequest("p", _tokens(5, PROMPT, vocab_size), SamplingParams(max_tokens=1, ignore_eos=True))
        self.engine.add_request(request)
        self.prefill.append(1e3 * self.until_idle_s())

    def until_idle_s(self) -> float:
        """Run the added requests and return the seconds."""
        began = time.perf_counter()
        list(outputs_until_idle(self.engine))
        return time.perf_counter() - began

    def _decode_ms(self, streams: int, digests: list[str], vocab_size: int) -> float:
        """Return the median time of a step in which each stream decodes a token."""
        self.start_streams(streams, 32, digests, vocab_size)
        found = statistics.median(self.step_ms() for _ in range(STEPS))
        list(outputs_until_idle(self.engine))
        return found

    def start_streams(self, streams: int, prompt: int, digests: list[str], vocab_size: int, steps: int = STEPS) -> None:
        """Run steps until each of the streams decodes. They end after `steps` more."""
        params = SamplingParams(max_tokens=steps + 6, temperature=0, ignore_eos=True)
        for i in range(streams):
            digest = digests[i % len(digests)] if digests else None
            self.engine.add_request(NewRequest(str(i), _tokens(i, prompt, vocab_size), params, adapter_digest=digest))
        while not all(request.is_decoding for request in self.engine.scheduler.requests.values()):
            self.engine.step()
            if self.engine.is_waiting_for_adapters:
                time.sleep(0.001)

    def step_ms(self) -> float:
        began = time.perf_counter()
        self.engine.step()
        return 1e3 * (time.perf_counter() - began)

    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits at each position of the text, in chunks that do not see one another."""
        seen: list[Tensor] = []
        decoder = decoder_of(self.engine)
        forward = decoder.forward

        def keep(batch: Batch) -> Tensor:
            seen.append(forward(batch).clone())
            return seen[-1]

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        with patch.object(decoder, "forward", keep):
            for first in range(0, len(token_ids), CHUNK):
                self.engine.add_request(NewRequest("x", token_ids[first : first + CHUNK], params))
                list(outputs_until_idle(self.engine))
        return torch.cat(seen)

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def _tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    return [(31 * seed + 7919 * j) % (vocab_size - 100) + 50 for j in range(count)]


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    """Return the perplexity of the tokens after each chunk's first."""
    losses = []
    for first in range(0, len(token_ids), CHUNK):
        following = torch.tensor(token_ids[first + 1 : first + CHUNK])
        found = logits[first : first + len(following)].log_softmax(-1)
        losses.append(-found.gather(1, following[:, None])[:, 0])
    return float(torch.cat(losses).mean().exp())


def save_checkpoints(model: Path, scratch: Path) -> dict[str, Path]:
    """Write the model's matrices in the forms of quantised checkpoints. Return the paths by name."""
    weights = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    plain = scratch / "fp32"
    plain.mkdir()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text((model / "config.json").read_text())
    found: dict[str, Path] = {}
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1):
        found[f"GGUF {kind.name}"] = gguf_files.write(plain, scratch / f"{kind.name}.gguf", kind)
    for name, (config, quantise) in CHECKPOINTS.items():
        quantised_files.write(plain, scratch / name.replace(" ", "-"), config, quantise)
        found[name] = scratch / name.replace(" ", "-")
    return found


def quality_table(model: Path, scratch: Path) -> list[str]:
    """Return a table of each scheme's perplexity, and its agreement with fp32 weights, inputs and sums."""
    ids = Tokenizer.from_dir(model).encode(TEXT.read_text())
    ids = ids[: len(ids) // CHUNK * CHUNK]
    lines = ["| weights | dtype | perplexity | most likely token as in fp32 | KL divergence from fp32 |"]
    lines.append("|---|---|---|---|---|")
    expected: Tensor | None = None
    rows: list[tuple[str, Path, Quantization]] = []
    rows += [("unquantised" if kind == "none" else kind, model, kind) for kind in SCHEMES.values()]
    rows += [(name, path, "auto") for name, path in save_checkpoints(model, scratch).items()]
    for shown, path, quantization in rows:
        for dtype in ("float32", "bfloat16"):
            measured = Measured.start(path, [], quantization, dtype, base=model)
            logits = measured.logits(ids)
            measured.close()
            expected = logits if expected is None else expected
            same = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
            target = expected.log_softmax(-1)
            divergence = (target.exp() * (target - logits.log_softmax(-1))).sum(-1).mean()
            lines.append(f"| {shown} | {dtype} | {perplexity(logits, ids):.2f} | {same:.1%} | {divergence:.4f} |")
            print(lines[-1], flush=True)
    return [*lines, "", f"{len(ids)} tokens in chunks of {CHUNK}.", ""]


def kv_table(model: Path, rounds: int) -> list[str]:
    """Return a table of keys and values in bf16 and int8. The engines' steps take turns."""
    ids = Tokenizer.from_dir(model).encode(TEXT.read_text())[: KV_CHUNKS * CHUNK]
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    engines = {name: Measured.start(model, [], "none", kv_dtype=name) for name in ("auto", "int8")}
    shown = [f"{perplexity(measured.logits(ids), ids):.2f}" for measured in engines.values()]
    prompts = []
    for measured in engines.values():
        began = time.perf_counter()
        # Streams get ahead of each other while later prompts are processed.
        measured.start_streams(LONG_STREAMS, LONG, [], vocab_size, steps=(rounds + 1) * STEPS + 400)
        prompts.append(LONG * LONG_STREAMS / (time.perf_counter() - began))
    for number in range(rounds + 1):
        for measured in engines.values():
            found = statistics.median(measured.step_ms() for _ in range(STEPS))
            if number:  # the first round touches memory for the first time
                measured.decode.append(found)
    dense = engines["auto"]
    lines = [
        f"| keys and values | tokens in 512 MiB | prompts of {LONG}, tokens/s "
        f"| {LONG_STREAMS} streams after them, tokens/s | of bf16 | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    for (name, m), rate, quality in zip(engines.items(), prompts, shown, strict=True):
        state = m.engine.state()
        cells = [f"{state.num_blocks * m.engine.config.block_size}", f"{rate:.0f}"]
        cells += [f"{LONG_STREAMS * 1e3 / statistics.median(m.decode):.0f}", f"{_gain(dense.decode, m.decode):.2f}"]
        lines.append(f"| {'bf16' if name == 'auto' else name} | {' | '.join(cells)} | {quality} |")
        print(lines[-1], flush=True)
        m.close()
    return lines


def speed_table(model: Path, scratch: Path, rounds: int, is_1b: bool) -> list[str]:
    base = BaseShape.from_config_dir(model)
    adapters = make_adapters(base, scratch, NUM_ADAPTERS, RANK)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    engines = {}
    for name, quantization in SCHEMES.items():
        engines[name] = Measured.start(model, adapters, quantization)
        gc.collect()
        print(f"{name}: loaded in {engines[name].load_s:.1f} s", flush=True)
    for number in range(rounds + 1):
        for measured in engines.values():
            measured.run_round(vocab_size)
            if number == 0:  # the first round touches memory for the first time
                for times in (measured.decode, measured.with_adapters, measured.prefill):
                    times.clear()
    lines = [
        "| weights | MiB | of bf16 | c=1, tokens/s | of bf16 | c=16, 16 adapters, tokens/s | of bf16 "
        "| prompt of 512, tokens/s | of bf16 | load, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    dense = engines["bf16"]
    for name, m in engines.items():
        memory = m.weight_bytes() / dense.weight_bytes()
        gains = [_gain(dense.decode, m.decode), _gain(dense.with_adapters, m.with_adapters)]
        gains.append(_gain(dense.prefill, m.prefill))
        rates = [f / statistics.median(t) for f, t in ((1e3, m.decode), (16e3, m.with_adapters), (512e3, m.prefill))]
        cells = [f"{m.weight_bytes() / 2**20:.0f}", f"{memory:.2f}"]
        cells += [cell for rate, gain in zip(rates, gains, strict=True) for cell in (f"{rate:.0f}", f"{gain:.2f}")]
        lines.append(f"| {name} | {' | '.join(cells)} | {m.load_s:.1f} |")
        print(lines[-1], flush=True)
        if name in AIMS:
            missed = _missed(name, memory, gains, is_1b)
            print(f"{name}: {'every aim reached' if not missed else 'missed: ' + ', '.join(missed)}", flush=True)
        m.close()
    return lines


def _gain(dense: list[float], quantised: list[float]) -> float:
    """Return how many times as fast: the median over rounds, each of which compares within itself."""
    return statistics.median(d / q for d, q in zip(dense, quantised, strict=True))


def _missed(name: str, memory: float, gains: list[float], is_1b: bool) -> list[str]:
    most, *least = AIMS[name]
    missed = [f"memory {memory:.2f} (aim {most})"] if memory > most else []
    for what, gain, aim in zip(("c=1", "c=16", "prompt"), gains, least, strict=True):
        if gain < aim and (is_1b or what != "c=1"):
            missed.append(f"{what} {gain:.2f} (aim {aim})")
    return missed


@contextmanager
def chosen_model(shape: str, data_dir: Path, scratch: Path) -> Iterator[Path]:
    if shape == "demo":
        yield ensure_demo_model(data_dir)
        return
    folder = scratch / "model"
    folder.mkdir()
    yield save_random_model(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("demo", "1b"), default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-kv", action="store_true", help="only keys and values in int8, on SmolLM2-135M-Instruct")
    parser.add_argument("--data-dir", type=Path, default=Path(".loraplex/models"))
    parser.add_argument("--out", type=Path, help="also append the tables here, as Markdown")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, chosen_model(args.shape, args.data_dir, Path(scratch)) as model:
        title = "SmolLM2-135M-Instruct" if args.shape == "demo" else "Llama-3.2-1B's shape, random weights"
        lines = [f"## {title}, {date.today()}, {os.cpu_count()} cores", ""]
        if not args.only_kv:
            lines += [*speed_table(model, Path(scratch), args.rounds, args.shape == "1b"), ""]
        if args.shape == "demo":
            if not args.only_kv:
                lines += quality_table(model, Path(scratch))
            lines += kv_table(model, args.rounds)
    publish(lines, args.out)


if __name__ == "__main__":
    main()
