"""`python -m benchmarks.gpu`: one report with every kernel and decode figure of this machine's GPU.

Each section is its own process with a budget of seconds, so that a section that fails, hangs or breaks the CUDA context
loses only its own figures; its printed lines are kept. `--section NAME` runs one section in this process. `--dry-run`
runs the same program on toy shapes without a GPU, its kernels in Triton's interpreter; those figures mean nothing. The
sections answers, engine, served and http run the CPU engine in a dry run, with native ops and without CUDA graphs.
"""

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from testing.interpreter import speed_up


@dataclass(frozen=True, slots=True)
class Section:
    """Section of the report. seconds: time budget. function: name of a function in `module`, which takes a Machine and
    yields Markdown lines. part: the call in which it runs; each call takes at most 9 minutes.
    """

    title: str
    seconds: int
    module: str
    function: str
    part: int = 1


# The most important sections come first, in case the run is ended early. Each part takes at most 530 s.
SECTIONS = {
    "decode": Section("Decode at Llama-3.1-8B's shapes", 45, "decode", "base"),
    "contexts": Section("Decode of contexts that differ", 60, "decode", "contexts"),
    "lora": Section("Decode with adapters", 60, "decode", "lora"),
    "tests": Section("The kernels' tests, compiled", 110, "each_kernel", "tests"),
    "kernels": Section("Each kernel", 55, "each_kernel", "figures"),
    "8-bits": Section("Products with FP8 and int8 weights", 50, "eight_bits", "figures"),
    "answers": Section("The engine's answers beside transformers and peft", 45, "whole_engine", "same_answers"),
    "engine": Section("The engine's speed beside transformers and peft", 135, "whole_engine", "speed", 2),
    "served": Section("The engine as it serves", 255, "served", "figures", 2),
    "http": Section("The engine over HTTP", 140, "over_http", "figures", 2),
    "plans": Section("Other tile sizes", 60, "plans", "figures"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--section", choices=SECTIONS, action="append", help="only this one, in this process; repeatable"
    )
    parser.add_argument("--dry-run", action="store_true", help="toy shapes without a card")
    parser.add_argument("--part", type=int, choices=(1, 2), help="only the sections of this call of 9 minutes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the report; default: docs/perf/DATE-gpu[-PART].md")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        speed_up()
    else:
        import torch

        if not torch.cuda.is_available():
            print("No GPU here: nothing was measured. `--dry-run` shows that the program runs.", file=sys.stderr)
            return 2
    if options.dry_run or options.section:
        return run_here(options.section or list(SECTIONS), options.dry_run, options.out)
    suffix = f"-{options.part}" if options.part else ""
    return report(options.out or Path("docs/perf") / f"{date.today()}-gpu{suffix}.md", options.part)


def run_here(names: list[str], is_dry: bool, out: Path | None) -> int:
    """Run the sections in this process and return 0 if all completed; an error ends only its own section. out: the page
    to write too, or None.
    """
    import torch

    from benchmarks.gpu import results
    from benchmarks.gpu.machine import Machine, dry_machine

    torch.manual_seed(0)
    machine = dry_machine() if is_dry else Machine()
    failed, printed_lines = 0, []

    def say(line: str) -> None:
        print(line, flush=True)
        printed_lines.append(line)

    for name in names:
        section = SECTIONS[name]
        say(f"## {section.title}\n")
        started = time.perf_counter()
        try:
            lines = getattr(importlib.import_module(f"benchmarks.gpu.{section.module}"), section.function)
            for line in lines(machine):
                say(line)
        except Exception as error:  # noqa: BLE001
            # The report shows the error in place of the figures.
            failed += 1
            say(f"\nFAILED: {type(error).__name__}: {str(error)[:2000]}")
        say(f"\n{time.perf_counter() - started:.0f} s\n")
    if out is not None:
        shown = results.write(out, "unknown", printed_lines, verdicts(printed_lines))
        out.write_text("\n".join([*printed_lines, *shown, "", *results.predictions()]) + "\n")
    return 1 if failed else 0


def report(out: Path, part: int | None) -> int:
    """Run every section of the part in its own process; each line is in the report as soon as it is printed. Behind the
    sections come verdicts, charts and predictions; all tables are also written as JSON, beside the report.
    """
    from benchmarks.gpu import results
    from benchmarks.gpu.machine import Machine

    commit = "unknown"
    if shutil.which("git"):
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or commit
    failed: list[str] = []
    lines: list[str] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", buffering=1) as file:

        def say(line: str) -> None:
            print(line, flush=True)
            file.write(line + "\n")

        say(f"# On a GPU\n\n{date.today()}, {Machine().describe()}, commit {commit}, `make gpu`.")
        say("Device times are medians of replayed CUDA graphs.\n")
        for name, section in SECTIONS.items():
            if part not in (None, section.part):
                continue
            for line in printed(name, section, failed):
                say(line)
                lines.append(line)
        say("\n".join(summary(lines, failed)))
        say("\n".join(["", *results.write(out, commit, lines, verdicts(lines)), "", *results.predictions()]))
    print(f"written to {out}")
    return 1 if failed else 0


def printed(name: str, section: Section, failed: list[str]) -> Iterator[str]:
    """Yield the section's lines as it prints them, within its time. Adds its name to `failed` if it ended in error."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        cut_off = threading.Timer(section.seconds, os.killpg, (process.pid, signal.SIGKILL))  # pytest has workers
        cut_off.start()
        assert process.stdout is not None
        yield from (line.rstrip("\n") for line in process.stdout)
        process.wait()
        in_time = cut_off.is_alive()
        cut_off.cancel()
    if not in_time:
        yield f"\nCut off after {section.seconds} s.\n"
    if process.returncode:
        failed.append(name)


def verdicts(lines: list[str]) -> list[dict[str, str | bool]]:
    """Return every line that compares a figure with its target, as fields."""
    from benchmarks.kernels.measure import HOLDS, MISSED

    found: list[dict[str, str | bool]] = []
    for line in lines:
        if line.startswith((HOLDS, MISSED)):
            figure, _, bound = line.partition(": ")[2].rpartition("; asked: ")
            what, _, value = figure.rpartition(": ")
            found.append({"what": what, "figure": value, "asked": bound, "holds": line.startswith(HOLDS)})
    return found


def summary(lines: list[str], failed: list[str]) -> list[str]:
    """Return every line that compares a figure with its target, and the names of incomplete sections."""
    from benchmarks.kernels.measure import HOLDS, MISSED

    found = [line for line in lines if line.startswith((HOLDS, MISSED))]
    held = sum(line.startswith(HOLDS) for line in found)
    missing = f"Not whole: {', '.join(failed)}." if failed else "Every section came to its end."
    return ["", "## What was asked", "", f"{held} of {len(found)} hold. {missing}", "", *found]


if __name__ == "__main__":
    sys.exit(main())
