"""Pins of several engines: a GPU each, or disjoint shares of the CPUs."""

import os
from pathlib import Path

import pytest

from loraplex.up import device_assignment
from loraplex.up.device_assignment import Pin, PinError, choose_pins, divide, flag_value, usable_gpus

# Output of `nvidia-smi -L`; the second GPU is divided.
LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-5c2f)
GPU 1: NVIDIA H200 (UUID: GPU-91aa)
  MIG 1g.18gb     Device  0: (UUID: MIG-0d1e)
  MIG 1g.18gb     Device  1: (UUID: MIG-77bc)
"""


def threads(pin: Pin) -> str:
    return flag_value(" ".join(pin.flags), "--threads", "")


def test_an_engine_has_a_gpu_of_its_own():
    chosen = choose_pins(2, "", gpus=lambda: ["GPU-5c2f", "GPU-91aa", "GPU-3d00"])
    assert [dict(pin.environment) for pin in chosen] == [
        {"CUDA_VISIBLE_DEVICES": "GPU-5c2f"},
        {"CUDA_VISIBLE_DEVICES": "GPU-91aa"},
    ]
    assert [pin.cpus for pin in chosen] == [()] * 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_engines_of_one_machine_know_how_many_share_its_memory(device: str):
    flags = [" ".join(pin.flags) for pin in choose_pins(3, f"--device {device}", gpus=lambda: ["0", "1", "2"])]
    assert [flag_value(each, "--engines-on-host", "1") for each in flags] == ["3"] * 3


def test_more_engines_than_gpus_are_refused():
    with pytest.raises(PinError, match="--engines: expected at most 2, an engine for each GPU, got 3"):
        choose_pins(3, "--max-num-seqs 8", gpus=lambda: ["0", "1"])


@pytest.mark.parametrize("engine_args", ["--device cpu", "--device cuda --device=cpu", "--device simulated:4,0.1"])
def test_engines_on_the_cpu_divide_its_cores(engine_args: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    chosen = choose_pins(2, engine_args, gpus=lambda: ["0", "1"])
    assert sorted(cpu for pin in chosen for cpu in pin.cpus) == [0, 1, 2, 5]
    assert [(len(pin.cpus), threads(pin), dict(pin.environment)) for pin in chosen] == [(2, "2", {})] * 2


def test_a_quota_is_divided_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(device_assignment, "usable_cpus", lambda: 4)
    assert [(len(pin.cpus), threads(pin)) for pin in choose_pins(2, "")] == [(8, "2")] * 2


def test_one_engine_has_the_whole_machine():
    assert choose_pins(1, "", gpus=lambda: ["0", "1"]) == [Pin()]


def test_threads_of_a_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """CPU 2 is the second thread of CPU 0's core, as Linux numbers them; engines beyond the CPUs share one each."""
    monkeypatch.setattr(device_assignment, "_SYSTEM_CPUS", tmp_path)
    for cpu, core in enumerate((0, 1, 0, 1)):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{core}\n")
        (folder / "physical_package_id").write_text("0\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert [pin.cpus for pin in choose_pins(2, "--device cpu")] == [(0, 2), (1, 3)]
    assert divide((0, 2, 1), 2) == [(0,), (2, 1)]
    assert divide((4, 5), 3) == [(4,), (5,), (4,)]


@pytest.mark.parametrize(
    ("visible", "version", "found"),
    [
        (None, "2.9.0", ["GPU-5c2f", "MIG-0d1e", "MIG-77bc"]),
        ("3, GPU-91aa", "2.9.0", ["3", "GPU-91aa"]),
        ("1,-1,2", "2.9.0", ["1"]),
        ("", "2.9.0", []),
        ("0,1", "2.9.0+cpu", []),
    ],
)
def test_gpus_are_those_that_torch_would_use(
    visible: str | None, version: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(device_assignment.metadata, "version", lambda _: version)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert usable_gpus() == found
