"""The `loraplex engine list | drain | resume` commands: the engines behind a gateway."""

from datetime import datetime
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, again, examples
from loraplex.commands.output import json_option, print_json, print_table


@click.group()
def engines() -> None:
    """List, drain and resume a gateway's engines."""


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
