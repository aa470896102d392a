"""Estimate of `loraplex size` beside the engine's own speed on this machine: steady streams, and prompts alone.

    python -m benchmarks.size_estimate                          # SmolLM2-135M, 1, 16 and 64 streams; about 3 minutes
    python -m benchmarks.size_estimate --streams 1 4 --prompts 64 --requests 2      # small

A stream asks its next request when one ends, so prompts are computed beside the others' decoding, as in the estimate's
steady state. The engine runs in this process, without a server, and without adapters. Run nothing else on the machine
at the same time. A ratio is the estimate divided by the measurement.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.report_file import publish
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from engine.sizing import estimate
from engine.sizing_speed import ExpectedLoad
from loraplex.models import ensure_demo_model
from testing.stack import CACHE

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
PROMPT_REPEATS = 5
# Requests of a case with few streams, whose steps are so short that a moment of other work changes the rate.
FEWEST_REQUESTS = 20


class Row(NamedTuple):
    """A case. estimated, measured: tokens a second, or milliseconds."""

    case: str
    unit: str
    estimated: float
    measured: float


def prompt(number: int, tokens: int) -> list[int]:
    """Return a prompt that shares no block with another."""
    return [(7919 * number + 31 * place) % 40_000 + 100 for place in range(tokens)]


class Bench:
    """An engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        host = HostCache(None, BaseShape.from_config_dir(config.model), 1 << 20, torch.bfloat16)
        self.engine = Engine(config, host)
        self._host = host
        self._number = 0

    def close(self) -> None:
        self.engine.close()
        self._host.close()

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self._number += 1
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(NewRequest(str(self._number), prompt(self._number, prompt_tokens), params))

    def steady(self, streams: int, requests: int) -> float:
        """Return the tokens a second of streams that each ask `requests` times, without the first and last requests.

        The streams begin one after the other, spread over an answer, so that their prompts do not coincide.
        """
        waiting, started, ended, counted, began, passed = streams * (requests + 2), 0, 0, 0, 0.0, 0.0
        steps = 0
        while ended < streams * (requests + 1):
            while started - ended < streams and started < waiting and started <= steps * streams / OUTPUT_TOKENS:
                self.add(PROMPT_TOKENS, OUTPUT_TOKENS)
                started += 1
            outputs = self.engine.step()
            steps += 1
            if ended >= streams:
                began = began or time.perf_counter()
                counted += sum(len(output.token_ids) for output in outputs)
                passed = time.perf_counter() - began
            ended += sum(output.finish_reason is not None for output in outputs)
        self._drain()
        return counted / passed

    def first_token(self, tokens: int) -> float:
        """Return the median seconds from a request alone to its first token."""
        times = []
        for _ in range(PROMPT_REPEATS):
            self.add(tokens, 1)
            began = time.perf_counter()
            self._drain()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _drain(self) -> None:
        while self.engine.has_work():
            self.engine.step()


def measure(config: EngineConfig, streams: Sequence[int], prompts: Sequence[int], requests: int) -> Iterator[Row]:
    def load(prompt_tokens: int, number: int) -> ExpectedLoad:
        return ExpectedLoad(0, 1, prompt_tokens, OUTPUT_TOKENS, number)

    # The estimates precede the engine, as an operator makes them.
    steady = [estimate(config, None, load(PROMPT_TOKENS, number)).throughput for number in streams]
    alone = [estimate(config, None, load(tokens, 1)).throughput.first_token_seconds for tokens in prompts]
    bench = Bench(config)
    bench.first_token(PROMPT_TOKENS)
    for number, expected in zip(streams, steady, strict=True):
        measured = bench.steady(number, max(requests, FEWEST_REQUESTS // number))
        yield Row(f"{number} streams", "tokens/s", expected.tokens_per_second, measured)
    for tokens, seconds in zip(prompts, alone, strict=True):
        yield Row(f"first token after {tokens:,}", "ms", 1000 * seconds, 1000 * bench.first_token(tokens))
    bench.close()


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| case | estimated | measured | ratio |"
    yield "|---|---|---|---|"
    for row in rows:
        ratio = row.estimated / row.measured
        yield f"| {row.case} | {row.estimated:,.1f} {row.unit} | {row.measured:,.1f} {row.unit} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 128, 512, 2000])
    parser.add_argument("--requests", type=int, default=3, help="of each stream, at least 20 in all")
    parser.add_argument("--out", type=Path, help="also append the table here")
    given = parser.parse_args()
    model = given.model or ensure_demo_model(CACHE / "models", print)
    config = EngineConfig(
        model=str(model), device="cpu", quantization=given.quantization, max_num_seqs=max(given.streams),
        kv_cache_memory=1 << 30, adapter_memory=64 << 20,
    )  # fmt: skip
    rows = list(measure(config, given.streams, given.prompts, given.requests))
    lines = [f"{date.today()}, {os.cpu_count()} CPUs, {model.name}, load {os.getloadavg()[0]:.1f}.", "", *table(rows)]
    publish(lines, given.out)


if __name__ == "__main__":
    main()
