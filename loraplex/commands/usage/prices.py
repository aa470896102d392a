"""The `loraplex price` commands: prices of tokens, in the deployment's currency per million tokens."""

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.values import Money, given
from wire.money import MICRO_UNITS, exact_money

AMOUNTS = ("input", "cached", "output")
# The API accepts no higher price.
PRICE = Money(most=1000 * MICRO_UNITS, per=" per million tokens")


@click.group()
def price() -> None:
    """Set, list and delete the prices of models' tokens."""


@price.command(
    "set",
    epilog=examples(
        "loraplex price set '*' --input 0.20 --output 0.60",
        "loraplex price set acme/pirate --input 0.50 --output 1.50 --cached 0.05",
    ),
)
@click.argument("model")
@click.option(
    "--input", "input_price", type=PRICE, required=True, help="Price per million prompt tokens, such as 0.50."
)
@click.option("--output", "output_price", type=PRICE, required=True, help="Price per million completion tokens.")
@click.option("--cached", "cached_price", type=PRICE, help="Price per million cached tokens; default: --input.")
@click.option("--force", is_flag=True, help="Accept an adapter or a model that does not exist yet.")
@admin_options
def set_price(
    model: str, input_price: int, output_price: int, cached_price: int | None, force: bool, gateway: Gateway
) -> None:
    """Set the price of MODEL: an adapter as tenant/name, a tenant's adapters as 'tenant/*', a base model, or '*'."""
    prices = given({"input": input_price, "output": output_price, "cached": cached_price})
    done = gateway.run(lambda client: client.set_price(model, force=force, **prices))
    amounts = ", ".join(f"{name} {exact_money(done[name])}" for name in AMOUNTS)
    click.echo(f"set the price of {model}: {amounts} {done['currency']} per million tokens")


@price.command("list", epilog=examples("loraplex price list"))
@json_option
@admin_options
def list_all(as_json: bool, gateway: Gateway) -> None:
    """List the prices, in the currency per million tokens."""
    rows = gateway.run(lambda client: client.prices())
    if as_json:
        print_json(rows)
        return
    amounts = [{name: exact_money(row[name]) for name in AMOUNTS} for row in rows]
    columns = ("model", *AMOUNTS, "currency", "updated_at")
    print_table([row | amount for row, amount in zip(rows, amounts, strict=True)], columns)


@price.command("delete", epilog=examples("loraplex price delete acme/pirate"))
@click.argument("model")
@admin_options
def delete(model: str, gateway: Gateway) -> None:
    """Delete the price of MODEL. From then on the next more general price applies."""
    gateway.run(lambda client: client.delete_price(model))
    click.echo(f"deleted the price of {model}")
