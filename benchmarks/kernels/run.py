"""`python -m benchmarks.kernels.run`: measurement of every kernel on this machine's GPU, printed as tables.

Without a GPU it prints a message and exits with 2. `--dry-run` checks each kernel on a small shape instead, in Triton's
interpreter if there is no GPU; it measures nothing.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BENCHMARKS = ("segmented_lora", "paged_attention", "fused", "sampling")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="one kernel file; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few cases of each")
    parser.add_argument("--dry-run", action="store_true", help="check small shapes, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()

    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.dry_run:
        print(
            "No GPU here: nothing was measured. `--dry-run` checks the kernels in Triton's interpreter.",
            file=sys.stderr,
        )
        return 2
    if not has_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    names = options.only or BENCHMARKS
    if options.dry_run:
        lines = check(names, torch.device("cuda" if has_gpu else "cpu"), torch.bfloat16 if has_gpu else torch.float16)
    else:
        lines = measure_all(names, options.quick, options.json)
    for line in lines:
        print(line, flush=True)
    return 0


def check(names: Sequence[str], device: "torch.device", dtype: "torch.dtype") -> Iterator[str]:
    """Check each kernel on a small shape against the reference. Raises AssertionError if they differ."""
    for name in names:
        module = importlib.import_module(f"benchmarks.kernels.bench_{name}")
        module.dry_run(device, dtype)
        where = "on the GPU" if device.type == "cuda" else "in the interpreter (no GPU here)"
        yield f"{module.TITLE}: equal to the reference {where}; nothing was measured"


def measure_all(names: Sequence[str], quick: bool = False, json_file: Path | None = None) -> Iterator[str]:
    """Yield tables as they are measured; `json_file` receives the figures at the end."""
    import torch

    from benchmarks.kernels.measure import bandwidth, header, line, matrix_rate, measure, verdicts

    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "bandwidth": bandwidth(),
        "matrix_rate": matrix_rate(),
    }
    yield f"{report['device']}, torch {report['torch']}, triton {report['triton']}"
    yield f"copy {bandwidth() / 1e12:.2f} TB/s, bf16 matrix product {matrix_rate() / 1e12:.0f} TFLOP/s"
    for name in names:
        module = importlib.import_module(f"benchmarks.kernels.bench_{name}")
        rows, found = [], []
        yield header(module.TITLE)
        for work in module.works(quick):
            rows.append(measure(work))
            yield line(rows[-1])
            found += verdicts(work, rows[-1])
            del work
            torch.cuda.empty_cache()
        report[module.TITLE] = [asdict(row) for row in rows]
        yield from ["", *found]
    if json_file:
        json_file.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    sys.exit(main())
