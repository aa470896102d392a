"""The kernel benchmarks run on any machine: measured on a GPU, checked against the reference elsewhere."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import results
from benchmarks.gpu.__main__ import SECTIONS
from benchmarks.gpu.decode import PAGE_RANK
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.served import RANKS, differing
from benchmarks.gpu.whole_engine import engine_config
from benchmarks.kernels import run
from engine.sizing import estimate
from engine.sizing_speed import ExpectedLoad

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu  # elsewhere, the report's dry run below does the same
@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_dry_run(name, device):
    module = importlib.import_module(f"benchmarks.kernels.bench_{name}")
    module.dry_run(device, torch.bfloat16 if device.type == "cuda" else torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run"])
    assert run.main() == 2
    assert "No GPU here: nothing was measured." in capsys.readouterr().err


BLOCK = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"redis", "sqlalchemy", "msgspec", "llguidance", "gguf"}:
            raise ImportError(f"{name} is not on a bare machine with a GPU")
sys.meta_path.insert(0, Blocked())
sys.argv = ["gpu", "--dry-run", "--out", OUT]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_every_section_of_the_gpu_report_runs_dry_without_the_gateways_packages(tmp_path):
    ended = run_dry(f"OUT = {str(tmp_path / 'gpu.md')!r}\n{BLOCK}")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "FAILED" not in ended.stdout
    assert ended.stdout.count("| as peft") == 2
    assert ended.stdout.count("equal to the reference") == len(run.BENCHMARKS)
    assert [f"## {section.title}" in ended.stdout for section in SECTIONS.values()] == [True] * len(SECTIONS)
    written = json.loads((tmp_path / "gpu.json").read_text())
    columns = {column for table in written["tables"] for column in table["columns"]}
    assert {"step, ms", "floor, ms", "of the floor", "tokens/s", "of the base"} <= columns
    assert any("prefill of 50 tokens, of the matrix rate" in verdict["what"] for verdict in written["verdicts"])
    for what in (
        "streams and arriving prompts, of the floor",
        "contexts 5 to 200 as served, of the memory's floor",
        "first token of a prompt of 40, of the floor",
        "first token of a cached prompt, of a new one",
    ):
        assert any(verdict["what"] == what for verdict in written["verdicts"]), what
    assert_rows(written["tables"], "tokens/s", ["base", "contexts 5 to 200", "2 adapters of rank 16"])
    assert_rows(written["tables"], "ms", ["prompt of 40, new", "prompt of 40, again, 32 cached"])
    assert_rows(written["tables"], "p50, ms", ["known", "to be loaded"])
    page = (tmp_path / "gpu.md").read_text()
    assert "![served](gpu-served.svg)" in page
    assert "<rect" in (tmp_path / "gpu-served.svg").read_text()
    assert "| rank 16 | 99.6 % |" in page, "the predictions"
    assert "Not measured: the engine's HTTP server needs packages" in page


def assert_rows(tables, column, names):
    """Assert that tables with the column have these rows, each with a floor and what it reaches of it."""
    rows = {}
    for table in tables:
        if column in table["columns"] and "floor, ms" in table["columns"]:
            rows |= {row[0]: dict(zip(table["columns"], row, strict=False)) for row in table["rows"]}
    for name in names:
        assert float(rows[name]["floor, ms"]) > 0, name
        share = rows[name].get("of the floor") or rows[name]["p50, of the floor"]
        assert share.endswith("%"), name


@pytest.mark.heavy
@pytest.mark.usefixtures("starts_servers")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_section_over_http_runs_dry():
    ended = run_dry(
        "import runpy, sys; sys.argv = ['gpu', '--dry-run', '--section', 'http']; "
        "runpy.run_module('benchmarks.gpu', run_name='__main__')"
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "| 3, 2 adapters of rank 16 |" in ended.stdout
    assert "first token of a prompt of 40 beside 3 streams" in ended.stdout


def test_a_reports_tables_become_json_and_charts(tmp_path):
    page = """## Decode
| batch | KV | step, ms | floor, ms | of the floor |
|---|---|---|---|---|
| 1 | bf16 | 4.0 | 3.5 | 88% |
| 8 | bf16 | 4.2 | 3.6 | 86% |
text
## Served
| 64 streams | tokens/s |
|---|---|
| base | 9000 |
"""
    shown = results.write(tmp_path / "r.md", "abc", page.splitlines(), [])
    assert shown == ["![decode](r-decode.svg)", "![served](r-served.svg)"]
    written = json.loads((tmp_path / "r.json").read_text())
    assert [table["section"] for table in written["tables"]] == ["Decode", "Served"]
    assert written["tables"][0]["rows"] == [["1", "bf16", "4.0", "3.5", "88%"], ["8", "bf16", "4.2", "3.6", "86%"]]
    assert "bf16 (floor)" in (tmp_path / "r-decode.svg").read_text()


def test_the_measured_engine_holds_all_streams_and_adapters_of_a_line(tmp_path):
    """Streams that wait for blocks or pages decode after the others, beside fewer than the line says."""
    machine = Machine()
    streams = max(machine.engine_batches)
    prompts = differing(machine, streams)
    assert (len(prompts), min(prompts), max(prompts)) == (64, 128, 32_768)
    (tmp_path / "config.json").write_text(json.dumps(machine.model))
    config = engine_config(machine, tmp_path, machine.dtype, max(RANKS), prefix_caching=True)
    memory = estimate(config, "h200", ExpectedLoad(adapters=streams, rank=16, prompt_tokens=64, output_tokens=8)).memory
    assert memory.context >= max(prompts) + machine.new_tokens + 2
    assert memory.kv_tokens >= sum(prompts) + streams * (machine.new_tokens + 2 + config.block_size)
    assert memory.num_pages >= streams // len(RANKS) * sum(RANKS) // PAGE_RANK


def test_each_call_of_make_gpu_takes_at_most_9_minutes():
    for part in (1, 2):
        assert sum(section.seconds for section in SECTIONS.values() if section.part == part) <= 530


@pytest.mark.parametrize(
    ("flags", "python"), [("--dry-run", ".venv/bin/python"), ("--part 1 --dry-run", ".venv/bin/python"), ("", "own")]
)
def test_a_dry_run_uses_the_projects_environment_and_a_gpu_the_machines_own_torch(flags, python):
    # `make test` passes its own flags and variables on in MAKEFLAGS.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", "gpu", "PYTHON=own", f"FLAGS={flags}"],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    *before, command = shown.stdout.splitlines()
    assert command.split() == [python, "-m", "benchmarks.gpu", *flags.split()]
    assert ("touch .venv/.installed" in before) == ("--dry-run" in flags), "an older environment is brought up to date"


def run_dry(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.gpu
@pytest.mark.slow
def test_figures(monkeypatch, tmp_path):
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["run", "--quick", "--json", str(report)])
    assert run.main() == 0
    assert "matrix_rate" in report.read_text()
