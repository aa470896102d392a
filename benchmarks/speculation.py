"""Speculative decoding, on and off in turn in one run: tokens a second, accepted drafts, equality.

    python -m benchmarks.speculation [--rounds 5] [--seconds 420] [--out docs/perf/FILE.md]
    python -m benchmarks.speculation --model BIG --draft-model SMALL
    python -m benchmarks.speculation --deeper 4         (drafts for a copy with four times the layers)

By prompt lookup: SmolLM2-135M-Instruct, or another model, in bf16 with an adapter of rank 16 for each stream.
Copy-heavy requests are those that prompt lookup is for: a code edit, a summary with quotes, and a rewritten JSON
document, as chats of one message each; `--show` prints the answers, which tell whether the model copies. The worst case
are answers sampled at temperature 1 to prompts of random tokens, in which nothing repeats. With `--draft-model`, a
third engine drafts by that model, which must have the same vocabulary; it has no aims. With `--deeper`, the model
drafts for a deeper copy of itself: only the adapters make the two differ, so more drafts are accepted than with a
trained pair. All engines are in this process; each round runs every load on each, in alternating order, so that the
machine's changes meet all alike. Each answer ends where the model ends it, and must be the same on all engines. Run
nothing else on the machine at the same time.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.random_models import save_deeper_model
from benchmarks.sweep import make_adapters
from engine.config import DType, EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from engine.speculative_config import SpeculativeConfig
from loraplex.models import ensure_demo_model
from testing.engine import outputs_until_idle
from wire.text.tokenizer import Tokenizer

RANK = 16
# Room for all prompts of a load.
KV_BYTES = 2 << 30
TEXTS = Path(__file__).with_name("speculation_texts")
# Least ratio of tokens a second, on against off.
AIMS = {"copying, c=1": 1.5, "copying, c=8": 1.2, "random text, c=1": 0.98, "random text, c=8": 0.98}


@dataclass(frozen=True)
class Job:
    """A request: its prompt and its sampling."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Side:
    """An engine and its results by load: seconds of each round, tokens of a round, answers of the last round."""

    engine: Engine
    host: HostCache
    digests: list[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Path, adapters: list[Path], speculation: SpeculativeConfig | None, dtype: DType) -> "Side":
        host = HostCache(None, BaseShape.from_config_dir(model), 1 << 30, getattr(torch, dtype))
        config = EngineConfig(
            model=str(model), dtype=dtype, device="cpu", max_lora_rank=RANK, kv_cache_memory=KV_BYTES,
            adapter_memory=320 << 20, speculative_config=speculation,
        )  # fmt: skip
        return cls(Engine(config, host), host, [host.add_path(path) for path in adapters])

    def run(self, load: str, jobs: list[Job], streams: int) -> None:
        """Run and time the jobs, `streams` at a time, after their prompts are in the prefix cache.

        Otherwise the first streams of a batch would end while the prompts of the others are computed.
        """
        self._answers(jobs, streams, max_tokens=1)
        before, drafted, accepted = self.engine.state().num_steps, *self._drafts()
        began = time.perf_counter()
        answers = self._answers(jobs, streams)
        self.seconds.setdefault(load, []).append(time.perf_counter() - began)
        after = self._drafts()
        self.tokens[load] = sum(len(answer) for answer in answers)
        self.answers[load] = answers
        self.drafts[load] = after[0] - drafted, after[1] - accepted
        self.steps[load] = self.engine.state().num_steps - before

    def _answers(self, jobs: list[Job], streams: int, max_tokens: int | None = None) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in jobs]
        for first in range(0, len(jobs), streams):
            for i in range(first, min(first + streams, len(jobs))):
                params = replace(jobs[i].params, max_tokens=max_tokens or jobs[i].params.max_tokens)
                digest = self.digests[i % len(self.digests)]
                self.engine.add_request(NewRequest(str(i), jobs[i].prompt, params, adapter_digest=digest))
            for output in outputs_until_idle(self.engine):
                answers[int(output.request_id)] += output.token_ids
        return answers

    def _drafts(self) -> tuple[int, int]:
        counts = self.engine.state().drafts
        return sum(c.drafted for c in counts), sum(c.accepted for c in counts)

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def copying_jobs(tokenizer: Tokenizer, count: int, max_tokens: int) -> list[Job]:
    """Return requests in turn over the texts, each of which is a user's message."""
    texts = [path.read_text() for path in sorted(TEXTS.glob("*.txt"))]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [Job(prompts[i % len(prompts)], params) for i in range(count)]


def random_jobs(count: int, max_tokens: int, vocab_size: int) -> list[Job]:
    """Return requests with random prompts and answers that repeat nothing."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(50, vocab_size - 50, (count, 300), generator=draw).tolist()
    return [
        Job(prompt, SamplingParams(max_tokens=max_tokens, temperature=1, seed=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]


def loads(tokenizer: Tokenizer, vocab_size: int) -> dict[str, tuple[list[Job], int]]:
    """Return each load's jobs and its number of streams."""
    return {
        "copying, c=1": (copying_jobs(tokenizer, 3, 256), 1),
        "copying, c=8": (copying_jobs(tokenizer, 8, 256), 8),
        "random text, c=1": (random_jobs(2, 128, vocab_size), 1),
        "random text, c=8": (random_jobs(8, 96, vocab_size), 8),
    }


def table(off: Side, others: dict[str, Side]) -> list[str]:
    """Return a table of each load on the engine without drafts and on those with drafts, by their name."""
    lines = [
        "| load | drafts by | tokens | off, tokens/s | on, tokens/s | ratio | aim | tokens a step | accepted | equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for load, aim in AIMS.items():
        for name, on in others.items() if load in off.seconds else ():
            ratio = statistics.median(a / b for a, b in zip(off.seconds[load], on.seconds[load], strict=True))
            rates = [side.tokens[load] / statistics.median(side.seconds[load]) for side in (off, on)]
            drafted, accepted = on.drafts[load]
            equal = sum(a == b for a, b in zip(off.answers[load], on.answers[load], strict=True))
            mark = "none" if name != "ngram" else str(aim) if ratio >= aim else f"{aim}, **missed**"
            by_step = on.tokens[load] / max(1, off.tokens[load]) * off.steps[load] / on.steps[load]
            lines.append(
                f"| {load} | {name} | {on.tokens[load]} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} | {mark} "
                f"| {by_step:.2f} | {accepted} of {drafted} | {equal} of {len(on.answers[load])} |"
            )
    return lines


def run_rounds(sides: list[Side], work: dict[str, tuple[list[Job], int]], rounds: int, seconds: float) -> int:
    """Run every load on each side in each round. Return the number of measured rounds."""
    began = time.perf_counter()
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() - began > seconds:
            return number - 1
        for load, (jobs, streams) in work.items():
            for side in sides if number % 2 else reversed(sides):
                side.run(load, jobs, streams)
            if number == 0:  # the first round touches memory for the first time
                for side in sides:
                    side.seconds[load].clear()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=420, help="Begin no round after this time.")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--show", action="store_true", help="Print the answers.")
    parser.add_argument("--only", choices=list(AIMS), nargs="+", help="these loads")
    parser.add_argument("--control", action="store_true", help="also a second engine without drafts, for the noise")
    parser.add_argument("--model", type=Path, help="default: the demo model, fetched if need be")
    drafts_by = parser.add_mutually_exclusive_group()
    drafts_by.add_argument("--draft-model", type=Path, help="also draft by this smaller model of the same vocabulary")
    drafts_by.add_argument(
        "--deeper", type=int, metavar="TIMES", help="also draft by the model, for a copy of it with more layers"
    )
    parser.add_argument("--data-dir", type=Path, default=Path(".loraplex/models"))
    parser.add_argument("--out", type=Path, help="also append the table here, as Markdown")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or ensure_demo_model(args.data_dir)
        draft_model = args.draft_model
        if args.deeper:
            draft_model = model
            (Path(scratch) / f"{model.name}-{args.deeper}x").mkdir()
            model = save_deeper_model(model, Path(scratch) / f"{model.name}-{args.deeper}x", args.deeper)
        tokenizer = Tokenizer.from_dir(model)
        adapters = make_adapters(BaseShape.from_config_dir(model), Path(scratch), 8, RANK)
        speculation: dict[str, SpeculativeConfig | None] = {"ngram": SpeculativeConfig("ngram", args.drafts)}
        if args.control:
            speculation["nothing"] = None
        if draft_model:
            speculation[draft_model.name] = SpeculativeConfig("draft_model", args.drafts, model=str(draft_model))
        off = Side.start(model, adapters, None, args.dtype)
        others = {name: Side.start(model, adapters, each, args.dtype) for name, each in speculation.items()}
        every = loads(tokenizer, off.engine.model_config.vocab_size)
        work = {load: every[load] for load in args.only or every}
        rounds = run_rounds([off, *others.values()], work, args.rounds, args.seconds)
    lines = [
        f"{date.today()}, {os.cpu_count()} cores, {model.name}, {args.dtype}, {args.drafts} drafts, {rounds} rounds:"
    ]
    lines += ["", *table(off, others)]
    print("\n".join(lines))
    for load, answers in off.answers.items() if args.show else ():
        for answer in answers:
            print(f"--- {load}\n{tokenizer.decode(answer)}")
    for side in (*others.values(), off):
        side.close()
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join([*lines, ""]) + "\n")


if __name__ == "__main__":
    main()
