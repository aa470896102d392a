"""The engine beside transformers and peft on the same weights: equal answers, speed-up, and effect of adapter loads."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.gpu.decode import floor_ms
from benchmarks.gpu.files import write_adapter, write_model
from benchmarks.gpu.machine import Machine
from benchmarks.kernels.measure import asked
from engine.config import DType, EngineConfig
from engine.engine import Engine
from engine.model.families import parse_model_config
from engine.scheduling.request import NewRequest, SamplingParams

PROMPT_TOKENS = 32
RANK = 16
DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder, in memory if the system has /dev/shm: a model of 16 GB is written, and read three times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def running(
    machine: Machine, model: Path, dtype: torch.dtype, max_rank: int, *, prefix_caching: bool = False
) -> Iterator[tuple[Engine, HostCache]]:
    host = HostCache(None, BaseShape.from_config_dir(model), 32 << 30, dtype)
    engine = Engine(engine_config(machine, model, dtype, max_rank, prefix_caching=prefix_caching), host)
    try:
        yield engine, host
    finally:
        engine.close()
        host.close()


def engine_config(
    machine: Machine, model: Path, dtype: torch.dtype, max_rank: int, *, prefix_caching: bool
) -> EngineConfig:
    """Return the configuration of the engines. A GPU's memory holds all streams of a measurement at the same time, and
    their adapters.
    """
    is_card = machine.device.type == "cuda"
    return EngineConfig(
        model=str(model),
        dtype=DTYPES[dtype],
        device=machine.device.type,
        max_num_seqs=max(machine.engine_batches) + 8,
        max_num_batched_tokens=machine.step_tokens,
        kv_cache_memory=(12 << 30) if is_card else (64 << 20),
        adapter_memory=(12 << 30) if is_card else (64 << 20),
        max_lora_rank=max_rank,
        enable_prefix_caching=prefix_caching,
    )


def prompt(i: int, vocab_size: int) -> list[int]:
    return [(31 * i + 7 * j) % (vocab_size - 2) + 2 for j in range(PROMPT_TOKENS)]


def same_answers(machine: Machine) -> Iterator[str]:
    """Compare greedy answers of a base request and adapters of several ranks in one batch, on a small random model.

    peft scores the engine's own tokens, so a near tie that falls the other way is no error and does not end the
    comparison.
    """
    import peft
    from transformers import AutoModelForCausalLM

    ranks = (4, 16, 64)
    yield "| dtype | tokens | equal to peft's choice | largest difference of a log-probability | verdict |"
    yield "|---|---|---|---|---|"
    found = []
    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 0.3)):
        with scratch() as folder:
            model = write_model(machine.small_model, folder / "model", dtype, machine.device)
            paths = [
                write_adapter(machine.small_model, folder / f"r{rank}", rank, dtype, machine.device, rank)
                for rank in ranks
            ]
            vocab_size = machine.small_model["vocab_size"]
            with running(machine, model, dtype, max(ranks)) as (engine, host):
                digests = [None, *(host.add_path(path) for path in paths)]
                params = SamplingParams(max_tokens=machine.new_tokens, temperature=0, ignore_eos=True, logprobs=0)
                for i, digest in enumerate(digests):
                    engine.add_request(NewRequest(str(i), prompt(i, vocab_size), params, adapter_digest=digest))
                answers: dict[str, list[tuple[int, float]]] = {str(i): [] for i in range(len(digests))}
                while engine.has_work():
                    for out in engine.step():
                        logprobs = out.logprobs or []
                        answers[out.request_id] += [(entry.token_id, entry.logprob) for entry in logprobs]
            base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(machine.device)
            tuned = peft.PeftModel.from_pretrained(base, paths[0], adapter_name="a0")
            for number, path in enumerate(paths[1:], 1):
                tuned.load_adapter(path, adapter_name=f"a{number}", low_cpu_mem_usage=True)
            equal, apart, behind, total = 0, 0.0, 0.0, 0
            for i in range(len(digests)):
                chosen = [token for token, _ in answers[str(i)]]
                ids = torch.tensor([prompt(i, vocab_size) + chosen], device=machine.device)
                names = ["__base__" if i == 0 else f"a{i - 1}"]
                with torch.inference_mode():
                    scores = tuned(ids, adapter_names=names).logits[0, PROMPT_TOKENS - 1 : -1].float()
                logprobs = scores.log_softmax(-1).cpu()
                for row, (token, logprob) in zip(logprobs, answers[str(i)], strict=True):
                    equal += int(row.argmax()) == token
                    apart = max(apart, abs(float(row[token]) - logprob))
                    behind = max(behind, float(row.max() - row[token]))
                    total += 1
            verdict = "as peft" if max(apart, behind) < tolerance else "DIFFERENT"
            yield f"| {dtype} | {total} | {equal / total:.1%} | {apart:.4f} | {verdict} (tolerance {tolerance}) |"
            found.append(asked(f"log-probabilities apart from peft's in {dtype}", max(apart, behind), most=tolerance))
    yield from ["", *found]


def speed(machine: Machine) -> Iterator[str]:
    """Measure tokens per second beside transformers and peft, then the inter-token times while adapters are loaded."""
    raw = machine.model
    with scratch() as folder:
        model = write_model(raw, folder / "model", machine.dtype, machine.device)
        count = machine.engine_adapters
        paths = [
            write_adapter(raw, folder / f"a{i}", RANK, machine.dtype, machine.device, i)
            for i in range(count + machine.disturbances)
        ]
        ours = {}
        with running(machine, model, machine.dtype, RANK) as (engine, host):
            digests = [host.add_path(path) for path in paths[:count]]
            for size in machine.engine_batches:
                ours[size] = decode_rate(engine, machine, [digests[i % count] for i in range(size)])
                floor = floor_of(machine, engine, size, min(size, count), machine.new_tokens)
                share = ours[size] * floor / (1000 * size)
                yield f"ours, {size} requests: {ours[size]:.0f} tokens/s, {share:.0%} of the floor"
            yield ""
            yield from disturbance(engine, host, machine, paths[count:])
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
        yield ""
        yield f"| requests, {count} adapters of rank {RANK} mixed | ours, tokens/s | peft, tokens/s | ratio |"
        yield "|---|---|---|---|"
        tuned = load_peft(machine, model, paths[:count])
        found = []
        for size, rate in ours.items():
            least = 10 if size > 1 else 1
            theirs = peft_rate(tuned, machine, [f"a{i % count}" for i in range(size)])
            yield f"| {size} | {rate:.0f} | {theirs:.0f} | {rate / theirs:.1f} |"
            found.append(asked(f"{size} requests, of transformers and peft's tokens/s", rate / theirs, least=least))
        yield from ["", *found]


def decode_rate(engine: Engine, machine: Machine, adapters: list[str]) -> float:
    """Return tokens per second from the first step in which all requests decode."""
    add(engine, machine, adapters)
    while not all(r.is_decoding for r in engine.scheduler.requests.values()):
        engine.step()
    tokens, started = 0, time.perf_counter()
    while engine.has_work():
        tokens += sum(len(out.token_ids) for out in engine.step())
    return tokens / (time.perf_counter() - started)


def floor_of(machine: Machine, engine: Engine, streams: int, adapters: int, new_tokens: int) -> float:
    """Return the floor of a step in the middle of the streams' answers, in ms."""
    contexts = [PROMPT_TOKENS + new_tokens // 2] * streams
    return floor_ms(machine, engine.model_config, contexts, float(machine.dtype.itemsize), [RANK] * adapters)


def add(engine: Engine, machine: Machine, adapters: list[str], new_tokens: int | None = None) -> None:
    params = SamplingParams(max_tokens=new_tokens or machine.new_tokens, temperature=0, ignore_eos=True)
    for i, adapter in enumerate(adapters):
        engine.add_request(
            NewRequest(f"stream {i}", prompt(i, engine.model_config.vocab_size), params, adapter_digest=adapter)
        )


def disturbance(engine: Engine, host: HostCache, machine: Machine, newcomers: list[Path]) -> Iterator[str]:
    """Yield the inter-token times of running streams and their floor, beside short requests of known adapters and of
    new ones.
    """
    known = engine.adapters.resident[:1]
    size = max(machine.engine_batches) // 2 or 1
    steps_between = 10
    cold = [host.add_path(path) for path in newcomers]
    new_tokens = steps_between * (len(cold) + 2)
    taken: dict[str, list[float]] = {}
    for kind, visitors in (("known", known * len(cold)), ("to be loaded", cold)):
        add(engine, machine, known * size, new_tokens)
        while not all(r.is_decoding for r in engine.scheduler.requests.values()):
            engine.step()
        times = taken[kind] = []
        for i, visitor in enumerate(visitors):
            engine.add_request(
                NewRequest(f"{kind} {i}", prompt(i, 50)[:8], SamplingParams(max_tokens=2), adapter_digest=visitor)
            )
            for _ in range(steps_between):
                started = time.perf_counter()
                engine.step()
                times.append(1000 * (time.perf_counter() - started))
        while engine.has_work():
            engine.step()
    # A middle step is one without a visitor: that of the streams' own adapter.
    floor = floor_of(machine, engine, size, len(known), new_tokens)
    what = f"{size} streams decode, every {steps_between} steps a request comes for an adapter"
    yield f"| {what} | p50, ms | p99, ms | floor, ms | p50, of the floor |"
    yield "|---|---|---|---|---|"
    p99 = {kind: statistics.quantiles(times, n=100)[98] for kind, times in taken.items()}
    for kind, times in taken.items():
        middle = statistics.median(times)
        yield f"| {kind} | {middle:.2f} | {p99[kind]:.2f} | {floor:.2f} | {floor / middle:.0%} |"
    ratio = p99["to be loaded"] / p99["known"]
    yield f"| p99 of the second to the first | | {ratio:.2f} | | |"
    yield ""
    yield asked("inter-token p99 while adapters are loaded, to without", ratio, most=1.1)


def load_peft(machine: Machine, model: Path, paths: list[Path]) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=machine.dtype).to(machine.device)
    tuned = peft.PeftModel.from_pretrained(base, paths[0], adapter_name="a0")
    for number, path in enumerate(paths[1:], 1):
        tuned.load_adapter(path, adapter_name=f"a{number}", low_cpu_mem_usage=True)
    return tuned.eval()


def peft_rate(tuned: Any, machine: Machine, names: list[str]) -> float:
    """Return tokens per second of generate, without its prefill, which a run of one token measures."""
    vocab_size = parse_model_config(machine.model).vocab_size
    ids = torch.tensor([prompt(i, vocab_size) for i in range(len(names))], device=machine.device)
    new_tokens = min(machine.new_tokens, 17)
    seconds = []
    for tokens in (2, 1, new_tokens):  # the first warms up
        machine.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            tuned.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                adapter_names=names,
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        machine.synchronize()
        seconds.append(time.perf_counter() - started)
    return len(names) * (new_tokens - 1) / (seconds[2] - seconds[1])
