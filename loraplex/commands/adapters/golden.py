"""The `loraplex adapter golden` commands: evaluation prompts of a version and their golden answers."""

import json
from pathlib import Path
from typing import Any

import click

from loraplex.commands.adapters.versions import VersionName
from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, print_json, print_table
from wire.model_names import Reference


class PromptsFile(click.ParamType):
    """A file with a JSON list of prompts."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if isinstance(value, list):
            return value
        try:
            found = json.loads(Path(value).read_bytes())
        except (OSError, ValueError) as error:
            self.fail(f"{value}: {getattr(error, 'strerror', None) or 'it is not valid JSON'}", param, ctx)
        if not isinstance(found, list):
            self.fail(f'{value}: expected a JSON list such as [{{"prompt": "Hello"}}]', param, ctx)
        return found


@click.group()
def golden() -> None:
    """Keep answers to evaluation prompts. They are checked again when engines change."""


@golden.command("set", epilog=examples("loraplex adapter golden set pirate@3 prompts.json --tenant acme"))
@click.argument("version", type=VersionName())
@click.argument("prompts", type=PromptsFile(), metavar="FILE")
@tenant_options()
def set_(version: Reference, prompts: list[Any], tenant: str | None, gateway: Gateway) -> None:
    """Ask VERSION (such as pirate@3) the prompts in FILE, and keep the answers as its golden ones.

    FILE has a JSON list of at most 16 objects with `messages` or `prompt`, and optionally `max_tokens` (at most 64).
    With a tenant's own key, the tenant pays for the answers.
    """
    made = gateway.run(lambda client: client.set_golden(tenant, version, prompts))
    click.echo(f"{version} has {len(made['prompts'])} golden answers")


@golden.command("show", epilog=examples("loraplex adapter golden show pirate@3 --tenant acme"))
@click.argument("version", type=VersionName())
@json_option
@tenant_options()
def show(version: Reference, tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """Show the golden answers of VERSION, and the last check under each release of engines."""
    found = gateway.run(lambda client: client.golden(tenant, version))
    if as_json:
        print_json(found)
        return
    rows = [{"prompt": i, "text": _text(each), "answer": each["answer"]} for i, each in enumerate(found["prompts"])]
    print_table(rows, ("prompt", "text", "answer"))
    click.echo()
    print_table([check_row(check) for check in found["checks"]], CHECK_COLUMNS)


@golden.command("rm", epilog=examples("loraplex adapter golden rm pirate@3 --tenant acme"))
@click.argument("version", type=VersionName())
@tenant_options()
def remove(version: Reference, tenant: str | None, gateway: Gateway) -> None:
    """Remove the prompts and golden answers of VERSION."""
    gateway.run(lambda client: client.delete_golden(tenant, version))
    click.echo(f"removed the golden answers of {version}")


def _text(prompt: dict[str, Any]) -> str:
    """Return the prompt, or the newest message, as one line of at most 60 characters."""
    text = " ".join(str(prompt.get("prompt") or prompt["messages"][-1].get("content")).split())
    return text if len(text) <= 60 else text[:59] + "…"


CHECK_COLUMNS = ("engine", "release", "base", "agreement", "differs_at", "checked_at")


def check_row(check: dict[str, Any]) -> dict[str, Any]:
    """Return a check as a row of CHECK_COLUMNS. differs_at: `prompt:token` of each first difference."""
    engine = check["engine"]
    places = [f"{each['prompt']}:{'error' if each['error'] else each['position']}" for each in check["differences"]]
    return {
        "engine": check.get("url") or engine["kind"],
        "release": engine["version"],
        "base": engine["base"] and engine["base"][:19],
        "agreement": f"{check['agreement']:.0%}",
        "differs_at": places,
        "checked_at": check["checked_at"],
    }
