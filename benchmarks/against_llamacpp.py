"""Comparison of our engine with llama.cpp on the CPU: the same Q4_0 GGUF file, in turn in one run.

    python -m venv VENV && VENV/bin/pip install llama-cpp-python
    python -m benchmarks.against_llamacpp --llamacpp VENV [--rounds 5] [--out docs/perf/FILE.md]

The model has the shape of Llama-3.2-1B and random weights, `--layers` of them, which fit no cache; both programs read
one file, llama.cpp in a process of VENV (`benchmarks/llamacpp_side.py`). Each round measures both: decode steps of one
and of eight streams after prompts of 32 tokens, and a prompt of 512 tokens. Figures are medians of the rounds, each of
which compares within itself. Without `--llamacpp` only our engine runs. Our engine has no adapters here, because
llama.cpp merges them. Run nothing else on the machine at the same time.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.quantised import Measured
from benchmarks.random_models import LLAMA_1B, save_config, save_random_gguf
from benchmarks.report_file import publish
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.threads import usable_cpus
from testing.engine import outputs_until_idle

PROMPT, DECODE_PROMPT, STEPS, STREAMS, CONTEXT = 512, 32, 14, 8, 640
# Least ratio of our tokens a second to llama.cpp's; the prompt has no aim.
AIMS = {"c=1": 1.2, "c=8": 3.0, f"prompt of {PROMPT}": None}
# Tokens of a decode step, or of a prompt.
TOKENS = {"c=1": 1, "c=8": STREAMS, f"prompt of {PROMPT}": PROMPT}


class LlamaCpp:
    """llama.cpp in a process of its own."""

    def __init__(self, venv: Path, model: Path, threads: int) -> None:
        program = Path(__file__).with_name("llamacpp_side.py")
        command: list[str | Path] = [venv / "bin" / "python", program, model, str(threads), str(STREAMS), str(CONTEXT)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._read()

    def measure(self) -> dict[str, float]:
        """Return the median seconds of each load."""
        decodes = {f"c={n}": self._ask(f"decode {n} {DECODE_PROMPT} {STEPS}") for n in (1, STREAMS)}
        return decodes | {f"prompt of {PROMPT}": self._ask(f"prefill {PROMPT}")}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return statistics.median(map(float, self._read().split()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with exit code {self._process.wait()}")
        return line


def measure_ours(engine: Measured, vocab_size: int) -> dict[str, float]:
    """Return the median seconds of each load."""
    found: dict[str, float] = {}
    for streams in (1, STREAMS):
        engine.start_streams(streams, DECODE_PROMPT, [], vocab_size)
        found[f"c={streams}"] = statistics.median(engine.step_ms() for _ in range(STEPS)) / 1e3
        list(outputs_until_idle(engine.engine))
    tokens = [(155 + 7919 * j) % (vocab_size - 100) + 50 for j in range(PROMPT)]
    engine.engine.add_request(NewRequest("p", tokens, SamplingParams(max_tokens=1, ignore_eos=True)))
    found[f"prompt of {PROMPT}"] = engine.until_idle_s()
    return found


def table(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[str]:
    lines = ["| load | Loraplex, tokens/s | llama.cpp, tokens/s | ratio | aim |", "|---|---|---|---|---|"]
    for load, aim in AIMS.items():
        rate = TOKENS[load] / statistics.median(round_[load] for round_ in ours)
        cells = [f"{rate:.0f}", "not measured", "", ""]
        if theirs:
            ratio = statistics.median(b[load] / a[load] for a, b in zip(ours, theirs, strict=True))
            missed = aim is not None and ratio < aim
            cells[1] = f"{TOKENS[load] / statistics.median(round_[load] for round_ in theirs):.0f}"
            cells[2:] = [f"{ratio:.2f}", "none" if aim is None else f"{aim}, **missed**" if missed else str(aim)]
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return lines


@contextmanager
def llamacpp(venv: Path | None, model: Path, threads: int) -> Iterator[LlamaCpp | None]:
    if venv is None:
        yield None
        return
    side = LlamaCpp(venv, model, threads)
    try:
        yield side
    finally:
        side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=Path, help="a virtual environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LLAMA_1B["num_hidden_layers"], help="fewer for a trial")
    parser.add_argument("--out", type=Path, help="also append the table here, as Markdown")
    args = parser.parse_args()
    config: dict[str, Any] = LLAMA_1B | {"num_hidden_layers": args.layers}
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        base = save_config(Path(scratch), config)
        model = save_random_gguf(base, Path(scratch) / "model.gguf")
        threads = min(torch.get_num_threads(), usable_cpus())
        engine = Measured.start(model, [], "auto", base=base)
        with llamacpp(args.llamacpp, model, threads) as other:
            for number in range(args.rounds + 1):
                found = measure_ours(engine, config["vocab_size"]), other.measure() if other else None
                if number:  # the first round touches memory for the first time
                    ours.append(found[0])
                    theirs += [found[1]] if found[1] else []
        engine.close()
    lines = [f"Q4_0, {args.layers} layers of Llama-3.2-1B's shape, {date.today()}, {threads} threads:", ""]
    lines += table(ours, theirs)
    publish(lines, args.out)


if __name__ == "__main__":
    main()
