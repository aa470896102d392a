"""Terminal output of `loraplex up`: one line per step on stderr (with a spinner on a terminal), the summary on stdout.

Also the progress bar of `loraplex engine`.
"""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

if TYPE_CHECKING:
    from loraplex.up.demo_tenants import DemoTenant


QUESTION = "Why is the sky blue?"


@contextmanager
def loading_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (label, bytes done, total bytes) that draws a bar on stderr, on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Loading weights", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if done == total:
                bar.stop()

        yield show


class Display:
    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a running step, and its duration on success; yield a function that updates its progress line."""
        started = time.monotonic()
        with self.console.status(f"{what} ...") as status:
            yield status.update
        self.console.print(f"[green]✓[/] {what} [dim]({time.monotonic() - started:.1f} s)[/]", soft_wrap=True)

    def note(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def stopping(self) -> None:
        self.console.print("Stopping (Ctrl-C again to stop at once)", soft_wrap=True)

    def stopping_part(self, name: str) -> None:
        waits = ": waits for running answers to end" if name == "gateway" else ""
        self.console.print(f"  {name}{waits}", soft_wrap=True)

    def stopped(self) -> None:
        self.console.print("Stopped", soft_wrap=True)

    def banner(self, gateway: str, base_model: str, data_dir: Path) -> None:
        click.echo(
            f"\nLoraplex serves {base_model}\n"
            f"  Gateway    {gateway}/v1\n"
            f"  Dashboard  {gateway}/admin/   (log in with the admin key in {data_dir / 'local.json'})\n"
            f"  Next       loraplex tenant create NAME --data-dir {shlex.quote(str(data_dir))}\n"
            "\nCtrl-C stops everything."
        )

    def demo_banner(self, gateway: str, admin_key: str, base_model: str, tenants: "Sequence[DemoTenant]") -> None:
        """Print the demo's summary.

        The curl command stays on one line in any terminal, because it must work when pasted.
        """
        lines = [f"\nLoraplex serves {base_model}", f"  Gateway    {gateway}/v1", ""]
        for tenant in tenants:
            lines += [f"  Tenant     {tenant.name}", f"    key      {tenant.api_key}"]
            lines += [f"    adapter  {model}" for model in tenant.models] + [""]
        first = tenants[0]
        ask = {
            "model": next(iter(first.models), base_model),
            "temperature": 0,
            "messages": [{"role": "user", "content": QUESTION}],
        }
        lines += [
            "Try it:",
            f"curl -s {gateway}/v1/chat/completions -H 'Authorization: Bearer {first.api_key}'"
            f" -H 'Content-Type: application/json' -d '{json.dumps(ask)}'",
            "",
            f"  Dashboard  {gateway}/admin/   (log in with the admin key)",
            f"  Admin key  {admin_key}",
            "",
            "Ctrl-C stops everything.",
        ]
        click.echo("\n".join(lines))
