"""The kernel tests, compiled for the GPU, and the figures of each kernel alone."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.kernels import run
from benchmarks.kernels.measure import asked


def tests(machine: Machine) -> Iterator[str]:
    """Run the tests that also run in the interpreter, and their bf16 twins. A dry run takes one file's quickest tests.

    pytest gets its own configuration: the suite's requires plugins that a bare machine lacks.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "--import-mode", "importlib"]
    command += ["-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    if machine.device.type == "cpu":
        command += ["tests/kernels/gpu/test_fused.py", "-k", "test_bad_arguments_are_named"]
    else:
        # Only the engine tests marked for a GPU: the others need the interpreter.
        graphs = "tests/engine/execution/test_graphs.py::test_captured_graphs_answer_as_eager_steps"
        command += [f"{graphs}_while_adapters_take_each_others_pages"]
        command += ["tests/adapters/tiers/test_device_pool.py::test_pages_on_a_gpu"]
        command += ["tests/kernels", "-m", "not slow", "--ignore", "tests/kernels/cpu/test_native.py"]
        command += ["--ignore", "tests/kernels/gpu/test_compiles.py"]
        if importlib.util.find_spec("xdist"):
            command += ["-n", "12"]  # most of the time is compilation
    environment = {**os.environ, "PYTHONPATH": "."}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    yield f"exit status {ended.returncode}"
    yield ""
    yield from (f"    {line}" for line in (ended.stdout + ended.stderr).splitlines()[-15:])
    yield ""
    yield asked("pytest's exit status", ended.returncode, most=0)


def figures(machine: Machine) -> Iterator[str]:
    if machine.device.type == "cpu":
        return run.check(run.BENCHMARKS, machine.device, torch.float16)
    return run.measure_all(run.BENCHMARKS)
