"""Options and output for the terms of tenants and plans."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from loraplex.commands.config_options import WholeNumber
from loraplex.commands.output import BUDGETS, limits_text, moment, print_table
from loraplex.commands.values import NO_LIMIT, Money, Number, SecondsOrNone, Shares, Words
from wire.money import exact_money

ALL = "all"


class ModelLimits(click.ParamType):
    """JSON of limits by model. Budgets are in currency units, as in `--budget-per-month`."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            models = json.loads(value, parse_float=str)
        except ValueError:
            self.fail(f"{value!r} is not JSON", param, ctx)
        if not isinstance(models, dict) or not all(isinstance(limits, dict) for limits in models.values()):
            self.fail('expected an object of objects, like {"pirate": {"requests_per_minute": 10}}', param, ctx)
        for limits in models.values():
            for name in BUDGETS:
                if limits.get(name) is not None:
                    limits[name] = Money().convert(str(limits[name]), param, ctx)
        return models


class Tags(click.ParamType):
    """Comma-separated tags, or `none`."""

    name = "tags"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return [] if value == NO_LIMIT else Words().convert(value, param, ctx)


def term_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for terms other than the limits."""
    for option in (
        click.option(
            "--model-limits",
            type=ModelLimits(),
            help='All limits by model, as JSON: {"pirate": {"requests_per_minute": 10, "budget_per_month": 2.50}}; '
            '"*" applies to all adapters without their own limits, together.',
        ),
        click.option(
            "--budget-warn-at",
            type=Shares(),
            help="Shares of the budgets at which there is an event: '0.5,0.8,1' (default: 0.8,1), or 'none'.",
        ),
        click.option(
            "--on-token-limit",
            type=click.Choice(["refuse", "shorten"]),
            help="Refuse a request that exceeds the remaining tokens, or shorten its answer.",
        ),
        click.option("--priority", type=WholeNumber(0, 9), help="Priority from 0 (served first) to 9 (shed first)."),
        click.option(
            "--ttft-target",
            type=SecondsOrNone(),
            help="Wanted time to first token in seconds, or 'none'; the engines' metrics count the answers within it.",
        ),
        click.option(
            "--weight", type=Number(0.01, 1000), help="Share of a busy engine, relative to other tenants' weights."
        ),
    ):
        command = option(command)
    return command


def term_names(typed_names: Sequence[str]) -> list[str]:
    """Return the terms' names in the API; `all` gives every term."""
    from gateway.records.tenants.terms import FIELDS

    names = [name.replace("-", "_") for name in typed_names]
    return list(FIELDS) if names == [ALL] else names


def in_money(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: exact_money(row[name]) for name in BUDGETS if row.get(name) is not None}


def print_fields(row: dict[str, Any]) -> None:
    """Print a tenant or plan, one field per line, with the source of each term."""
    sources = row["sources"]
    apart = ("object", "sources", "model_limits", "prices", "month")
    fields = {field: value for field, value in in_money(row).items() if field not in apart}
    fields |= {f"model_limits of {model}": limits_text(limits) for model, limits in row["model_limits"].items()}
    fields |= {f"price of {model}": price_text(price) for model, price in row.get("prices", {}).items()}
    if month := row.get("month"):
        fields |= {
            "spend this month": exact_money(month["spend"]),
            "forecast of the month": exact_money(month["forecast"]),
        }
        fields |= {"requests this month": month["requests"], "last_used_at": month["last_used_at"]}
    fields |= {
        field: moment(fields[field]) for field in ("created_at", "updated_at", "last_used_at") if fields.get(field)
    }
    rows = [{"field": field, "value": value, "source": sources.get(field)} for field, value in fields.items()]
    print_table(rows, ("field", "value", "source") if any(row["source"] for row in rows) else ("field", "value"))


def price_text(price: dict[str, int]) -> str:
    return ",".join(f"{name}={exact_money(price[name])}" for name in ("input", "cached", "output"))
