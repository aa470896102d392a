"""The `loraplex attention`, `activity`, `search` and `settings` commands: the service as a whole."""

import re
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, moment, print_json, print_table
from loraplex.commands.values import Moment, given

GROUPS = ("tenant", "model", "engine")
ORDERS = ("requests", "tokens", "cost")
SUMS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
TIMES = ("ttft_p50_ms", "ttft_p95_ms", "latency_p50_ms", "latency_p95_ms")


@click.command(epilog=examples("loraplex attention", "loraplex attention --json"))
@json_option
@admin_options
def attention(as_json: bool, gateway: Gateway) -> None:
    """List what needs attention, the worst first, as the overview of the dashboard."""
    rows = gateway.run(lambda client: client.listed("/admin/api/attention"))
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['level']:5}{row['text']}")
    if not rows:
        click.echo("nothing needs attention", err=True)


@click.command(
    epilog=examples(
        "loraplex activity --by tenant",
        "loraplex activity --since 7d --by model --order cost --top 20",
        "loraplex activity --tenant acme --since 1h --step 60 --json",
    )
)
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--tenant", help="Only requests of this tenant.")
@click.option("--model", help="Only requests for this model.")
@click.option("--engine", help="Only requests that the engine at this URL served.")
@click.option(
    "--by", "group_by", type=click.Choice(GROUPS), help="Rows of tenants, models or engines, after the total."
)
@click.option("--order", type=click.Choice(ORDERS), help="Order of the rows, largest first; default: requests.")
@click.option("--top", "limit", type=click.IntRange(1, 50), help="Maximum rows; default: 8.")
@click.option("--step", type=int, help="Seconds between the points of the curves, which --json prints.")
@json_option
@admin_options
def activity(as_json: bool, gateway: Gateway, **query: Any) -> None:
    """Show requests, tokens, cost, TTFT and latency of a period, by default of the last day."""
    found = gateway.run(lambda client: client.call("GET", "/admin/api/activity", params=given(query)))
    if as_json:
        print_json(found)
        return
    click.echo(f"activity from {moment(found['since'])} to {moment(found['until'])}", err=True)
    rows = [{"name": each["name"], "tenant": each["tenant"]} | _figures(each["sums"]) for each in found["groups"]]
    rows.append({"name": "TOTAL"} | _figures(found["total"]))
    rows.append({"name": "PERIOD_BEFORE"} | _figures(found["before"]))
    columns = ("name", *(["tenant"] if query["group_by"] == "model" else []), *SUMS, *TIMES)
    print_table(rows, columns)
    click.echo(f"costs are in {found['currency']}", err=True)


def _figures(sums: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {name: sums[name] for name in SUMS}
    for name in ("ttft", "latency"):
        for percentile in ("p50", "p95"):
            value = None if sums[name] is None else round(sums[name][percentile])
            figures[f"{name}_{percentile}_ms"] = value
    return figures


@click.command(epilog=examples("loraplex search acme", "loraplex search 3fa9c1d2 --json"))
@click.argument("text")
@json_option
@admin_options
def search(text: str, as_json: bool, gateway: Gateway) -> None:
    """Find tenants and adapters by part of their name, keys by id or label, and versions by digest."""
    # Only the id of a whole key is sent.
    whole = re.fullmatch(r"lpx_([0-9a-f]{16})(_.*)?", text.strip())
    query = {"q": whole[1] if whole else text}
    found = gateway.run(lambda client: client.call("GET", "/admin/api/search", params=query))
    if as_json:
        print_json(found)
        return
    rows = [{"kind": "tenant", "name": name} for name in found["tenants"]]
    for adapter in found["adapters"]:
        version = "" if adapter["version"] is None else f"@{adapter['version']}"
        name = f"{adapter['name']}{version}"
        rows.append({"kind": "adapter", "name": name, "tenant": adapter["tenant"], "id": adapter["digest"]})
    rows += [{"kind": "key", "name": key["label"], "tenant": key["tenant"], "id": key["id"]} for key in found["keys"]]
    if found["request"] is not None:
        rows.append({"kind": "request", "id": found["request"]})
    if rows:
        print_table(rows, ("kind", "name", "tenant", "id"))
    else:
        click.echo("nothing matches", err=True)


@click.command(epilog=examples("loraplex settings", "loraplex settings --changed", "loraplex settings --json"))
@click.option("--changed", is_flag=True, help="Only settings that differ from their default.")
@json_option
@admin_options
def settings(changed: bool, as_json: bool, gateway: Gateway) -> None:
    """Show the settings of the gateway process that answers, without secrets, and its condition."""
    found = gateway.run(lambda client: client.call("GET", "/admin/api/settings"))
    if as_json:
        print_json(found)
        return
    rows = [row for row in found["settings"] if row["is_set"] or not changed]
    print_table(rows, ("name", "value", "default"))
    click.echo()
    lines = _condition(found)
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        click.echo(f"{name:{width}}  {text}")


def _condition(state: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of the lines below the settings."""
    stored = state["stored"]
    parts = [(name, state[name]) for name in ("database", "redis")]
    schema = f"{state['revision'] or 'unknown'}, expected {state['expected_revision']}"
    lines = [
        ("version", f"{state['version']}, process {state['process']} since {moment(state['started_at'])}"),
        ("schema", schema),
        *((name, f"{part['kind']}, {_latency(part['latency'])}") for name, part in parts),
        ("journal", f"{state['journal_bytes']} of {state['journal_limit']} bytes"),
    ]
    if stored is not None:
        lines.append(("adapters", f"{stored['versions']} versions, {stored['num_bytes']} bytes"))
    # A gateway of the previous release does not report them.
    if (removed := state.get("removed")) is not None:
        lines.append(("removed adapters", f"{removed['contents']} contents, {removed['num_bytes']} bytes to collect"))
    lines += [
        (f"disk {name}", f"{disk['free']} of {disk['bytes']} bytes free") for name, disk in state["disks"].items()
    ]
    for name, seconds in state["retention"].items():
        lines.append((f"keeps {name}", "forever" if seconds is None else f"{seconds / 86_400:g} days"))
    return lines


def _latency(seconds: float | None) -> str:
    return "no answer" if seconds is None else f"answers in {1000 * seconds:.1f} ms"
