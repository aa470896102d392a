"""The CPUs that a process may use, and thread teams smaller than requested."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.threads import usable_cpus

AFFINITY = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, AFFINITY),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, AFFINITY),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/pod/x\n", "sys/fs/cgroup/pod/cpu.max": "90000 100000\n",
          "sys/fs/cgroup/pod/x/cpu.max": "max 100000"}, 1),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, AFFINITY),
        ({"proc/self/cgroup": "nonsense\n\x00", "sys/fs/cgroup/cpu.max": "a b c\n"}, AFFINITY),
    ],
)  # fmt: skip
def test_a_quota_of_either_version_lowers_the_affinity(files: dict[str, str], cpus: int, tmp_path: Path) -> None:
    assert usable_cpus(write(tmp_path, files)) == cpus


SMALLER_TEAM = """
import torch
torch.set_num_threads(4)
from kernels.cpu import native, native_build
from kernels.weights import dense
from tests.kernels.cpu.test_native import make_batch, normal
ops = native.NativeOps(native_build.load())
assert ops.threads == 4
weight, x = normal(96, 64), normal(40, 64)
y = ops.linear(x, ops.pack(dense(weight)), None, ops.step_tables(make_batch([40], [40], 16), None))
torch.testing.assert_close(y, x @ weight.T, atol=1e-4, rtol=1e-4)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "limit", [{"OMP_THREAD_LIMIT": "1"}, pytest.param({"OMP_DYNAMIC": "true"}, marks=pytest.mark.slow)]
)
def test_fewer_threads_than_asked_for_end_the_step_all_the_same(limit: dict[str, str]) -> None:
    """The step ends with fewer threads than requested; a barrier of 4 would never release without the missing ones."""
    subprocess.run([sys.executable, "-c", SMALLER_TEAM], env=os.environ | limit, check=True, timeout=100)
