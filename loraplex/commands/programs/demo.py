"""The `loraplex demo` commands: the one-shot services of docker-compose.yml, which make its demo."""

import asyncio
import os
import time
from pathlib import Path

import click

from loraplex.commands.common import examples, one_line
from wire.errors import ConfigError

# Maximum wait for the first engine, which compiles its kernels on the first start.
ENGINE_SECONDS = 600
POLL_SECONDS = 1.0
WARNING = (
    "WARNING: this is a demo, with generated secrets and a small model. For your own model and secrets, write .env as "
    "deploy/README.md describes."
)

SECRETS = click.option(
    "--secrets",
    type=click.Path(path_type=Path),
    default=Path("/secrets"),
    show_default=True,
    help="Folder of the secrets' files.",
)


@click.group()
def demo() -> None:
    """Make the demo of docker-compose.yml."""


@demo.command("prepare", epilog=examples("loraplex demo prepare --secrets /secrets --model-dir /model"))
@SECRETS
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    default=Path("/model"),
    show_default=True,
    help="Folder for the demo model.",
)
def prepare(secrets: Path, model_dir: Path) -> None:
    """Write the secrets of .env to files; without MODEL_DIR, generate missing ones and fetch the demo model."""
    from loraplex.models import ModelError
    from loraplex.up.container_demo import is_demo, write_demo_model, write_secrets

    with one_line(ConfigError, ModelError, OSError):
        if not is_demo(os.environ) and not os.environ.get("LORAPLEX_BASE_MODEL"):
            raise ConfigError("LORAPLEX_BASE_MODEL", "is required with MODEL_DIR; set it in .env (deploy/README.md)")
        write_secrets(secrets, os.environ)
        if is_demo(os.environ):
            click.echo(WARNING, err=True)
            # Only changes of the phase, because a log is no terminal.
            phases: set[str] = set()
            write_demo_model(model_dir, lambda line: _say_once(line, phases))
    click.echo("the secrets and the model are in place")


def _say_once(line: str, phases: set[str]) -> None:
    phase = line.partition(":")[0]
    if phase not in phases:
        phases.add(phase)
        click.echo(phase, err=True)


@demo.command("tenants", epilog=examples("loraplex demo tenants --gateway http://gateway:8080 --base-model base"))
@SECRETS
@click.option("--gateway", default="http://gateway:8080", show_default=True, help="URL of the gateway from here.")
@click.option(
    "--published", default="http://127.0.0.1:8080", show_default=True, help="URL of the gateway for the summary."
)
@click.option("--base-model", required=True, help="The base model's name in the API.")
def tenants(secrets: Path, gateway: str, published: str, base_model: str) -> None:
    """Create the demo's tenants, keys and adapters once, and print them; with MODEL_DIR, do nothing."""
    from loraplex.client import GatewayError
    from loraplex.up.container_demo import is_demo
    from loraplex.up.datadir import DataDir, DataDirError
    from loraplex.up.demo_tenants import provision
    from loraplex.up.display import Display

    if not is_demo(os.environ):
        click.echo("MODEL_DIR is set: no demo")
        return
    with one_line(GatewayError, DataDirError, OSError):
        asyncio.run(_wait_ready(gateway))
        admin_key = (secrets / "admin_key").read_text().strip()
        made = asyncio.run(provision(gateway, admin_key, base_model, DataDir(secrets), "compose"))
    if made:
        Display().demo_banner(published, admin_key, base_model, made)
    click.echo(WARNING, err=True)


async def _wait_ready(gateway: str) -> None:
    """Wait until the gateway can serve a request. Raises GatewayError after ENGINE_SECONDS."""
    from loraplex.client import GatewayClient, GatewayError

    deadline = time.monotonic() + ENGINE_SECONDS
    async with GatewayClient(gateway, "") as client:
        while True:
            try:
                await client.call("GET", "/readyz?strict=true")
                return
            except GatewayError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_SECONDS)
