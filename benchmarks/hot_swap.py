"""Cost of a cold adapter for its own first token, and of loads for running streams.

    python -m benchmarks.hot_swap [--adapters 200] [--tokens 120]

A real engine on the demo model, adapters of rank 16 on all projections, requests over HTTP.

Cold start: time to the first token of requests whose adapter is on the device, in host memory, and on disk; room for 4
on the device. Hot swap: 32 running streams with one adapter, first alone, then while adapters are loaded under a name,
replaced and unloaded one after the other, then while each of them also answers one token. Compares the streams' texts
and the gaps between their tokens.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.adapter_engine import (
    Adapters,
    EngineClient,
    Stream,
    make_session,
    percentile,
    random_prompt,
    running_engine,
)

STREAMS, PROMPT, ON_DEVICE, ROUNDS = 32, 32, 4, 20
Change = Callable[[int], Awaitable[None]]


async def cold_start(engine: EngineClient, digests: list[str]) -> list[str]:
    """Return the lines of the table of times to the first token."""
    chance = random.Random(3)

    async def ttft(digest: str) -> float:
        await asyncio.sleep(0.05)
        return (await engine.stream("a", digest, random_prompt(chance, PROMPT), 2)).ttft

    await ttft(digests[0])
    times = {"on the device": [await ttft(digests[0]) for _ in range(ROUNDS)]}
    times["on disk"] = [await ttft(digest) for digest in digests[1 : ROUNDS + 1]]
    # The device holds only the last few, so each of these is loaded to the device again.
    times["in host memory"] = [await ttft(digest) for digest in digests[1 : ROUNDS + 1]]
    middle = statistics.median(times["on the device"])
    lines = ["| adapter | TTFT p50 | max | added to the median |", "|---|---|---|---|"]
    for name, values in times.items():
        p50 = statistics.median(values)
        added = f"{1000 * (p50 - middle):.0f} ms"
        lines.append(f"| {name} | {1000 * p50:.0f} ms | {1000 * max(values):.0f} ms | {added} |")
    return lines


async def run_streams(
    engine: EngineClient, digest: str, tokens: int, change: Change | None
) -> tuple[list[Stream], int]:
    """Return the streams, and the number of changes that were made while all of them ran."""
    chance, changes = random.Random(11), 0
    prompts = [random_prompt(chance, PROMPT) for _ in range(STREAMS)]
    running = [asyncio.create_task(engine.stream("streams", digest, prompt, tokens)) for prompt in prompts]
    await asyncio.sleep(2)
    while change is not None and not any(task.done() for task in running):
        await change(changes)
        changes += 1
    return await asyncio.gather(*running), changes


async def hot_swap(engine: EngineClient, mine: str, digests: list[str], store: Path, tokens: int) -> list[str]:
    chance = random.Random(12)

    async def swap(number: int) -> None:
        digest = digests[number % len(digests)]
        path = str(store / digest[:2] / digest)
        await engine.post("/v1/load_lora_adapter", {"lora_name": "swapped", "lora_path": path, "load_inplace": True})
        if number % 4 == 3:
            await engine.post("/v1/unload_lora_adapter", {"lora_name": "swapped"})

    async def swap_and_use(number: int) -> None:
        await swap(number)
        await engine.stream("other", digests[number % len(digests)], random_prompt(chance, 4), 1)

    await run_streams(engine, mine, 8, None)
    lines = ["| 32 streams | gap p50 | p99 | p99 of alone | adapters | tokens as alone |", "|" + "---|" * 6]
    alone: list[Stream] = []
    reference = 0.0
    for name, change in (
        ("alone", None),
        ("beside loads and unloads", swap),
        ("and each answers a token", swap_and_use),
    ):
        streams, changes = await run_streams(engine, mine, tokens, change)
        alone = alone or streams
        gaps = [b - a for s in streams for a, b in itertools.pairwise(s.token_times[8:])]
        p99 = percentile(gaps, 0.99)
        reference = reference or p99
        same = sum(a.text == b.text for a, b in zip(alone, streams, strict=True))
        figures = f"{1000 * statistics.median(gaps):.0f} ms | {1000 * p99:.0f} ms | {p99 / reference:.2f}"
        lines.append(f"| {name} | {figures} | {changes} | {same} of {STREAMS} |")
    return lines


async def measure(url: str, adapters: Adapters, count: int, tokens: int) -> None:
    async with make_session() as session:
        engine = EngineClient(session, url)
        await engine.ready()
        digests = adapters.make(count + 1)
        print("\n".join(await cold_start(engine, digests)), flush=True)
        print()
        print("\n".join(await hot_swap(engine, digests[-1], digests[:-1], adapters.root, tokens)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each stream")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        adapters = Adapters(Path(folder))
        flags = ("--max-lora-rank", "16", "--kv-cache-memory", "512MiB", "--no-enable-prefix-caching")
        memory = ("--adapter-memory", str(ON_DEVICE * adapters.num_bytes))
        with running_engine(adapters.root, *flags, *memory) as url:
            asyncio.run(measure(url, adapters, options.adapters, options.tokens))


if __name__ == "__main__":
    main()
