"""The `loraplex refusals` command: the reasons of refused requests in a period."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import BUDGETS, json_option, moment, print_json, print_table
from loraplex.commands.values import Moment, given
from wire.money import exact_money

LIMIT_COLUMNS = ("owner", "value", "recorded", "needed", "remaining", "wait")
# Time before and after `--at`.
AROUND = timedelta(minutes=10)
COLUMNS = ("tenant", "limit", "outcome", "code", "status", "refused", "peak", *LIMIT_COLUMNS)


class At(Moment):
    """A date with a time, or a time of day such as `10:40` in UTC: its last occurrence."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", value)
        if found is None:
            return super().convert(value, param, ctx)
        now = datetime.now(UTC)
        at = now.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
        return (at if at <= now else at - timedelta(days=1)).isoformat()


@click.command(
    epilog=examples(
        "loraplex refusals --tenant acme --at 10:40",
        "loraplex refusals --since 7d --status all --json",
        "loraplex refusals --limit-name tokens_per_minute",
    )
)
@click.option("--tenant", help="Only refusals of this tenant.")
@click.option(
    "--at",
    type=At(ahead=False),
    help="Only the 10 minutes before and after this time: 10:40 (UTC), 2026-11-27T10:40+01:00, or 2h ago.",
)
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--code", help="Only refusals with this error code, such as `rate_limit_exceeded`.")
@click.option("--limit-name", help="Only refusals by this limit, such as `tokens_per_minute`.")
@click.option("--status", help="Only refusals with this HTTP status, or `all`; default: 429 with cut answers.")
@json_option
@admin_options
def refusals(at: str | None, as_json: bool, gateway: Gateway, **query: Any) -> None:
    """Show why requests were refused, by tenant, limit and code, by default in the last day.

    Limits of one name have a row for each owner and value, with the number of recorded refusals, the averages of what
    they needed and what remained, and the longest wait in seconds. The outcome "cut" is an answer that a limit
    ended in mid-stream. Peak is the part of the period with most refusals: their number, its length and its start.
    """
    if at is not None:
        if query["since"] is not None or query["until"] is not None:
            raise click.UsageError("give either --at, or --since and --until")
        middle = datetime.fromisoformat(at)
        query |= {"since": (middle - AROUND).isoformat(), "until": (middle + AROUND).isoformat()}
    found = gateway.run(lambda client: client.call("GET", "/admin/api/refusals", params=given(query)))
    if as_json:
        print_json(found)
        return
    ends = f"{moment(found['since'])} to {moment(found['until'])}"
    click.echo(f"{found['total']} refusals from {ends}, {found['before']} in the period before", err=True)
    print_table([row for cause in found["causes"] for row in _shown(cause, found["step"])], COLUMNS)


def _shown(cause: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """Return a row for each limit of a cause, the first one with the cause's sums; without a limit, only these."""
    peak = cause["peak"]
    sums = {
        "status": cause["status"] or None,
        "refused": cause["requests"],
        "peak": None if peak is None else f"{peak[1]} in {step // 60} min from {moment(peak[0])}",
    }
    limits = [
        {
            **{name: _amount(each[name], cause["limit_name"]) for name in ("value", "needed", "remaining")},
            "owner": each["owner"],
            "recorded": each["rows"],
            "wait": each["longest_wait"],
        }
        for each in cause["evidence"]
    ]
    names = {**{name: cause[name] for name in ("tenant", "outcome", "code")}, "limit": cause["limit_name"]}
    return [names | limit | (sums if number == 0 else {}) for number, limit in enumerate(limits or [{}])]


def _amount(value: float | None, limit: str) -> str | None:
    if value is None:
        return None
    return exact_money(round(value)) if limit in BUDGETS else f"{value:.0f}"
