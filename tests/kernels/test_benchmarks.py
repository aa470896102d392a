"""The kernel benchmarks run on any machine: measured on a GPU, checked against the reference elsewhere."""

import importlib
import sys

import pytest
import torch

from benchmarks.kernels import run


@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_dry_run(name, device):
    module = importlib.import_module(f"benchmarks.kernels.bench_{name}")
    module.dry_run(device, torch.bfloat16 if device.type == "cuda" else torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run"])
    assert run.main() == 2
    assert "No GPU here: nothing was measured." in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_figures(monkeypatch, tmp_path):
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["run", "--quick", "--json", str(report)])
    assert run.main() == 0
    assert "matrix_rate" in report.read_text()
