"""End to end over HTTP: a `loraplex engine` whose core has a process of its own, and streams from another process."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from benchmarks.gpu.decode import floor_ms
from benchmarks.gpu.files import write_adapter, write_model
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.served import prefill_seconds
from benchmarks.gpu.whole_engine import scratch
from benchmarks.kernels.measure import asked
from engine.model.families import parse_model_config

if TYPE_CHECKING:
    from benchmarks.host_share import ServedEngine, Stream

RANK, PROMPT_TOKENS = 16, 32


def figures(machine: Machine) -> Iterator[str]:
    """Yield tokens a second of streams, by number and adapters, and the first token of prompts that arrive beside."""
    try:
        import msgspec  # noqa: F401  (the engine's process needs it)

        from benchmarks.host_share import ServedEngine
        from testing.tiny import save_byte_level_tokenizer
    except ImportError as error:
        yield f"Not measured: the engine's HTTP server needs packages that this machine lacks ({error})."
        return
    # A tokenizer's file must not have more tokens than the model.
    raw = machine.model | {"vocab_size": max(1000, machine.model["vocab_size"])}
    with scratch() as folder:
        model = write_model(raw, folder / "model", machine.dtype, machine.device)
        save_byte_level_tokenizer(model)
        paths = [
            write_adapter(raw, folder / f"a{i}", RANK, machine.dtype, machine.device, i)
            for i in range(machine.engine_adapters)
        ]
        flags = [
            "--engine-core-mode",
            "process",
            "--max-num-batched-tokens",
            str(machine.step_tokens),
            "--max-lora-rank",
            str(RANK),
        ]
        if machine.device.type == "cpu":
            flags += ["--kv-cache-memory", str(64 << 20), "--adapter-memory", str(64 << 20)]
        engine = ServedEngine(model, paths, machine.device.type, flags, start_seconds=machine.start_seconds)
        try:
            yield from asyncio.run(_measured(machine, engine))
        finally:
            engine.close()


async def _measured(machine: Machine, engine: "ServedEngine") -> list[str]:
    c = parse_model_config(machine.model)
    lines = [
        "| streams | tokens/s | step, ms | floor, ms | of the floor | front, µs a token |",
        "|---|---|---|---|---|---|",
    ]
    found: list[str] = []
    base: dict[int, float] = {}
    for number in machine.engine_batches:
        for count in (0, machine.engine_adapters):
            rate, front = await _rate(machine, engine, number, count)
            taken = 1000 * number / rate
            contexts = [PROMPT_TOKENS + machine.http_tokens // 2] * number
            floor = floor_ms(machine, c, contexts, float(machine.dtype.itemsize), [RANK] * min(count, number))
            name = f"{number}, {count} adapters of rank {RANK}" if count else f"{number}, base"
            lines.append(f"| {name} | {rate:.0f} | {taken:.2f} | {floor:.2f} | {floor / taken:.0%} | {front:.0f} |")
            if count:
                found.append(asked(f"HTTP, {name}, of the base's rate", rate / base[number], least=0.9))
            else:
                base[number] = rate
                found.append(asked(f"HTTP, {name}, of the memory's floor", floor / taken, least=0.85))
    number = max(machine.engine_batches)
    async with _streams(machine, engine, number, machine.engine_adapters):
        waits = [await _first_token(machine, engine, i) for i in range(machine.http_prompts)]
    name, middle = f"first token of a prompt of {machine.long_prompt} beside {number} streams", statistics.median(waits)
    contexts = [PROMPT_TOKENS + machine.http_tokens // 2] * number
    floor = floor_ms(machine, c, contexts, float(machine.dtype.itemsize), [RANK] * min(number, machine.engine_adapters))
    # A step of the streams, and the prompt's own products.
    floor += 1000 * prefill_seconds(machine, c, machine.long_prompt)
    lines += ["", f"{name}: median {1000 * middle:.0f} ms, longest {1000 * max(waits):.0f} ms, floor {floor:.1f} ms"]
    found.append(asked(f"HTTP, {name}, to the floor", 1000 * middle / floor, most=4))
    return [*lines, "", *found]


async def _rate(machine: Machine, engine: "ServedEngine", number: int, count: int) -> tuple[float, float]:
    """Return tokens a second of all streams, and the front's CPU time of a token in microseconds.

    Raises RuntimeError: A stream ended while it was measured, or not one token each came within a minute.
    """
    async with _streams(machine, engine, number, count):
        before, cpu, began = await asyncio.to_thread(engine.state), engine.cpu(), time.perf_counter()
        tokens, elapsed = 0, 0.0
        while tokens < number:
            await asyncio.sleep(machine.http_seconds)
            after, cpu_after, elapsed = await asyncio.to_thread(engine.state), engine.cpu(), time.perf_counter() - began
            tokens = after["generated_tokens"] - before["generated_tokens"]
            if after["running"] < number or elapsed > 60:
                raise RuntimeError(
                    f"{after['running']} of {number} streams still ran after {elapsed:.1f} s: {tokens} tokens"
                )
    return tokens / elapsed, 1e6 * (cpu_after[0] - cpu[0]) / tokens


@asynccontextmanager
async def _streams(machine: Machine, engine: "ServedEngine", number: int, count: int) -> AsyncIterator[None]:
    """Keep streams open during the block, which begins once all of them decode."""
    opened = [
        await _open(
            engine, f"adapter-{i % count}" if count else "base", range(i, i + PROMPT_TOKENS), machine.http_tokens
        )
        for i in range(number)
    ]
    for stream in opened:
        await asyncio.wait_for(stream.has_first.wait(), 60)
    try:
        yield
    finally:
        for stream in opened:
            stream.transport.abort()


async def _first_token(machine: Machine, engine: "ServedEngine", number: int) -> float:
    stream = await _open(engine, "base", [7 * number + j for j in range(machine.long_prompt)], 1)
    await asyncio.wait_for(stream.has_first.wait(), 60)
    stream.transport.abort()
    return (stream.first or 0.0) - stream.sent


async def _open(engine: "ServedEngine", model: str, tokens: Sequence[int], max_tokens: int) -> "Stream":
    from benchmarks.host_share import Stream

    body = {"model": model, "stream": True, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    data = json.dumps(body | {"prompt": [token % 900 + 2 for token in tokens]}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connect = asyncio.get_running_loop().create_connection
    _, stream = await connect(lambda: Stream(head + data), "127.0.0.1", engine.port)
    return stream
