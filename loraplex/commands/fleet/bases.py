"""The `loraplex base` commands: the base models behind a gateway."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from loraplex.commands.common import Gateway, admin_options, examples, one_line
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.usage.prices import PRICE
from wire.digests import PREFIX

BASES = "/admin/api/bases"
MODEL = click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The model's folder on this machine, to read its config and, if it has weights, their digest.",
)
DIGEST = click.option("--digest", help="Digest of the weights, as `loraplex base list` shows it for an engine.")
TOKENIZER = click.option(
    "--tokenizer",
    help="Folder on the gateways' machines with tokenizer.json and config.json; default: --model. A gateway without "
    "the folder lets an engine of the base count the tokens of prompts.",
)


@click.group()
def base() -> None:
    """Add, list, drain, replace and retire base models."""


@base.command(
    "add",
    epilog=examples(
        "loraplex base add qwen --model ~/models/Qwen3-0.6B --input 0.10 --output 0.40",
        "loraplex base add qwen --tokenizer /models/Qwen3-0.6B --digest sha256:3f1c...",
    ),
)
@click.argument("name")
@MODEL
@DIGEST
@TOKENIZER
@click.option(
    "--context-length", type=click.IntRange(min=1), help="Maximum tokens of prompt and answer; default: the config's."
)
@click.option("--input", "input_price", type=PRICE, help="Price per million prompt tokens, such as 0.50.")
@click.option("--output", "output_price", type=PRICE, help="Price per million completion tokens.")
@click.option("--cached", "cached_price", type=PRICE, help="Price per million cached tokens; default: --input.")
@json_option
@admin_options
def add(
    name: str,
    model: Path | None,
    digest: str | None,
    tokenizer: str | None,
    as_json: bool,
    gateway: Gateway,
    **fields: Any,
) -> None:
    """Add the base model NAME. Engines that report its digest serve it; without a digest, those that report NAME."""
    prices = _present({each: fields[f"{each}_price"] for each in ("input", "output", "cached")})
    if prices and not {"input", "output"} <= prices.keys():
        raise click.UsageError("--input and --output: expected both, or neither")
    body = {
        "name": name,
        **_weights(model, digest, tokenizer),
        **_present({"context_length": fields["context_length"]}),
    }
    if prices:
        body["price"] = prices
    made = gateway.run(lambda client: client.call("POST", BASES, json=body))
    _show(made, f"added the base model {name}", as_json)
    if made["digest"] is None and not as_json:
        click.echo("it has no digest, so every engine that serves this name is trusted", err=True)


@base.command("list", epilog=examples("loraplex base list"))
@json_option
@admin_options
def list_all(as_json: bool, gateway: Gateway) -> None:
    """List the base models: a row per digest of their weights, with its engines and the number of adapter versions.

    Engines without a base model on record have rows without a name.
    """
    rows = gateway.run(lambda client: client.bases())
    if as_json:
        print_json(rows)
        return
    print_table(
        [
            row
            | {
                "name": row["name"] or "-",
                "state": "former" if row.get("is_former") else row.get("state", "unknown"),
                "digest": row["digest"] or "-",
                "engines": " ".join(row["engines"]) or "-",
                "versions": len(row["versions"]),
            }
            for row in rows
        ],
        ("name", "state", "digest", "engines", "versions"),
    )


@base.command("drain", epilog=examples("loraplex base drain old-llama"))
@click.argument("name")
@json_option
@admin_options
def drain(name: str, as_json: bool, gateway: Gateway) -> None:
    """Take the base model NAME off the list of models, and refuse new adapters for it. It still serves requests."""
    _show(_change(gateway, name, {"state": "draining"}), f"draining {name}: it still serves requests", as_json)
    click.echo(f"next: loraplex base retire {name}", err=True)


@base.command("resume", epilog=examples("loraplex base resume old-llama"))
@click.argument("name")
@json_option
@admin_options
def resume(name: str, as_json: bool, gateway: Gateway) -> None:
    """List and serve the drained or retired base model NAME again."""
    _show(_change(gateway, name, {"state": "active"}), f"resumed {name}", as_json)


@base.command("replace", epilog=examples("loraplex base replace llama --model ~/models/Llama-3.2-1B-v2"))
@click.argument("name")
@MODEL
@DIGEST
@TOKENIZER
@json_option
@admin_options
def replace(
    name: str, model: Path | None, digest: str | None, tokenizer: str | None, as_json: bool, gateway: Gateway
) -> None:
    """Replace the weights of the base model NAME.

    Requests for the base model itself go to engines with the new weights as soon as one is available, until then to the
    engines with the former weights. Adapters stay on the former weights until they are verified on the new ones.
    """
    body = _weights(model, digest, tokenizer)
    if "digest" not in body:
        raise click.UsageError("expected --digest, or --model with a folder that has the weights")
    done = _change(gateway, name, body)
    _show(done, f"{name} now means {done['digest']}", as_json)
    click.echo("next: start engines with the new weights, then `loraplex adapter verify --all`", err=True)


@base.command("retire", epilog=examples("loraplex base retire old-llama", "loraplex base retire sha256:3f1c..."))
@click.argument("name")
@click.option("--force", is_flag=True, help="Retire it even if it was not drained, or still has adapters.")
@json_option
@admin_options
def retire(name: str, force: bool, as_json: bool, gateway: Gateway) -> None:
    """Refuse new requests to the drained base model NAME and its adapters. Running requests end as usual.

    With `sha256:` and a digest, or its beginning, as NAME, change nothing: list the engines and the adapter versions
    that still use these weights, and exit with 1 if there are any, so that a script can wait.
    """
    if name.startswith(PREFIX):
        _list_left(name, as_json, gateway)
        return
    _show(_change(gateway, name, {"state": "retired"}, force=force), f"retired {name}", as_json)


def _list_left(digest: str, as_json: bool, gateway: Gateway) -> None:
    """Print the engines and the versions that still use the weights with a digest. Exit with 1 if there are any."""
    rows = gateway.run(lambda client: client.bases())
    found = [row for row in rows if row["digest"] is not None and row["digest"].startswith(digest)]
    if len(found) != 1 or digest == PREFIX:
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


def _weights(model: Path | None, digest: str | None, tokenizer: str | None) -> dict[str, Any]:
    """Return the request's fields from the options and from the model's folder on this machine."""
    fields = _present({"digest": digest, "tokenizer": tokenizer})
    if model is None:
        return fields
    from engine.probing.base_digest import base_digest

    try:
        model = model.expanduser().resolve()
    except RuntimeError as error:
        # `~name` without such a person.
        raise click.ClickException(f"--model: {model}: {error}") from error
    with one_line(OSError, ValueError):
        fields["config"] = json.loads((model / "config.json").read_text("utf-8"))
        if digest is None and any(next(model.glob(each), None) for each in ("*.safetensors", "*.gguf")):
            fields["digest"] = base_digest(model)
    if (model / "tokenizer.json").is_file():
        fields.setdefault("tokenizer", str(model))
    return fields


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _change(gateway: Gateway, name: str, body: dict[str, Any], *, force: bool = False) -> dict[str, Any]:
    path, params = f"{BASES}/{quote(name, safe='')}", {"force": "true"} if force else {}
    return dict(gateway.run(lambda client: client.call("PATCH", path, json=body, params=params)))


def _show(row: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(row)
    else:
        click.echo(text)
