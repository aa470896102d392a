"""`loraplex price`: what tokens cost, in the deployment's currency per million tokens."""

from decimal import Decimal

import click

from loraplex.commands.common import Gateway, admin_options, print_table
from loraplex.commands.values import MICRO_UNITS, Money, given


@click.group()
def price() -> None:
    """Set, list and delete the prices of models' tokens."""


@price.command("set")
@click.argument("model")
@click.option("--input", "input_price", type=Money(), required=True, help="Of a million prompt tokens, like 0.50.")
@click.option("--output", "output_price", type=Money(), required=True, help="Of a million completion tokens.")
@click.option("--cached", "cached_price", type=Money(), help="Of a million cached prompt tokens; default: --input.")
@admin_options
def set_price(model: str, input_price: int, output_price: int, cached_price: int | None, gateway: Gateway) -> None:
    """Set the price of MODEL: an adapter as tenant/name, the base model, or '*' for all others."""
    prices = given({"input": input_price, "output": output_price, "cached": cached_price})
    gateway.run(lambda client: client.set_price(model, **prices))
    click.echo(f"set the price of {model}")


@price.command("list")
@admin_options
def list_all(gateway: Gateway) -> None:
    """List the prices, in the currency per million tokens."""
    rows = gateway.run(lambda client: client.prices())
    columns = ("input", "cached", "output")
    amounts = [{name: f"{Decimal(row[name]) / MICRO_UNITS:f}" for name in columns} for row in rows]
    print_table([row | amount for row, amount in zip(rows, amounts, strict=True)], ("model", *columns, "updated_at"))


@price.command("delete")
@click.argument("model")
@admin_options
def delete(model: str, gateway: Gateway) -> None:
    """Delete the price of MODEL: from now on that of what is less particular holds."""
    gateway.run(lambda client: client.delete_price(model))
    click.echo(f"deleted the price of {model}")
