"""The engine as it serves: prompts that arrive beside streams, adapters of mixed ranks, contexts that differ, prefix
hits, top-p.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.decode import floor_ms, matrix_elements
from benchmarks.gpu.files import write_adapter, write_model
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.whole_engine import running, scratch
from benchmarks.kernels.measure import asked
from engine.engine import Engine
from engine.model.config import ModelConfig
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams

RANKS = (8, 16, 32, 64)
# Prompts that arrive beside the streams.
ARRIVALS = 4

GREEDY = SamplingParams(temperature=0, ignore_eos=True, seed=0)
# Tokens, and the seconds of each step.
Times = tuple[int, list[float]]
Middle = Callable[[list[float]], float]


def figures(machine: Machine) -> Iterator[str]:
    """Yield a line for each kind of load, beside the same streams without it, its floor and its bound."""
    streams, found = max(machine.engine_batches), []
    counts = sorted({1, min(16, streams), streams})
    with scratch() as folder:
        model = write_model(machine.model, folder / "model", machine.dtype, machine.device)

        def write(name: str, ranks: list[int]) -> list[Path]:
            return [
                write_adapter(machine.model, folder / f"{name}{i}", rank, machine.dtype, machine.device, i)
                for i, rank in enumerate(ranks)
            ]

        mixed = [RANKS[i % len(RANKS)] for i in range(counts[-1])]
        alike = [16] * machine.engine_adapters
        with running(machine, model, machine.dtype, max(RANKS), prefix_caching=True) as (engine, host):
            digests = [host.add_path(path) for path in write("mixed", mixed)]
            columns = ["tokens/s", "p50 of steps, ms", "p99, ms", "floor, ms", "of the floor", "of the base", "bound"]
            yield f"| {streams} streams | {' | '.join(columns)} |"
            yield "|---|---|---|---|---|---|---|---|"
            base = measure(engine, machine, [None] * streams)
            floor = floor_of(machine, engine, short(machine, streams), [])
            yield row("base", base, base, floor, "at least 85 % of the floor")
            found.append(asked(f"{streams} streams as served, of the memory's floor", reached(base, floor), least=0.85))
            for count in counts:
                taken = measure(engine, machine, [digests[i % count] for i in range(streams)])
                floor = floor_of(machine, engine, short(machine, streams), mixed[:count])
                yield row(f"{count} adapters of ranks {RANKS}", taken, base, floor, "at least 40 % of the base")
                found.append(asked(f"{count} adapters as served, of the base", ratio(taken, base), least=0.4))
            digests = [host.add_path(path) for path in write("alike", alike)]
            taken = measure(engine, machine, [digests[i % len(digests)] for i in range(streams)])
            name = f"{len(alike)} adapters of rank 16"
            floor = floor_of(machine, engine, short(machine, streams), alike[:streams])
            yield row(name, taken, base, floor, "at least 90 % of the base")
            found.append(asked(f"{name} as served, of the base", ratio(taken, base), least=0.9))
            yield from base_loads(engine, machine, base, found)
            yield ""
            yield from prefill(engine, machine, found)
            yield ""
            yield from first_tokens(engine, machine, found)
    yield from ["", *found]


def base_loads(engine: Engine, machine: Machine, base: Times, found: list[str]) -> Iterator[str]:
    """Yield the lines of streams without adapters: draws, contexts that differ, and prompts that arrive."""
    streams = max(machine.engine_batches)
    no_adapters: list[str | None] = [None] * streams
    drawn = measure(engine, machine, no_adapters, sampling=replace(GREEDY, temperature=0.7, top_p=0.8, top_k=20))
    floor = floor_of(machine, engine, short(machine, streams), [])
    yield row("top-k 20, top-p 0.8", drawn, base, floor, "at least 95 % of the base")
    found.append(asked("top-k and top-p as served, of greedy", ratio(drawn, base), least=0.95))
    prompts = differing(machine, streams)
    taken = measure(engine, machine, no_adapters, prompts)
    own_floor = floor_of(machine, engine, prompts, [])
    name = f"contexts {min(prompts):,} to {max(prompts):,}"
    yield row(name, taken, base, own_floor, "at least 80 % of the floor")
    found.append(asked(f"{name} as served, of the memory's floor", reached(taken, own_floor), least=0.8))
    beside = measure(engine, machine, no_adapters, arrivals=ARRIVALS)
    of_prompts = 1000 * ARRIVALS * prefill_seconds(machine, engine.model_config, machine.long_prompt)
    floor += of_prompts / len(beside[1])
    name = f"{ARRIVALS} prompts of {machine.long_prompt} arrive; floor of the mean step"
    yield row(name, beside, base, floor, "at least 60 % of the floor", statistics.mean)
    share = reached(beside, floor, statistics.mean)
    found.append(asked("streams and arriving prompts, of the floor", share, least=0.6))


def ratio(taken: Times, base: Times) -> float:
    return (taken[0] / sum(taken[1])) / (base[0] / sum(base[1]))


def reached(taken: Times, floor: float, middle: Middle = statistics.median) -> float:
    """Return the share of the floor, in ms, that the middle step reaches."""
    return floor / (1000 * middle(taken[1]))


def short(machine: Machine, count: int) -> list[int]:
    """Return the lengths of the prompts of `count` ordinary streams."""
    return [machine.mixed_contexts[0]] * count


def differing(machine: Machine, count: int) -> list[int]:
    """Return the lengths of prompts of which some are long: one of each of `mixed_contexts`, the others `short`."""
    longest = machine.mixed_contexts[-count:]
    return [*longest, *short(machine, count - len(longest))]


def floor_of(machine: Machine, engine: Engine, prompts: Sequence[int], ranks: Sequence[int]) -> float:
    """Return the floor of a decode step in the middle of `measure`, in ms. prompts: their lengths, by stream."""
    contexts = [length + machine.new_tokens // 2 for length in prompts]
    return floor_ms(machine, engine.model_config, contexts, float(machine.dtype.itemsize), ranks)


def row(name: str, taken: Times, base: Times, floor: float, bound: str, middle: Middle = statistics.median) -> str:
    tokens, seconds = taken
    late, rate = statistics.quantiles(seconds, n=100)[98], tokens / sum(seconds)
    shown = [1000 * statistics.median(seconds), 1000 * late, floor]
    times = " | ".join([*(f"{figure:.2f}" for figure in shown), f"{reached(taken, floor, middle):.0%}"])
    return f"| {name} | {rate:.0f} | {times} | {ratio(taken, base):.0%} | {bound} |"


def prefill(engine: Engine, machine: Machine, found: list[str]) -> Iterator[str]:
    """Time whole steps of one new prompt against the rate of matrix products: the least of three prompts' times."""
    c, count = engine.model_config, machine.prefill_tokens
    seconds = []
    for i in range(3):
        tokens = [(19 * i + 23 * j + j * j) % (c.vocab_size - 2) + 2 for j in range(count)]
        tokens[0] = 2 + i  # no prefix in the cache
        started = time.perf_counter()
        engine.add_request(NewRequest(f"prefill {i}", tokens, SamplingParams(max_tokens=1, temperature=0)))
        while engine.has_work():
            engine.step()
        seconds.append(time.perf_counter() - started)
    share = prefill_seconds(machine, c, count) / min(seconds)
    yield f"prompt of {count}: {1000 * min(seconds):.1f} ms, {share:.0%} of the matrix rate"
    found.append(asked(f"prefill of {count} tokens, of the matrix rate", share, least=0.6))


def prefill_seconds(machine: Machine, c: ModelConfig, count: int) -> float:
    """Return the seconds of a prompt's products at this run's matrix rate, one token's head included."""
    head = c.hidden_size * c.vocab_size
    operations = 2 * count * (matrix_elements(c) - head) + 2 * head
    operations += 2 * count * count * c.num_heads * c.head_dim * c.num_layers  # causal: half of both products
    return operations / machine.matrix_rate()


def measure(
    engine: Engine,
    machine: Machine,
    adapters: Sequence[str | None],
    prompts: Sequence[int] = (),
    arrivals: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Times:
    """Return the tokens and the seconds of each step, from the first in which all requests decode.

    prompts: lengths, by stream; empty: `short`. The streams run once for a token before, so that their adapters are
    loaded and their prompts cached, and all decode at the same time. Raises RuntimeError if they do not.
    """
    lengths = prompts or short(machine, len(adapters))
    add(engine, adapters, lengths, SamplingParams(max_tokens=1))
    while engine.has_work():
        step(engine)
    add(engine, adapters, lengths, replace(sampling, max_tokens=machine.new_tokens + 2))
    while not all(request.is_decoding for request in engine.scheduler.requests.values()):
        step(engine)
    num_decoding = len(engine.scheduler.requests)
    if num_decoding < len(adapters):
        raise RuntimeError(f"{num_decoding} of {len(adapters)} streams decode at the same time")
    for i in range(arrivals):
        tokens = prompt(machine, engine.model_config.vocab_size, i)
        engine.add_request(NewRequest(f"prompt {i}", tokens, SamplingParams(max_tokens=1)))
    num_tokens, seconds = 0, []
    while engine.has_work():
        started = time.perf_counter()
        num_tokens += sum(len(out.token_ids) for out in engine.step())
        seconds.append(time.perf_counter() - started)
    return num_tokens, seconds


def add(engine: Engine, adapters: Sequence[str | None], lengths: Sequence[int], params: SamplingParams) -> None:
    """Add streams. lengths: the lengths of their prompts."""
    vocab_size = engine.model_config.vocab_size
    for i, (adapter, length) in enumerate(zip(adapters, lengths, strict=True)):
        tokens = [(31 * i + 7 * j) % (vocab_size - 2) + 2 for j in range(length)]
        engine.add_request(NewRequest(f"stream {i}", tokens, params, adapter_digest=adapter))


def step(engine: Engine) -> None:
    """Run a step. Sleep while all work waits for adapters, because their loads need the interpreter's lock."""
    engine.step()
    if engine.is_waiting_for_adapters:
        time.sleep(0.001)


def first_tokens(engine: Engine, machine: Machine, found: list[str]) -> Iterator[str]:
    """Time the first token of a long prompt, and of the same prompt again, whose prefix is cached."""
    c, taken = engine.model_config, []
    # Arrivals have the numbers before it, and their prompts are cached.
    tokens = prompt(machine, c.vocab_size, ARRIVALS)
    read = floor_ms(machine, c, [len(tokens)], float(machine.dtype.itemsize), [])
    yield "| first token | ms | floor, ms | of the floor | bound |"
    yield "|---|---|---|---|---|"
    for name, bound in (("new", "at least 50 % of the floor"), ("again", "at most half of the new one's time")):
        outputs: list[RequestOutput] = []
        started = time.perf_counter()
        engine.add_request(NewRequest(name, tokens, SamplingParams(max_tokens=1, temperature=0)))
        while engine.has_work():
            outputs += engine.step()
        taken.append(1000 * (time.perf_counter() - started))
        # A step reads weights, keys and values, and multiplies the tokens that are not cached.
        cached = outputs[-1].num_cached_tokens
        floor = max(read, 1000 * prefill_seconds(machine, c, len(tokens) - cached))
        share = floor / taken[-1]
        what = f"prompt of {len(tokens)}, {name}" + (f", {cached} cached" if cached else "")
        yield f"| {what} | {taken[-1]:.1f} | {floor:.1f} | {share:.0%} | {bound} |"
        if name == "new":
            found.append(asked(f"first token of a prompt of {len(tokens)}, of the floor", share, least=0.5))
    found.append(asked("first token of a cached prompt, of a new one", taken[1] / taken[0], most=0.5))


def prompt(machine: Machine, vocab_size: int, i: int) -> list[int]:
    return [(17 * i + 13 * j + j * j) % (vocab_size - 2) + 2 for j in range(machine.long_prompt)]
