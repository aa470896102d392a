"""The `loraplex engine list | drain | resume | history` commands: the engines behind a gateway."""

from datetime import UTC, datetime
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, again, examples
from loraplex.commands.output import json_option, print_json, print_table

QUEUE_COLUMNS = ("time", "waiting", "on_engines")
# Figures of a sample: column, field, and factor.
FIGURES = (
    ("kv_%", "kv_used", 100),
    ("pages_%", "pages_used", 100),
    ("hits_%", "hits", 100),
    ("tokens/s", "tokens", 1),
    ("loads/min", "loads", 1),
    ("evictions/min", "evictions", 1),
)
SAMPLE_COLUMNS = (
    *("time", "running", "waiting", "in_flight", "kv_%", "pages_%", "tokens/s", "hits_%"),
    *("loads/min", "evictions/min"),
)


@click.group()
def engines() -> None:
    """List, drain and resume a gateway's engines, and show their history."""


@engines.command("list", epilog=examples("loraplex engine list"))
@json_option
@admin_options
def list_all(as_json: bool, gateway: Gateway) -> None:
    """List the gateway's engines with their state, requests and adapters."""
    rows = gateway.run(lambda client: client.engines())
    if as_json:
        print_json(rows)
        return
    print_table(
        [engine_state(row) for row in rows], ("url", "kind", "state", "in_flight", "waiting", "adapters", "reason")
    )


@engines.command("drain", epilog=examples("loraplex engine drain http://10.0.0.7:8001"))
@click.argument("url")
@admin_options
def drain(url: str, gateway: Gateway) -> None:
    """Stop new requests to the engine at URL; its running requests finish. `loraplex engine resume` ends the drain."""
    engine = gateway.run(lambda client: client.drain_engine(url))
    at = datetime.fromisoformat(engine["drained"]["at"]).strftime("%H:%M:%S") if engine["drained"] else "now"
    click.echo(f"drained {url} since {at} UTC; it still runs {engine['in_flight']} requests of this gateway process")
    click.echo(f"next: {again(f'loraplex engine resume {url}')}", err=True)


@engines.command("resume", epilog=examples("loraplex engine resume http://10.0.0.7:8001"))
@click.argument("url")
@admin_options
def resume(url: str, gateway: Gateway) -> None:
    """Send new requests to the drained engine at URL again."""
    gateway.run(lambda client: client.resume_engine(url))
    click.echo(f"resumed {url}")


@engines.command(
    "history",
    epilog=examples("loraplex engine history http://10.0.0.7:8001", "loraplex engine history --last 12 --json"),
)
@click.argument("url", required=False)
@click.option("--last", type=click.IntRange(1, 720), default=20, show_default=True, help="Newest samples to print.")
@json_option
@admin_options
def history(url: str | None, last: int, as_json: bool, gateway: Gateway) -> None:
    """Show samples of the last hour, one every 5 s, of the engine at URL, or without it of the queue.

    The history is in the memory of the gateway process that answers.
    """
    query = {} if url is None else {"url": url}
    found = gateway.run(lambda client: client.call("GET", "/admin/api/engines/history", params=query))
    found["samples"] = found["samples"][-last:]
    if as_json:
        print_json(found)
        return
    if (utilisation := found.get("utilisation")) is not None:
        click.echo(f"utilisation of the device in the last minute: {100 * utilisation:.1f} %")
    print_table([_sample(row) for row in found["samples"]], QUEUE_COLUMNS if url is None else SAMPLE_COLUMNS)
    if found["changes"]:
        click.echo()
        print_table([row | {"changed_at": row["at"]} for row in found["changes"]], ("changed_at", "state", "reason"))


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    """Return a sample as a row of a table, with shares in percent."""
    at = datetime.fromtimestamp(row["at"], UTC).strftime("%H:%M:%S")
    shown = row | {"time": at, "on_engines": row.get("inside")}
    for name, field, factor in FIGURES:
        value = row.get(field)
        shown[name] = None if value is None else f"{factor * value:.1f}"
    return shown


def engine_state(row: dict[str, Any]) -> dict[str, Any]:
    """Return an engine of the API as a row of a table."""
    if row["drained"]:
        state = "drained"
    elif row["healthy"] and not row["available"]:
        state = "breaker open"
    else:
        state = row["health"]
    return {
        **{name: row[name] for name in ("url", "kind", "in_flight")},
        "state": state,
        "waiting": row["state"].get("waiting", 0),
        "adapters": len(row["resident"]),
        "reason": row["reason"] or "-",
    }
