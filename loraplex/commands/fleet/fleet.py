"""The `loraplex residency` and `loraplex fairness` commands: adapters in engines' memory, and the tenants' shares."""

from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, moment, print_json, print_table
from loraplex.commands.values import given

RESIDENT_COLUMNS = ("digest", "requests/s", "engine", "place", "running", "versions")
SHARE_COLUMNS = (
    *("tenant", "weight", "share_now", "due_now", "share_1h", "due_1h", "behind"),
    *("on_engines", "waiting", "waiting_on_engines", "oldest_s", "wait_p50_s", "wait_p95_s"),
)
PREEMPTION_COLUMNS = ("engine", "preempted", "for", "number")
# Characters of a digest in a table, with its "sha256:".
DIGEST_CHARS = 19


@click.command(epilog=examples("loraplex residency", "loraplex residency --search acme/pirate --json"))
@click.option("--search", "q", help="Part of a version's name, such as `acme/pirate`, or of a digest.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Adapters per page.")
@click.option("--page", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Number of the page.")
@json_option
@admin_options
def residency(as_json: bool, gateway: Gateway, **query: Any) -> None:
    """Show which engines hold which adapters in device or host memory, the adapters with most requests first."""
    found = gateway.run(lambda client: client.call("GET", "/admin/api/residency", params=given(query)))
    if as_json:
        print_json(found)
        return
    rows = [_resident(row, url, place) for row in found["data"] for url, place in sorted(row["places"].items())]
    if rows:
        print_table(rows, RESIDENT_COLUMNS)
    else:
        matching = f" that matches {query['q']!r}" if query["q"] else ""
        click.echo(f"no engine holds an adapter{matching}")
    if found["names_missing"] is not None:
        click.echo(f"adapters have no names now: {found['names_missing']}", err=True)
    if found["has_more"]:
        click.echo(f"{len(found['data'])} of {found['total']} adapters; next: --page {query['page'] + 1}", err=True)


def _resident(row: dict[str, Any], url: str, place: dict[str, Any]) -> dict[str, Any]:
    shown = {"digest": row["digest"][:DIGEST_CHARS], "requests/s": row["requests_per_second"], "engine": url}
    return shown | place | {"versions": row["versions"]}


@click.command(epilog=examples("loraplex fairness", "loraplex fairness --json"))
@json_option
@admin_options
def fairness(as_json: bool, gateway: Gateway) -> None:
    """Show each tenant's share of the service against its weight, its waits, and preemptions.

    The figures are those of the gateway process that answers.
    """
    found = gateway.run(lambda client: client.call("GET", "/admin/api/fairness"))
    if as_json:
        print_json(found)
        return
    jain, waits = found["jain"], found["waits"]
    click.echo(f"Jain's index: {_index(jain['now'])} now, {_index(jain['hour'])} in the last hour")
    longest = f", the longest for {waits['oldest']:.1f} s" if waits["oldest"] else ""
    click.echo(f"{waiting_text(waits)}{longest}")
    click.echo(f"history since {moment(found['since'])}, of gateway process {found['process']}", err=True)
    print_table([_share(row) for row in found["data"]], SHARE_COLUMNS)
    if found["preemptions"]:
        click.echo()
        print_table([row | {"preempted": row["tenant"], "for": row["by"]} for row in found["preemptions"]],
                    PREEMPTION_COLUMNS)  # fmt: skip


def waiting_text(waits: dict[str, Any]) -> str:
    """Return the number of waiting requests and where they wait, as `/admin/api/queue` and `fairness` report them."""
    on_engines = waits.get("waiting_on_engines")
    if on_engines is None:
        return f"{waits['waiting']} waiting in the gateway, unknown on the engines"
    return f"{waits['waiting']} waiting ({waits['waiting_in_gateway']} in the gateway, {on_engines} on engines)"


def _share(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "tenant": row["tenant"],
        "weight": row["weight"],
        **{f"{name}_now": _percent(row["now"][name]) for name in ("share", "due")},
        **{f"{name}_1h": _percent(row["hour"][name]) for name in ("share", "due")},
        "behind": row["is_behind"],
        "on_engines": row["inside"],
        "waiting": row["waiting"],
        "waiting_on_engines": row["waiting_on_engines"],
        **{f"{name}_s": _seconds(row[key]) for name, key in (("oldest", "oldest"), ("wait_p50", "p50"))},
        "wait_p95_s": _seconds(row["p95"]),
    }


def _index(value: float | None) -> str:
    return "none (fewer than two tenants waited)" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
