"""Values of the operators' commands: limits, money, times and durations as people write them."""

import math
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal, DecimalException
from functools import cached_property
from typing import Any

import click

from wire.money import MICRO_UNITS

NO_LIMIT = "none"
MAX_MICRO_UNITS = 10**15
FACTORS = {"": 1, "k": 1000, "M": 10**6, "G": 10**9}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def finite(text: str) -> float:
    """Return a number. Raises ValueError, also for `nan` and `inf`, which JSON does not have."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


class Number(click.FloatRange):
    """Number within bounds, finite. Its error says in words which numbers are valid."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"expected a number {bounds_words(self)}; got {value}", param, ctx)
        return number


def bounds_words(bounds: click.IntRange | click.FloatRange) -> str:
    """Return bounds in words, such as `from 1 to 64`, `of at least 1`, or `above 0 and at most 1`."""
    least, most = bounds.min, bounds.max
    if bounds.min_open:
        return f"above {least:,}" + (f" and at most {most:,}" if most is not None else "")
    if least is not None and most is not None:
        return f"from {least:,} to {most:,}"
    return f"of at least {least:,}" if most is None else f"of at most {most:,}"


class Limit(click.ParamType):
    """A whole number, also in thousands or millions such as `20k`, `1M` or `1.5M`, or `none` for no limit."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == NO_LIMIT:
            return NO_LIMIT
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(-?\d{1,18}(?:\.\d{1,9})?)([kMG]?)", value)
        number = Decimal(match[1]) * FACTORS[match[2]] if match else None
        if number is None or number != number.to_integral_value():
            self.fail(f"{value!r} is not a whole number like 20000, 20k or 1M, nor 'none'", param, ctx)
        return int(number)


class SecondsOrNone(click.ParamType):
    """A number of seconds, or `none` for no target."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == NO_LIMIT:
            return NO_LIMIT
        try:
            return finite(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds, nor 'none'", param, ctx)


class Shares(click.ParamType):
    """Comma-separated numbers from 0.01 to 1, or `none` for an empty list."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        try:
            return [] if value == NO_LIMIT else [finite(word) for word in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list like 0.8,1, nor 'none'", param, ctx)


class Money(click.ParamType):
    """An amount of the deployment's currency with up to six decimals, in micro-units.

    or_none: also accept `none`, for no limit. most: the largest amount, in micro-units. per: the words after the
    amount in errors, such as ` per million tokens`.
    """

    name = "money"

    def __init__(self, *, or_none: bool = False, most: int = MAX_MICRO_UNITS, per: str = "") -> None:
        self._or_none = or_none
        self._most = most
        self._per = per

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or (value == NO_LIMIT and self._or_none):
            return value
        try:
            amount = Decimal(value) * MICRO_UNITS
            is_exact = amount == amount.to_integral_value()
            is_negative = amount < 0
        except DecimalException:
            self.fail(f"{value!r} is not an amount like 12.50" + (", nor 'none'" * self._or_none), param, ctx)
        if is_negative:
            self.fail(f"expected 0.00 or more{self._per}, got {value}", param, ctx)
        if amount > self._most:
            self.fail(f"expected at most {self._most // MICRO_UNITS}.00{self._per}, got {value}", param, ctx)
        if not is_exact:
            self.fail(f"expected at most six decimals, got {value}", param, ctx)
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

    name = "time"

    def __init__(self, *, ahead: bool) -> None:
        self._sign = 1 if ahead else -1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            try:
                moment = datetime.now(UTC) + self._sign * Duration().convert(value, param, ctx)
            except (click.BadParameter, OverflowError):
                self.fail(f"{value!r} is neither a time like 2027-01-31 nor a duration like 30d", param, ctx)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


def limit_names() -> list[str]:
    """Return the names of the limits of tenants, keys and models."""
    from gateway.limits.kinds import REQUEST_KINDS

    return [kind.name for kind in REQUEST_KINDS]


class LimitCommand(click.Command):
    """Command with a flag for each kind of limit; `none` removes a limit.

    The kinds are loaded when the command is used, so that the command line starts without the gateway.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self.limit_options, *super().get_params(ctx)]

    @cached_property
    def limit_options(self) -> list[click.Option]:
        from gateway.limits.kinds import REQUEST_KINDS

        return [_option(kind.name, kind.help, is_money=kind.takes == "cost") for kind in REQUEST_KINDS]


class TenantCommand(LimitCommand):
    """Command with a flag for each limit of a tenant, including the limits on its adapters."""

    @cached_property
    def limit_options(self) -> list[click.Option]:
        from gateway.limits.kinds import KINDS

        return [_option(kind.name, kind.help, is_money=kind.takes == "cost") for kind in KINDS]


def _option(name: str, text: str, *, is_money: bool) -> click.Option:
    flag = f"--{name.replace('_', '-')}"
    return click.Option([flag], type=Money(or_none=True) if is_money else Limit(), help=f"{text}, or none.")


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request: the given flags, with null for `none`."""
    return {name: None if value == NO_LIMIT else value for name, value in fields.items() if value is not None}
