"""Values of the operators' commands: limits, money, times and durations as people write them."""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal, DecimalException
from functools import cached_property
from typing import Any

import click

NO_LIMIT = "none"
MICRO_UNITS = 1_000_000
MOST_MICRO_UNITS = 10**15
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Limit(click.ParamType):
    """A whole number, or `none` for no limit."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == NO_LIMIT:
            return NO_LIMIT
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number, nor 'none'", param, ctx)


class Target(click.ParamType):
    """A number of seconds, or `none` for no target."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == NO_LIMIT:
            return NO_LIMIT
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds, nor 'none'", param, ctx)


class Money(click.ParamType):
    """An amount of the deployment's currency with up to six decimals, in micro-units.

    or_none: also accept `none`, for no limit.
    """

    name = "money"

    def __init__(self, *, or_none: bool = False) -> None:
        self._or_none = or_none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or (value == NO_LIMIT and self._or_none):
            return value
        try:
            amount = Decimal(value) * MICRO_UNITS
            possible = 0 <= amount <= MOST_MICRO_UNITS and amount == amount.to_integral_value()
        except DecimalException:
            self.fail(f"{value!r} is not an amount like 12.50" + (", nor 'none'" * self._or_none), param, ctx)
        if not possible:
            self.fail(f"{value!r} is not an amount from 0 to 1000000000 of at most six decimals", param, ctx)
        return int(amount)


class Words(click.ParamType):
    """Comma-separated words; only from `choices`, if given."""

    name = "words"

    def __init__(self, *choices: str) -> None:
        self._choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        if isinstance(value, list):
            return value
        words = [word.strip() for word in value.split(",") if word.strip()]
        for word in words:
            if self._choices and word not in self._choices:
                self.fail(f"{word!r} is none of {', '.join(self._choices)}", param, ctx)
        if not words:
            self.fail("expected one word or more, comma separated", param, ctx)
        return words


class Duration(click.ParamType):
    """A duration such as `90s`, `30m`, `12h` or `30d`, as a timedelta."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        match = re.fullmatch(r"(\d{1,9})([smhd])", value)
        if match is None:
            self.fail(f"{value!r} is not a duration like 90s, 30m, 12h or 30d", param, ctx)
        return timedelta(seconds=int(match[1]) * UNITS[match[2]])


class Moment(click.ParamType):
    """ISO 8601 (UTC if without a zone) or a duration from now, as an ISO string with its zone.

    ahead: whether the duration points into the future.
    """

    name = "moment"

    def __init__(self, *, ahead: bool) -> None:
        self._sign = 1 if ahead else -1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            try:
                moment = datetime.now(UTC) + self._sign * Duration().convert(value, param, ctx)
            except (click.BadParameter, OverflowError):
                self.fail(f"{value!r} is neither a moment like 2027-01-31 nor a duration like 30d", param, ctx)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


def limit_names() -> list[str]:
    """Return the names of the limits of tenants, keys and models."""
    from gateway.quota.kinds import REQUEST_KINDS

    return [kind.name for kind in REQUEST_KINDS]


class LimitCommand(click.Command):
    """Command with a flag for each kind of limit; `none` removes a limit.

    The kinds are loaded when the command is used, so that the command line starts without the gateway.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self.limit_options, *super().get_params(ctx)]

    @cached_property
    def limit_options(self) -> list[click.Option]:
        from gateway.quota.kinds import REQUEST_KINDS

        return [_option(kind.name, kind.help, is_money=kind.takes == "cost") for kind in REQUEST_KINDS]


class TenantCommand(LimitCommand):
    """Command with a flag for each limit of a tenant, including the limits on its adapters."""

    @cached_property
    def limit_options(self) -> list[click.Option]:
        from gateway.quota.kinds import KINDS

        return [_option(kind.name, kind.help, is_money=kind.takes == "cost") for kind in KINDS]


def _option(name: str, text: str, *, is_money: bool) -> click.Option:
    flag = f"--{name.replace('_', '-')}"
    return click.Option([flag], type=Money(or_none=True) if is_money else Limit(), help=f"{text}, or none.")


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request: the given flags, with null for `none`."""
    return {name: None if value == NO_LIMIT else value for name, value in fields.items() if value is not None}
