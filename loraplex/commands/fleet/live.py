"""The `loraplex status` and `loraplex top` commands: the service's state, once or live in the terminal."""

import asyncio
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.fleet.engines import engine_state
from loraplex.commands.fleet.fleet import waiting_text
from loraplex.commands.output import json_option, moment, print_json, table_lines
from loraplex.commands.values import Number

if TYPE_CHECKING:
    from loraplex.client import GatewayClient

# Period over which `top` measures the tenants' tokens. It is long because a usage row is written only when its
# request has ended.
RATE_SECONDS = 60
CLEAR = "\x1b[H\x1b[2J"
ENGINE_COLUMNS = ("engine", "state", "in_flight", "waiting", "adapters", "reason")


@click.command(epilog=examples("loraplex status", "loraplex status --json"))
@json_option
@admin_options
def status(as_json: bool, gateway: Gateway) -> None:
    """Show the gateway's version, the state of its parts, its engines and its queue.

    Exit code 1 if the gateway is not ready.
    """
    found = gateway.run(_read_status)
    if as_json:
        print_json(found)
    else:
        _print_status(gateway.url, found)
    if found["ready"]["status"] == "not ready":
        sys.exit(1)


def _print_status(url: str, status: dict[str, Any]) -> None:
    ready = status["ready"]
    click.echo(f"gateway {url}, version {status['version']}: {ready['status']}")
    for name, text in ready["parts"].items():
        since = f" since {moment(ready['since'][name])}" if name in ready["since"] else ""
        click.echo(f"  {name:15} {text}{since}")
    _print_lines(_engine_lines(status["engines"]))
    queue = status["queue"]
    click.echo(f"queue: {waiting_text(queue)}; {queue['inside']} requests of this gateway process are on engines")


@click.command(epilog=examples("loraplex top", "loraplex top --interval 5", "loraplex top --once"))
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--interval", type=Number(0.5, 60), default=2.0, show_default=True, help="Refresh interval in seconds.")
@click.option("--rows", type=click.IntRange(1, 1000), default=20, show_default=True, help="Maximum tenants in a frame.")
@admin_options
def top(once: bool, interval: float, rows: int, gateway: Gateway) -> None:
    """Show engines, tenants by tokens a second, and the queue, live. The key q, or Ctrl-C, ends it.

    Tokens a second are those of requests that were admitted in the last minute and have ended.
    """
    if once:
        _print_lines(gateway.run(lambda client: _frame(client, rows)))
        return
    try:
        with _keys():
            while True:
                lines = gateway.run(lambda client: _frame(client, rows))
                click.echo(CLEAR + "\n".join(lines) + "\n\nq: end")
                if _is_ended(interval):
                    return
    except (KeyboardInterrupt, click.Abort):
        return


async def _read_status(client: "GatewayClient") -> dict[str, Any]:
    version, ready, engines, queue = await asyncio.gather(
        client.version(), client.ready(), client.engines(), client.queue()
    )
    return {"version": version, "ready": ready, "engines": engines, "queue": queue}


async def _frame(client: "GatewayClient", rows: int) -> list[str]:
    """Return the lines of one frame."""
    now = datetime.now(UTC)
    since = (now - timedelta(seconds=RATE_SECONDS)).isoformat()
    found, usage = await asyncio.gather(_read_status(client), client.usage(since=since, group_by="tenant"))
    ready, queue = found["ready"], found["queue"]
    faults = [f"{name} {text}" for name, text in ready["parts"].items() if name in ready["since"]]
    head = f"{client.url}  {ready['status']}{': ' + ', '.join(faults) if faults else ''}  {now:%H:%M:%S} UTC"
    total = sum(row["completion_tokens"] for row in usage["data"]) / RATE_SECONDS
    places = f"{queue['inside']} of {queue['places']} places" if queue["places"] else f"{queue['inside']} on engines"
    return [
        head,
        f"{total:.1f} output tokens/s, {usage['total']['requests']} requests in {RATE_SECONDS} s, "
        f"{waiting_text(queue)}, {places}",
        "",
        *_engine_lines(found["engines"]),
        "",
        *_tenant_lines(usage["data"], queue["data"], rows),
    ]


def _engine_lines(engines: list[dict[str, Any]]) -> list[str]:
    if not engines:
        return ["no engine is known"]
    return table_lines([engine_state(row) | {"engine": row["url"]} for row in engines], ENGINE_COLUMNS)


def _tenant_lines(usage: list[dict[str, Any]], queue: list[dict[str, Any]], most: int) -> list[str]:
    """Return the lines of the tenants: by tokens per second, largest first, then tenants with waiting requests only."""
    waits = {row["tenant"]: row for row in queue}
    used = {row["tenant"]: row for row in usage}
    rows = []
    for name in dict.fromkeys([*used, *waits]):
        sums, wait = used.get(name, {}), waits.get(name, {})
        rows.append(
            {
                "tenant": name,
                "tokens_out/s": f"{sums.get('completion_tokens', 0) / RATE_SECONDS:.1f}",
                "tokens_in/s": f"{sums.get('prompt_tokens', 0) / RATE_SECONDS:.1f}",
                "requests": sums.get("requests", 0),
                "on_engines": wait.get("inside", 0),
                "waiting": wait.get("waiting", 0),
                "waiting_on_engines": wait.get("waiting_on_engines"),
                "longest_wait_s": f"{wait['waited']:.1f}" if wait.get("waited") else None,
            }
        )
    if not rows:
        return [f"no tenant had a request in {RATE_SECONDS} s"]
    rows.sort(key=lambda row: (-float(row["tokens_out/s"]), -row["waiting"], row["tenant"]))
    lines = table_lines(rows[:most], tuple(rows[0]))
    return lines if len(rows) <= most else [*lines, f"and {len(rows) - most} more tenants"]


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        click.echo(line)


@contextmanager
def _keys() -> Iterator[None]:
    """Switch the terminal to reading single keys, without waiting for Enter, during the block."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin, termios.TCSANOW)
        yield
    finally:
        # TCSADRAIN would wait for whoever reads the terminal, and Ctrl-C would not end the program.
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _is_ended(seconds: float) -> bool:
    """Wait for the seconds or the key q; return whether q was pressed."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False
