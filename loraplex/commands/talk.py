"""The `loraplex chat | bench` commands: a tenant's requests through the OpenAI API."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from loraplex.bench.workload import Target, Workload
from loraplex.commands.common import check_url, examples, is_gateway_of, one_line, whose
from loraplex.commands.config_options import options_of, take
from loraplex.up.datadir import DATA_DIR, DataDirError, read_json


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
    type=click.FloatRange(0, 2),
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
        raise click.UsageError(f"--gateway is not given, and {data_dir / 'local.json'} does not exist")
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
    """Return the first key whose tenant has the model, and the model's name; None selects the base model.

    Raises click.UsageError if no tenant has it, GatewayError if the gateway refuses.
    """
    from loraplex.client import GatewayClient

    for key in keys:
        async with GatewayClient(url, key) as client:
            models = await client.listed("/v1/models")
        for listed in models:
            if model == listed["id"] or (model is None and listed.get("parent") is None):
                return key, listed["id"]
    if model is None:
        raise click.UsageError(f"{url} lists no base model; pass --model")
    raise click.UsageError(f"no tenant in demo.json has a model {model!r}; pass --api-key")


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


@click.command(
    epilog=examples(
        "loraplex bench --tenants .loraplex/demo.json --n 64 --c 16",
        "loraplex bench --url http://127.0.0.1:8000 --models a0,a1,a2 --zipf 1.0 --rate 4 --json report.json",
    )
)
@click.option("--url", help="URL of the server; default: the gateway named in --tenants.")
@click.option("--models", help="Model names, comma separated, the most popular first.")
@click.option("--api-key", envvar="LORAPLEX_API_KEY", help="Key for --models. [env: LORAPLEX_API_KEY]")
@click.option(
    "--tenants",
    type=click.Path(path_type=Path),
    help="File in the format of demo.json with several tenants, their keys and models; replaces --models.",
)
@click.option("--keys-to-other-url", is_flag=True, help="Send --tenants' keys to a --url that is not their gateway.")
@click.option(
    "--internal-token-file", type=click.Path(path_type=Path), help="File with the token of an engine behind a gateway."
)
@options_of(Workload)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the report to this file.")
def bench(tenants: Path | None, internal_token_file: Path | None, json_path: Path | None, **flags: Any) -> None:
    """Measure any OpenAI-compatible server: throughput, latency, fairness between tenants."""
    from loraplex.bench.report import print_report, summarise
    from loraplex.bench.run import BenchError, measure

    shape = take(Workload, flags)
    url, targets = _targets_of_file(tenants, **flags) if tenants else _targets_of_models(**flags)
    if json_path and not json_path.parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {json_path.parent}")
    workload = Workload(tuple(targets), **shape)
    with one_line(BenchError, OSError):
        token = internal_token_file.read_text().strip() if internal_token_file else None
        if token == "":
            raise click.UsageError(f"--internal-token-file: {internal_token_file} is empty")
        samples, seconds = asyncio.run(measure(url, workload, token))
    report = summarise(workload, samples, seconds)
    print_report(report)
    if json_path:
        with one_line(OSError):
            json_path.write_text(json.dumps(report, indent=2) + "\n")
    if report["errors"]:
        failed = f"{report['errors']} of {workload.n} requests failed"
        raise click.ClickException(f"{failed}; the first: {report['first_error']}")


def _targets_of_file(
    file: Path, url: str | None, models: str | None, api_key: str | None, keys_to_other_url: bool
) -> tuple[str, list[Target]]:
    """Return the server's URL and the targets in a file like demo.json. Its keys go to its own gateway only."""
    if models is not None:
        raise click.UsageError("give either --models or --tenants")
    with one_line(DataDirError):
        demo = read_json(file)
    if demo is None:
        raise click.UsageError(f"--tenants: there is no file {file}")
    try:
        url = url or str(demo["gateway"])
        targets = [Target(t["name"], t["api_key"], model) for t in demo["tenants"] for model in t["models"]]
    except (KeyError, TypeError) as error:
        raise click.UsageError(f"--tenants: {file} is not in the form of demo.json") from error
    if not is_gateway_of(demo, url) and not keys_to_other_url:
        raise click.UsageError(f"{file} {whose(demo, url)}; with --keys-to-other-url its keys are sent there")
    return _checked(url, targets)


def _targets_of_models(
    url: str | None, models: str | None, api_key: str | None, keys_to_other_url: bool
) -> tuple[str, list[Target]]:
    """Return the server's URL and a target for each model, all with the same key."""
    if models is None:
        raise click.UsageError("give either --models or --tenants")
    return _checked(url, [Target("-", api_key, model) for model in models.split(",") if model])


def _checked(url: str | None, targets: list[Target]) -> tuple[str, list[Target]]:
    if not url or not targets:
        raise click.UsageError("--url is not given" if not url else "--models: expected the name of a model")
    check_url(url, "--url")
    return url, targets
