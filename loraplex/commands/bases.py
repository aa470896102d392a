"""The `loraplex base` commands: base models, and the adapters that are bound to them."""

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table


@click.group()
def base() -> None:
    """List base models and the adapters that were probed on them."""


@base.command("list", epilog=examples("loraplex base list"))
@json_option
@admin_options
def list_all(as_json: bool, gateway: Gateway) -> None:
    """List the base models by digest, with their engines and the number of adapters' versions."""
    rows = gateway.run(lambda client: client.bases())
    if as_json:
        print_json(rows)
        return
    print_table(
        [row | {"engines": " ".join(row["engines"]) or "-", "versions": len(row["versions"])} for row in rows],
        ("digest", "engines", "versions"),
    )


@base.command("retire", epilog=examples("loraplex base retire sha256:3f1c..."))
@click.argument("digest")
@json_option
@admin_options
def retire(digest: str, as_json: bool, gateway: Gateway) -> None:
    """List the engines and the adapters' versions that are still on the base model DIGEST (or its beginning).

    Exit with 1 if there are any, so that a script can wait. Nothing is changed.
    """
    wanted = digest.removeprefix("sha256:")
    rows = gateway.run(lambda client: client.bases())
    found = [row for row in rows if wanted and row["digest"].removeprefix("sha256:").startswith(wanted)]
    if len(found) != 1:
        problem = "no base model" if not found else f"{len(found)} base models"
        raise click.ClickException(f"{problem} with the digest {digest}; `loraplex base list` lists them")
    left = [{"uses": "engine", "name": url, "state": "up"} for url in found[0]["engines"]]
    left += [{"uses": "adapter"} | version for version in found[0]["versions"] if version["state"] != "retired"]
    if as_json:
        print_json(left)
    else:
        print_table(left, ("uses", "name", "state"))
    if left:
        raise SystemExit(1)
