"""The `loraplex chat` command: a tenant's requests through the OpenAI API."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from loraplex.commands.common import check_url, examples, is_gateway_of, no_gateway, one_line, whose
from loraplex.commands.values import Number
from loraplex.up.datadir import DATA_DIR, DataDirError, read_json
from wire.errors import BadRequest
from wire.mixtures import is_mixture, parse_terms
from wire.model_names import parse_reference


@click.command(
    epilog=examples(
        'loraplex chat "Why is the sky blue?" --model pirate',
        "LORAPLEX_API_KEY=lpx_... loraplex chat --gateway http://127.0.0.1:8080",
    )
)
@click.argument("message", required=False)
@click.option("--model", help="The base model or an adapter; default: the base model.")
@click.option("--gateway", envvar="LORAPLEX_GATEWAY", help="The gateway's URL. [env: LORAPLEX_GATEWAY]")
@click.option("--api-key", envvar="LORAPLEX_API_KEY", help="A tenant's key. [env: LORAPLEX_API_KEY]")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(1), help="Maximum answer tokens.")
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    type=Number(0, 2),
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=DATA_DIR,
    show_default=True,
    help="Folder with local.json and demo.json; without a key, the tenant in demo.json that has the model is used.",
)
def chat(
    message: str | None,
    model: str | None,
    gateway: str | None,
    api_key: str | None,
    max_tokens: int,
    temperature: float,
    data_dir: Path,
) -> None:
    """Chat with a model: one MESSAGE, or line by line from the terminal."""
    from loraplex.client import GatewayError

    path = data_dir / "demo.json"
    with one_line(DataDirError):
        local: dict[str, Any] = read_json(data_dir / "local.json") or {}
        demo: dict[str, Any] = read_json(path) or {}
    url = gateway or local.get("gateway") or demo.get("gateway")
    if not url:
        raise no_gateway(data_dir / "local.json")
    check_url(url, "--gateway")
    keys = [api_key] if api_key else []
    if not api_key:
        if not is_gateway_of(demo, url):
            raise click.UsageError(f"--api-key is not given, and {path} {whose(demo, url)}")
        keys = [tenant["api_key"] for tenant in demo["tenants"]]
    settings = {"max_tokens": max_tokens, "temperature": temperature}

    async def work() -> None:
        if api_key and model:
            found = api_key, model
        else:
            found = await _who_has(url, keys, model)
        await _converse(url, found[0], settings | {"model": found[1]}, message)

    with one_line(GatewayError):
        asyncio.run(work())


async def _who_has(url: str, keys: list[str], model: str | None) -> tuple[str, str]:
    """Return the first key whose tenant has the model, or the adapters of the version, alias or mixture that it names,
    and the model's name; None selects the base model.

    Raises click.UsageError if no tenant has it, GatewayError if the gateway refuses.
    """
    from loraplex.client import GatewayClient

    for key in keys:
        async with GatewayClient(url, key) as client:
            models = await client.listed("/v1/models")
        if model is None:
            bases = [listed["id"] for listed in models if listed.get("parent") is None]
            if bases:
                return key, bases[0]
        elif (names := {listed["id"] for listed in models}) and (model in names or _adapters(model) <= names):
            return key, model
    if model is None:
        raise click.UsageError(f"{url} lists no base model; pass --model")
    raise click.UsageError(f"no tenant in demo.json has a model {model!r}; pass --api-key")


def _adapters(model: str) -> set[str]:
    """Return the plain names in `name@3`, `name:prod` or a mixture; the text itself if it is none of these."""
    try:
        texts = [term.name for term in parse_terms(model)] if is_mixture(model) else [model]
    except BadRequest:
        return {model}
    references = [parse_reference(text) for text in texts]
    return {text if found is None else found.name for text, found in zip(texts, references, strict=True)}


async def _converse(gateway: str, api_key: str, settings: dict[str, Any], message: str | None) -> None:
    from loraplex.client import GatewayClient

    turns: list[dict[str, str]] = []
    async with GatewayClient(gateway, api_key, timeout=600) as client:
        while True:
            line = message if message is not None else await asyncio.to_thread(_ask)
            if line is None:
                return
            turns.append({"role": "user", "content": line})
            answer = ""
            async for piece in _stream(client.events("/v1/chat/completions", settings | {"messages": turns})):
                click.echo(piece, nl=False)
                answer += piece
            click.echo()
            if message is not None:
                return
            turns.append({"role": "assistant", "content": answer})


async def _stream(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for event in events:
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _ask() -> str | None:
    """Return the next line, or None at the end of the input."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
