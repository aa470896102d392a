"""The `loraplex requests` command: the log of admitted and refused requests, and the record of one of them."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from loraplex.commands.common import Gateway, WithSubcommands, examples, tenant_options
from loraplex.commands.output import json_option, moment, print_csv, print_json, print_table
from loraplex.commands.values import Moment, Words, given

if TYPE_CHECKING:
    # Imported for type checking only, because `--help` must not load aiohttp.
    from loraplex.client import GatewayClient

STATUSES = ("ok", "cancelled", "revoked", "limited", "refused", "error", "abandoned", "not_admitted")
COLUMNS = (
    *("at", "request_id", "tenant", "model", "status", "code"),
    *("prompt_tokens", "completion_tokens", "cost", "queue_ms", "ttft_ms", "latency_ms"),
)
CSV_COLUMNS = (
    *("request_id", "at", "tenant", "key_id", "key", "route", "model", "version", "engine", "end_user", "status"),
    *("http_status", "code", "param", "limit", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("surcharge", "reserved_tokens", "cost", "admission_ms", "queue_ms", "ttft_ms", "latency_ms", "address"),
    *("adapter_digest", "served_digest"),
)
FOLLOW_SECONDS = 2.0
# Number of newest requests that each poll of `--follow` reads. A request enters the log when it ends, so a new entry
# may have an earlier time than entries that were already printed.
FOLLOWED = 500


@click.command(
    cls=WithSubcommands,
    epilog=examples(
        "loraplex requests --tenant acme --since 1h",
        "loraplex requests --status not_admitted,limited --code rate_limit_exceeded",
        "loraplex requests --model pirate --min-latency 5000 --json",
        "loraplex requests --follow",
        "loraplex requests --since 2026-11-01 --limit 1000 --csv > requests.csv",
    ),
)
@click.option("--key", help="Only requests with the key of this id.")
@click.option("--model", help="Only requests for this model, by its plain name.")
@click.option("--version", type=int, help="Only requests for this version of the model.")
@click.option("--engine", help="Only requests that the engine at this URL served; for operators.")
@click.option("--status", type=Words(*STATUSES), help=f"Only these, comma separated: {','.join(STATUSES)}.")
@click.option("--code", help="Only requests with this error code, such as `rate_limit_exceeded`.")
@click.option("--end-user", help="Only requests whose body has this `user`.")
@click.option("--min-latency", type=click.IntRange(0, 10**9), help="Only requests that took at least this many ms.")
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum entries.")
@click.option("--after", help="The next page: only entries after this position, which the command printed.")
@click.option("--follow", is_flag=True, help="Continue with new requests until Ctrl-C.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with all fields; the field limit is JSON.")
@json_option
@tenant_options(or_all=True)
def requests(as_csv: bool, as_json: bool, follow: bool, tenant: str | None, gateway: Gateway, **query: Any) -> None:
    """Show admitted and refused requests, newest first: of one tenant, or as an operator of all tenants.

    `loraplex requests show ID` shows the whole story of one of them.
    """
    if as_csv and (as_json or follow):
        raise click.UsageError("give --csv alone, without --json and --follow")
    if gateway.as_tenant and query["engine"] is not None:
        raise click.UsageError("--engine is for operators; a tenant's key does not see engines")
    query |= {"tenant": tenant, "min_latency_ms": query.pop("min_latency")}
    if query["status"] is not None:
        query["status"] = ",".join(query["status"])
    if follow:
        gateway.run(lambda client: _follow(client, gateway.as_tenant, given(query), as_json))
        return
    answer = gateway.run(lambda client: client.call("GET", _path(gateway.as_tenant), params=given(query)))
    if as_csv:
        _print_csv(answer["data"])
    elif as_json:
        print_json(answer)
    else:
        print_table([_shown(row) for row in answer["data"]], COLUMNS)
    if answer["next"] is not None and not as_json:
        click.echo(f"older requests: --after {answer['next']}", err=True)


@click.group()
def stories() -> None:
    """Show the full record of a request."""


@stories.command(
    epilog=examples(
        "loraplex requests show req_1f0c...",
        "loraplex requests show chatcmpl-1f0c... --json",
        "loraplex requests show cmpl-1f0c... --api-key lpx_...",
    )
)
@click.argument("request_id", metavar="ID")
@json_option
@tenant_options(or_all=True)
def show(request_id: str, as_json: bool, tenant: str | None, gateway: Gateway) -> None:
    """Show the full record of the request ID; also accepts the id of its answer."""
    path = f"{_path(gateway.as_tenant)}/{quote(request_id, safe='')}"
    story = gateway.run(lambda client: client.call("GET", path))
    if tenant is not None and story["tenant"] != tenant:
        raise click.ClickException(f"the request is not of the tenant {tenant}")
    if as_json:
        print_json(story)
        return
    steps = story.pop("steps")
    fields = [(name, value) for name, value in story.items() if value is not None and name not in ("object", "limit")]
    for name, value in fields:
        click.echo(f"{name + ':':<20}{value}")
    if (limit := story["limit"]) is not None:
        click.echo(f"{'limit:':<20}{limit['name']} of the {limit['owner']}: {limit['value']}")
        click.echo(f"{'':<20}needed {limit['needed']}, remaining {limit['remaining']}")
    for step in steps:
        length = step["end_ms"] - step["start_ms"]
        click.echo(f"{step['name'] + ':':<20}{step['start_ms']} to {step['end_ms']} ms ({length} ms)")


async def _follow(client: "GatewayClient", as_tenant: bool, query: dict[str, Any], as_json: bool) -> None:
    """Print the newest requests, then new ones as they end, until cancelled."""
    first = True
    seen: set[str] = set()
    while True:
        params = query | {"limit": max(FOLLOWED, query["limit"])}
        page = await client.call("GET", _path(as_tenant), params=params)
        rows = page["data"]
        new = [row for row in rows if row["request_id"] not in seen]
        seen = {row["request_id"] for row in rows} | (seen if len(seen) < 20 * FOLLOWED else set())
        for row in reversed(new[: query["limit"]] if first else new):
            _print_line(row, as_json)
        first = False
        await asyncio.sleep(FOLLOW_SECONDS)


def _path(as_tenant: bool) -> str:
    """Return the path of the request log. as_tenant: the one for the calling tenant."""
    return "/v1/requests" if as_tenant else "/admin/api/requests"


def _print_line(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row))
        return
    shown = _shown(row)
    tokens = f"{row['prompt_tokens']}+{row['completion_tokens']} tokens"
    words = (shown["at"], row["request_id"], row["tenant"], row["model"], row["status"], row["code"], tokens)
    click.echo("  ".join([*(str(word) for word in words if word is not None), f"{row['latency_ms']} ms"]))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "at": moment(row["at"])}


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    limits = (None if row["limit"] is None else json.dumps(row["limit"]) for row in rows)
    print_csv(({**row, "limit": limit} for row, limit in zip(rows, limits, strict=True)), CSV_COLUMNS)


requests.subcommands = stories
