"""Products with FP8 and int8 weights beside dense ones: 8 bits by 8 bits, and weights widened in registers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.decode import groups_of
from benchmarks.gpu.machine import Machine
from benchmarks.kernels.measure import asked
from engine.model.families import parse_model_config
from kernels import reference
from kernels.gpu import quantised, scaled
from kernels.weights import FP8, LinearWeights, dense, fp8, int8_by_output

# Inputs that share a scale in checkpoints with blocks of 128 by 128 weights.
BLOCK = 128


def figures(machine: Machine) -> Iterator[str]:
    """Return the microseconds of each layer's products, by rows; products of 8 bits include the rounding of inputs."""
    c = parse_model_config(machine.model)
    counts = (1, machine.lora_batch, machine.prefill_tokens)
    is_scaled = machine.device.type == "cpu" or torch.cuda.get_device_capability() >= scaled.CAPABILITY
    yield "| layer | rows | dense, µs | FP8 by FP8 | FP8 widened | FP8 widened, blocks of 128 | int8 by int8 |"
    yield "|---|---|---|---|---|---|---|"
    sums: dict[tuple[str, int], float] = {}
    for name, (width, bounds) in groups_of(c).items():
        columns = {
            "dense": (reference.linear, _dense(machine, bounds[-1], width), machine.dtype),
            "scaled": (scaled.linear, _fp8(machine, bounds[-1], width), torch.bfloat16),
            "widened": (quantised.linear, _fp8(machine, bounds[-1], width), machine.dtype),
            "blocks": (quantised.linear, _fp8(machine, bounds[-1], width, BLOCK), machine.dtype),
            "int8": (scaled.linear, _int8(machine, bounds[-1], width), torch.bfloat16),
        }
        for rows in counts:
            found = []
            for column, (product, weights, dtype) in columns.items():
                if column == "scaled" and not is_scaled:
                    found.append("")
                    continue
                x = torch.randn(rows, width, dtype=dtype, device=machine.device)
                taken = _microseconds(machine, product, x, weights)
                sums[column, rows] = sums.get((column, rows), 0) + taken
                found.append(f"{taken:.1f}")
            yield f"| {name} | {rows} | {' | '.join(found)} |"
    yield ""
    fast = "scaled" if is_scaled else "widened"
    for name, column in ((f"FP8, {fast}", fast), ("int8", "int8")):
        for rows in counts:
            share = sums[column, rows] / sums["dense", rows]
            yield asked(f"{name}, {rows} rows, of the dense products' time", share, most=0.75)


def _microseconds(
    machine: Machine, product: Callable[[Tensor, LinearWeights], Tensor], x: Tensor, weights: list[LinearWeights]
) -> float:
    return 1000 * machine.milliseconds(*(lambda w=w: product(x, w) for w in weights))


def _dense(machine: Machine, rows: int, columns: int) -> list[LinearWeights]:
    shape = rows, columns
    return [
        dense(torch.randn(shape, dtype=machine.dtype, device=machine.device).mul_(columns**-0.5))
        for _ in range(machine.copies)
    ]


def _fp8(machine: Machine, rows: int, columns: int, group: int = 0) -> list[LinearWeights]:
    """Return sets of weights, so that no set is in the L2 cache when its product runs."""
    groups = -(-columns // group) if group else 1
    scales = torch.full((rows, groups), columns**-0.5, device=machine.device)
    return [
        fp8(torch.randn(rows, columns, device=machine.device).to(FP8), scales, group) for _ in range(machine.copies)
    ]


def _int8(machine: Machine, rows: int, columns: int) -> list[LinearWeights]:
    scales = torch.full((rows, 1), columns**-0.5 / 127, device=machine.device)
    return [
        int8_by_output(torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=machine.device), scales)
        for _ in range(machine.copies)
    ]
