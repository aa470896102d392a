"""Options that select tenants, for the list and for changes of many."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

from loraplex.commands.values import NO_LIMIT, Duration


class Ratio(click.ParamType):
    """A part of the budget, as `80%` or `0.8`."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)(%?)", value)
        if found is None:
            self.fail(f"{value!r} is not a part like 80% or 0.8", param, ctx)
        return float(found[1]) / (100 if found[2] else 1)


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select tenants. The command passes them to `read_filter`."""
    for option in (
        click.option(
            "--idle",
            type=Duration(),
            help="Tenants that have existed for this long, in days, without a use of a key: 30d.",
        ),
        click.option("--over-budget", type=Ratio(), help="At least this part of the month's budget is spent: 80%."),
        click.option("--suspended/--not-suspended", default=None, help="Suspended tenants only, or all others."),
        click.option("--tag", help="Tenants with this tag."),
        click.option("--plan", help="Tenants of this plan; 'none': without one."),
        click.option("--search", "q", help="Part of a name, display name, external id or contact."),
    ):
        command = option(command)
    return command


def read_filter(options: dict[str, Any]) -> dict[str, Any]:
    """Return the filter of the API for the options' values, without absent ones."""
    idle: timedelta | None = options.pop("idle", None)
    which = {name: value for name, value in options.items() if value is not None}
    if which.get("plan") == NO_LIMIT:
        which["plan"] = ""
    if idle is not None:
        which["idle_days"] = idle_days(idle)
    return which


def idle_days(idle: timedelta) -> int:
    """Return the days of the option `--idle`. Raises UsageError for less than one."""
    if idle < timedelta(days=1):
        raise click.UsageError("--idle: expected days, such as 30d")
    return idle.days
