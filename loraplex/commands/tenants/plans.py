"""The `loraplex plan` commands: named terms and prices of tenants."""

from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.tenants.terms import in_money, price_text, print_fields, term_names, term_options
from loraplex.commands.values import NO_LIMIT, Money, TenantCommand, Words, given, limit_names

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


@click.group()
def plan() -> None:
    """Set, list and delete plans: named limits and prices of tenants."""


class PlanPrice(click.ParamType):
    """Price of a model in a plan: `MODEL=INPUT,OUTPUT`, `MODEL=INPUT,OUTPUT,CACHED` or `MODEL=none`."""

    name = "model=input,output"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, dict[str, Any] | None]:
        if isinstance(value, tuple):
            return value
        model, _, amounts = value.rpartition("=")
        if amounts == NO_LIMIT and model:
            return model, None
        parts = amounts.split(",")
        if not model or len(parts) not in (2, 3):
            self.fail(f"{value!r} is not MODEL=INPUT,OUTPUT or MODEL=INPUT,OUTPUT,CACHED or MODEL=none", param, ctx)
        money = [Money().convert(part.strip(), param, ctx) for part in parts]
        return model, dict(zip(("input", "output", "cached"), money, strict=False))


@plan.command(
    "set",
    cls=TenantCommand,
    epilog=examples(
        "loraplex plan set pro --tokens-per-minute 60000 --budget-per-month 50.00 --weight 2",
        "loraplex plan set pro --price '*=0.20,0.60' --price '*/*=0.40,1.20,0.04'",
        "loraplex plan set pro --reset tokens_per_day,weight",
    ),
)
@click.argument("name")
@click.option(
    "--price",
    "prices",
    type=PlanPrice(),
    multiple=True,
    help="Price per million tokens of the base model, of '*/*' (all adapters) or of '*' (everything). Repeatable.",
)
@click.option("--reset", type=Words(), help="Terms to remove from the plan, comma separated, or 'all'.")
@term_options
@admin_options
def set_plan(
    name: str,
    prices: tuple[tuple[str, dict[str, Any] | None], ...],
    reset: list[str] | None,
    gateway: Gateway,
    **fields: Any,
) -> None:
    """Create the plan NAME, or change its given values. The change applies to all tenants of the plan."""

    from loraplex.client import GatewayError

    async def change(client: "GatewayClient") -> dict[str, Any]:
        try:
            known = await client.plan(name)
        except GatewayError as error:
            if error.status != 404:
                raise
            known = {"sources": {}, "prices": {}}
        terms = {field: known[field] for field, source in known["sources"].items() if source == "plan"}
        kept = {field: value for field, value in terms.items() if field not in term_names(reset or [])}
        named = {model: price for model, price in (known["prices"] | dict(prices)).items() if price is not None}
        return await client.set_plan(name, kept | given(fields) | {"prices": named})

    made = gateway.run(change)
    whose = "1 tenant has" if made["tenants"] == 1 else f"{made['tenants']} tenants have"
    click.echo(f"set plan {name}; {whose} it")


@plan.command("list", epilog=examples("loraplex plan list", "loraplex plan list --json"))
@json_option
@admin_options
def list_all(as_json: bool, gateway: Gateway) -> None:
    """List the plans with their terms and prices."""
    rows = gateway.run(lambda client: client.plans())
    if as_json:
        print_json(rows)
        return
    prices = [" ".join(f"{model}:{price_text(price)}" for model, price in row["prices"].items()) for row in rows]
    shown = [in_money(row) | {"prices": price} for row, price in zip(rows, prices, strict=True)]
    print_table(shown, ("name", "tenants", "priority", "weight", *limit_names(), "prices"))


@plan.command("show", epilog=examples("loraplex plan show pro"))
@click.argument("name")
@json_option
@admin_options
def show(name: str, as_json: bool, gateway: Gateway) -> None:
    """Show the plan NAME with all of its terms and prices."""
    row = gateway.run(lambda client: client.plan(name))
    if as_json:
        print_json(row)
    else:
        print_fields(row)


@plan.command("delete", epilog=examples("loraplex plan delete pro"))
@click.argument("name")
@admin_options
def delete(name: str, gateway: Gateway) -> None:
    """Delete the plan NAME. It fails while a tenant has the plan."""
    gateway.run(lambda client: client.delete_plan(name))
    click.echo(f"deleted plan {name}")
