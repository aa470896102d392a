"""The kernel benchmarks run on any machine: measured on a GPU, checked against the reference elsewhere."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import SECTIONS
from benchmarks.kernels import run


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
sys.argv = ["gpu", "--dry-run"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_every_section_of_the_gpu_report_runs_dry_without_the_gateways_packages():
    ended = subprocess.run(
        [sys.executable, "-c", BLOCK], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "FAILED" not in ended.stdout
    assert ended.stdout.count("| as peft") == 2
    assert ended.stdout.count("equal to the reference") == len(run.BENCHMARKS)
    assert [f"## {section.title}" in ended.stdout for section in SECTIONS.values()] == [True] * len(SECTIONS)


@pytest.mark.gpu
@pytest.mark.slow
def test_figures(monkeypatch, tmp_path):
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["run", "--quick", "--json", str(report)])
    assert run.main() == 0
    assert "matrix_rate" in report.read_text()
