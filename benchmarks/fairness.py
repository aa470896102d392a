"""Fairness between tenants through the whole service, with the fair scheduler and with `--scheduler fcfs` in turn.

    python -m benchmarks.fairness --scenarios weights flood late-tenant --repeat 3

Starts `loraplex up --demo` for each scheduler, creates the scenario's tenants with its weights and without rate limits,
and runs `loraplex bench --scenario`. Prints a Markdown table and keeps the JSON reports in --folder.
"""

import argparse
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.hostile.place import of_stack
from testing.stack import ROOT, Stack, data_dir, loraplex

SCENARIOS = ROOT / "examples" / "scenarios"
SCHEDULERS = ("fair", "fcfs")
NO_LIMITS = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 10**4}
# Answers that are still being generated are cut off after this time; a late tenant's are short.
TIMEOUT_SECONDS = 60
COLUMNS = (
    "scenario",
    "scheduler",
    "run",
    "tenant",
    "answers",
    "errors",
    "TTFT p50",
    "TTFT p99",
    "p99 over p99 without the others",
    "of its share",
    "Jain",
    "tokens/s of all",
)


def measure(scenario: str, scheduler: str, folder: Path, repeat: int) -> dict[str, Any]:
    """Return the report of a scenario on a stack of its own. Raises RuntimeError if the benchmark fails."""
    place_of = folder / f"{scenario}-{scheduler}"
    text = (SCENARIOS / f"{scenario}.toml").read_text()
    file = place_of / "scenario.toml"
    stack = Stack(data_dir(place_of), "--demo", "--engine-args", f"--scheduler {scheduler}")
    try:
        place = of_stack(stack.wait_ready())
        file.write_text(text.replace("\nseconds =", f"\ntimeout = {TIMEOUT_SECONDS}\nseconds =", 1))
        tenants = [
            {
                "name": tenant["name"],
                "api_key": place.tenant(tenant["name"], weight=tenant.get("weight", 1.0), **NO_LIMITS),
                "models": [place.base_model],
            }
            for tenant in tomllib.loads(text)["tenants"]
        ]
        (place_of / "tenants.json").write_text(json.dumps({"gateway": place.url, "tenants": tenants}))
        out = folder / f"{scenario}-{scheduler}.json"
        flags = ("--scenario", file, "--tenants", place_of / "tenants.json", "--json", out, "--repeat", repeat)
        done = loraplex("bench", *map(str, flags), "--accept-errors", "--no-overhead", timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{scenario}: {done.stderr}")
        report: dict[str, Any] = json.loads(out.read_text())
        return report
    finally:
        stack.stop()


def rows(scenario: str, scheduler: str, report: dict[str, Any]) -> list[str]:
    """Return a line of the table for each run and tenant."""
    lines = []
    for number, run in enumerate(report["runs"], 1):
        fairness = run["fairness"]
        for name, tenant in run["tenants"].items():
            ratio = (report["isolation"] or {}).get(name, {}).get("ttft_p99_without")
            p99 = tenant["ttft"]["p99"]
            isolation = f"{p99 / ratio:.2f}" if ratio and p99 else ""
            cells = (
                scenario,
                scheduler,
                str(number),
                name,
                str(tenant["completed"]),
                json.dumps(tenant["errors"]),
                seconds(tenant["ttft"]["p50"]),
                seconds(p99),
                isolation,
                percent(fairness["tenants"][name].get("of_entitled")),
                percent(fairness.get("jain_entitled")),
                f"{run['all']['output_tokens_per_second']:.0f}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=["weights", "flood", "late-tenant"])
    parser.add_argument("--schedulers", nargs="+", default=list(SCHEDULERS), choices=SCHEDULERS)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fairness-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for scenario in options.scenarios:
        for scheduler in options.schedulers:
            report = measure(scenario, scheduler, folder, options.repeat)
            print("\n".join(rows(scenario, scheduler, report)), flush=True)


if __name__ == "__main__":
    main()
