"""GPUs by name, for estimates: memory, bandwidth and rate of matrix products.

Sources: bandwidth and dense bf16 products from NVIDIA's data sheets of each card (products with fp32 accumulation,
without sparsity). Memory as the driver reports it, which is less than the name says on cards with error correction in
ordinary memory.
"""

from typing import NamedTuple

from kernels.roofline import Roofline

MIB, GB, TFLOPS = 1 << 20, 1e9, 1e12


class Gpu(NamedTuple):
    """A GPU. memory: bytes. roofline: bytes and operations per second at most."""

    title: str
    memory: int
    roofline: Roofline


def _gpu(title: str, mebibytes: int, gigabytes_per_second: float, teraflops: float) -> Gpu:
    return Gpu(title, mebibytes * MIB, Roofline(gigabytes_per_second * GB, teraflops * TFLOPS))


GPUS: dict[str, Gpu] = {
    "a10": _gpu("A10", 23_028, 600, 125),
    "a100-40gb": _gpu("A100 40 GB", 40_960, 1_555, 312),
    "a100": _gpu("A100 80 GB SXM", 81_920, 2_039, 312),
    "a6000": _gpu("RTX A6000", 49_140, 768, 154.8),
    "b200": _gpu("B200", 183_359, 8_000, 2_250),
    "h100-pcie": _gpu("H100 PCIe", 81_559, 2_000, 756),
    "h100": _gpu("H100 SXM", 81_559, 3_350, 989),
    "h200": _gpu("H200", 143_771, 4_800, 989),
    "l4": _gpu("L4", 23_034, 300, 121),
    "l40s": _gpu("L40S", 46_068, 864, 362),
    "rtx-4090": _gpu("RTX 4090", 24_564, 1_008, 165.2),
}
