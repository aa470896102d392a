"""Terminal output of `loraplex up`: one line per step on stderr (with a spinner on a terminal), the summary on stdout.

Also the progress bar of `loraplex engine`.
"""

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from engine.progress import StartProgress, describe

if TYPE_CHECKING:
    from loraplex.up.demo_tenants import DemoTenant


log = logging.getLogger(__name__)

# Time between lines of a phase's progress in a log.
LOG_SECONDS = 5.0
QUESTION = "Why is the sky blue?"


@contextmanager
def start_progress() -> Iterator[StartProgress]:
    """Yield a function that shows the phases of an engine's start on stderr: bars on a terminal, else log lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLog()
        return
    bars = Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase)
        bars.update(tasks[phase], description=describe(phase, done, total), completed=done, total=total)
        # Between phases and after the last nothing is drawn, so that other output is not disturbed.
        if done < total:
            bars.start()
        else:
            bars.update(tasks[phase], visible=False)
            bars.stop()

    try:
        yield show
    finally:
        bars.stop()


class ProgressLog:
    """Progress as log lines: one for the end of each phase, and one every `LOG_SECONDS` before."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            log.info("%s", describe(phase, done, total))
            self._next = now + LOG_SECONDS


class Display:
    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show a running step, and its duration on success; yield a function that updates its progress line."""
        started = time.monotonic()
        with self.console.status(f"{title} ...") as status:
            yield status.update
        self.console.print(f"[green]✓[/] {title} [dim]({time.monotonic() - started:.1f} s)[/]", soft_wrap=True)

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
