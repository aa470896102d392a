"""The `loraplex webhook` and `loraplex events` commands: events, and the webhooks and addresses that receive them."""

import json
from typing import Any
from urllib.parse import quote

import click

from loraplex.commands.common import Gateway, admin_options, again, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.values import Moment, Words, given
from wire.money import exact_money

# Keys of event data that hold micro-units.
MONEY = ("budget", "spent")


@click.group()
def webhook() -> None:
    """Send events to webhooks and e-mail addresses."""


@webhook.command(
    "set",
    epilog=examples(
        "loraplex webhook set pager https://alerts.example.com/loraplex",
        "loraplex webhook set acme mailto:it@acme.example --tenant acme --types budget.threshold,budget.exhausted",
    ),
)
@click.argument("name")
@click.argument("url")
@click.option("--types", type=Words(), help="Events to send, comma-separated, such as `engine.down`; default: all.")
@click.option("--tenant", help="Send only this tenant's events, and only to a public address.")
@json_option
@admin_options
def set_webhook(name: str, url: str, as_json: bool, gateway: Gateway, **fields: Any) -> None:
    """Send events to URL (https:// or mailto:), under the NAME. Prints the secret of a new webhook, once."""
    row = gateway.run(lambda client: client.set_webhook(name, url=url, **given(fields)))
    if as_json:
        print_json(row)
        return
    click.echo(f"set the webhook {name}; to try it: {again(f'loraplex webhook test {name}')}")
    if "secret" in row:
        click.echo(f"secret of its signatures: {row['secret']}")


@webhook.command("list", epilog=examples("loraplex webhook list"))
@json_option
@admin_options
def list_webhooks(as_json: bool, gateway: Gateway) -> None:
    """List the webhooks, with the result of their last delivery."""
    rows = gateway.run(lambda client: client.webhooks())
    if as_json:
        print_json(rows)
        return
    shown = [row | {"types": ",".join(row["types"]) if row["types"] else "all"} for row in rows]
    print_table(shown, ("name", "url", "tenant", "types", "delivered_at", "failures", "error"))


@webhook.command("show", epilog=examples("loraplex webhook show pager"))
@click.argument("name")
@json_option
@admin_options
def show(name: str, as_json: bool, gateway: Gateway) -> None:
    """Show the webhook NAME with the result of its last delivery."""
    row = gateway.run(lambda client: client.call("GET", f"/admin/api/webhooks/{quote(name, safe='')}"))
    if as_json:
        print_json(row)
        return
    for field, value in row.items():
        if field != "object":
            shown = ",".join(value) if isinstance(value, list) else value
            click.echo(f"{field + ':':<15}{'-' if shown is None else shown}")


@webhook.command("test", epilog=examples("loraplex webhook test pager"))
@click.argument("name")
@admin_options
def test(name: str, gateway: Gateway) -> None:
    """Send a test event to the webhook NAME now."""
    answer = gateway.run(lambda client: client.test_webhook(name))
    if not answer["ok"]:
        raise click.ClickException(f"the webhook {name} failed: {answer['error']}")
    click.echo(f"the webhook {name} accepted the event")


@webhook.command("delete", epilog=examples("loraplex webhook delete pager"))
@click.argument("name")
@admin_options
def delete(name: str, gateway: Gateway) -> None:
    """Delete the webhook NAME with the events that wait for it."""
    gateway.run(lambda client: client.delete_webhook(name))
    click.echo(f"deleted the webhook {name}")


@click.command(
    epilog=examples(
        "loraplex events --since 7d",
        "loraplex events --tenant acme --type budget",
        "loraplex events --type engine.down --json",
    )
)
@click.option("--tenant", help="Only events of this tenant; also accepts a deleted tenant.")
@click.option("--type", "type_", help="Only this type, such as `engine.down`, or all of a kind: budget, engine, key.")
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum entries.")
@click.option("--after", help="Only events older than the one with this id: the next page.")
@json_option
@admin_options
def events(as_json: bool, gateway: Gateway, type_: str | None, **query: Any) -> None:
    """Show events, newest first: budgets, keys, engines, adapters, with the state of their deliveries."""
    answer = gateway.run(lambda client: client.list_events(**given(query | {"type": type_})))
    if as_json:
        print_json(answer)
        return
    print_table([_shown(row) for row in answer["data"]], ("created_at", "type", "tenant", "data", "deliveries"))
    if answer["has_more"]:
        click.echo(f"older events: --after {answer['data'][-1]['id']}", err=True)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    data = " ".join(f"{name}={_value(name, value)}" for name, value in row["data"].items())
    return row | {"data": data, "deliveries": ",".join(f"{to}:{state}" for to, state in row["deliveries"].items())}


def _value(name: str, value: Any) -> str:
    if name in MONEY:
        return exact_money(value)
    return value if isinstance(value, str) else json.dumps(value)
