"""`python -m benchmarks.kernels.run`: measures every kernel on this machine's GPU and prints the tables.

Without a GPU it says so and exits with 2. `--dry-run` checks each kernel on a small shape instead, in Triton's
interpreter if there is no GPU; it measures nothing.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

BENCHMARKS = ("segmented_lora", "paged_attention", "fused")


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
    modules = [importlib.import_module(f"benchmarks.kernels.bench_{name}") for name in options.only or BENCHMARKS]
    if options.dry_run:
        device = torch.device("cuda" if has_gpu else "cpu")
        for module in modules:
            module.dry_run(device, torch.bfloat16 if has_gpu else torch.float16)
            where = "on the GPU" if has_gpu else "in the interpreter (no GPU here)"
            print(f"{module.TITLE}: equal to the reference {where}; nothing was measured")
        return 0

    from benchmarks.kernels.measure import bandwidth, matrix_rate, measure, table

    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "bandwidth": bandwidth(),
        "matrix_rate": matrix_rate(),
    }
    print(f"{report['device']}, torch {report['torch']}, triton {report['triton']}")
    print(f"copy {bandwidth() / 1e12:.2f} TB/s, bf16 matrix product {matrix_rate() / 1e12:.0f} TFLOP/s\n")
    for module in modules:
        rows = []
        for work in module.works(options.quick):
            rows.append(measure(work))
            del work
            torch.cuda.empty_cache()
        print(table(module.TITLE, rows) + "\n", flush=True)
        report[module.TITLE] = [asdict(row) for row in rows]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
