"""`loraplex audit`: who changed what, when and from where."""

from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.values import Moment, given


@click.command(
    epilog=examples(
        "loraplex audit --since 7d",
        "loraplex audit --tenant acme --action key",
        "loraplex audit --actor bootstrap --limit 1000 --json",
    )
)
@click.option("--tenant", help="Of this tenant's things only; also one that was deleted.")
@click.option("--actor", help="By this key only, by its id; `bootstrap` is LORAPLEX_ADMIN_KEY.")
@click.option("--action", help="`key.revoke` and the like only, or all of a kind: tenant, key, adapter, price.")
@click.option("--since", type=Moment(ahead=False), help="From this moment on: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="Before this moment; default: now.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Entries at most.")
@click.option("--after", help="Only what is older than the entry of this id: the next page.")
@json_option
@admin_options
def audit(as_json: bool, gateway: Gateway, **query: Any) -> None:
    """Show what was changed, the newest first: by which key, from which address."""
    answer = gateway.run(lambda client: client.audit(**given(query)))
    if as_json:
        print_json(answer)
        return
    rows = [{**row, "changed_at": row["at"]} for row in answer["data"]]
    print_table(rows, ("changed_at", "action", "target", "actor", "address"))
    if answer["has_more"]:
        click.echo(f"there are older ones: --after {rows[-1]['id']}", err=True)
