"""The `loraplex whoami` command: the tenant's key in use, with the remaining amounts of its limits and budget."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from loraplex.commands.common import examples, find_gateway
from loraplex.commands.output import json_option, moment, print_json, print_table
from loraplex.up.datadir import DATA_DIR

PERIODS = {"minute": "this minute", "day": "today", "week": "this week", "month": "this month"}
PERIODS |= {"30 days": "in the last 30 days"}


@click.command(epilog=examples("loraplex whoami --api-key lpx_...", "LORAPLEX_API_KEY=lpx_... loraplex whoami --json"))
@click.option("--api-key", envvar="LORAPLEX_API_KEY", help="A tenant's key. [env: LORAPLEX_API_KEY]")
@click.option("--gateway", envvar="LORAPLEX_GATEWAY", help="The gateway's URL. [env: LORAPLEX_GATEWAY]")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=DATA_DIR,
    show_default=True,
    help="Data directory of `loraplex up`; its local.json has the gateway's URL if --gateway is not given.",
)
@json_option
def whoami(api_key: str | None, gateway: str | None, data_dir: Path, as_json: bool) -> None:
    """Show a tenant's key: its scopes, models and expiry, and what is left of its limits and budget."""
    if not api_key:
        raise click.UsageError("expected --api-key KEY, a tenant's key")
    found = find_gateway(gateway, api_key, data_dir, "--api-key").run(lambda client: client.own_key())
    if as_json:
        print_json(found)
        return
    lines = {
        "tenant": found["tenant"],
        "key": f"{found['id']} {found['label']}".rstrip(),
        "scopes": ", ".join(found["scopes"]),
        "models": "all of the tenant" if found["models"] is None else ", ".join(found["models"]),
        "expires": "never" if found["expires_at"] is None else moment(found["expires_at"]),
        "budget": "none" if found["budget"] is None else budget_text(found["budget"]),
    }
    for name, text in lines.items():
        click.echo(f"{name:8} {text}")
    if any(found["limits"].values()):
        click.echo()
        print_left(found["limits"])


def print_left(limits: dict[Any, dict[str, Any]]) -> None:
    """Print limits with their remaining amounts. limits: by owner, "key" or "tenant"; None prints no owner."""
    rows = [
        {"limit": name, "of": owner, "allowed": _amount(rest, "limit"), "left": _amount(rest, "remaining")}
        | {"resets": _wait(rest["resets_at"])}
        for owner, of_owner in limits.items()
        for name, rest in of_owner.items()
    ]
    print_table(rows, ("limit", *([] if None in limits else ["of"]), "allowed", "left", "resets"))


def budget_text(budget: dict[str, Any]) -> str:
    """Return a budget in one line: `12.40 of 50.00 EUR this month, resets 1 Dec`."""
    of = f"{budget['limit']} {budget['currency']}"
    if budget["spent"] is None:
        return f"{of} {PERIODS[budget['period']]}; the gateway cannot tell now what is left"
    at = datetime.fromisoformat(budget["resets_at"]).astimezone(UTC)
    return f"{budget['spent']} of {of} {PERIODS[budget['period']]}, resets {at.day} {at:%b}"


def _amount(rest: dict[str, Any], name: str) -> str | None:
    value = rest[name]
    return None if value is None else f"{value} {rest.get('currency', '')}".rstrip()


def _wait(resets_at: str | None) -> str | None:
    """Return the time until a limit is fully available again; None if it is now, or does not recover by time."""
    if resets_at is None:
        return None
    seconds = (datetime.fromisoformat(resets_at) - datetime.now(UTC)).total_seconds()
    if seconds < 1:
        return None
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"in {seconds / size:.0f} {unit}"
    return f"in {seconds:.0f} s"
