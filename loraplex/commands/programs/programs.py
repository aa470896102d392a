"""The `loraplex gateway | engine | migrate` commands: each program by itself, as a deployment runs it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from engine.config import EngineConfig, ServerConfig
from loraplex.commands.common import (
    database_url,
    download_dir_option,
    examples,
    one_line,
    settings_errors,
    variable,
)
from loraplex.commands.config_options import options_of, take
from loraplex.commands.programs.vllm_flags import EngineCommand
from wire.errors import ConfigError

# Addresses to listen on that clients cannot connect to.
ANY_HOST = ("0.0.0.0", "::")


@click.command(
    cls=EngineCommand,
    epilog=examples(
        "loraplex engine --model ~/models/Llama-3.2-1B-Instruct --lora-modules sql=~/adapters/sql fr=~/adapters/fr",
        "loraplex engine --model ~/models/Llama-3.2-1B-Instruct --adapter-store /srv/adapters --port 8001",
    ),
)
@options_of(EngineConfig, ServerConfig)
@click.option(
    "--internal-token-file",
    type=click.Path(path_type=Path),
    help="File with the internal token, instead of LORAPLEX_INTERNAL_TOKEN.",
)
@download_dir_option
def engine(internal_token_file: Path | None, download_dir: Path, **flags: Any) -> None:
    """Serve one base model and its adapters over the OpenAI API, without tenants or quotas."""
    # OpenMP reads this once, when torch is loaded. Spinning threads would take the cores from the server.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from adapters.manifest import AdapterError
    from loraplex.models import ModelError, ensure_model
    from loraplex.up.display import start_progress
    from loraplex.up.ports import UpError, check_port

    with one_line(ConfigError, ModelError, AdapterError, UpError, OSError):
        server = _server_config(take(ServerConfig, flags), internal_token_file)
        check_port(server.host, server.port)
        name = flags["served_model_name"] or Path(flags["model"]).name.removesuffix(".gguf")
        model = str(ensure_model(flags["model"], download_dir))
        config = EngineConfig(**flags | {"model": model, "served_model_name": name})
        with needs_extra("engine"):  # torch loads for seconds, so all checks without it come first
            from engine.program import run
        with start_progress() as progress:
            code = run(
                config,
                server,
                ready=lambda bound: click.echo(f"engine ready: {name} on http://{server.host}:{bound}"),
                progress=progress,
            )
    sys.exit(code)


def _server_config(flags: dict[str, Any], internal_token_file: Path | None) -> ServerConfig:
    """Return the checked configuration of the engine's server, with the secrets from files and the environment."""
    server = ServerConfig(
        **flags,
        internal_token=_internal_token(internal_token_file),
        announce_token=variable("LORAPLEX_ANNOUNCE_TOKEN"),
    )
    _check_names(server.lora_modules)
    if not all(server.api_keys):
        raise click.UsageError("--api-key is empty")
    if server.gateways and not server.advertise_url and server.host in ANY_HOST:
        raise click.UsageError(f"--gateway with --host {server.host} needs --advertise-url as well")
    _check_parent("--usage-log", server.usage_log)
    for _, folder in server.lora_modules:
        if not folder.is_dir():
            raise click.ClickException(f"--lora-modules: no such folder: {folder}")
    if server.adapter_store and "://" not in server.adapter_store:
        _check_parent("--adapter-store", Path(server.adapter_store))
    return server


@click.command(epilog=examples("loraplex gateway --port 8080 --workers 4 --metrics-port 9100"))
@click.option("--host", help="Address to listen on. [env: LORAPLEX_HOST; default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on. [env: LORAPLEX_PORT; default: 8080]")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve /metrics on this port, without a key.")
@click.option("--workers", type=click.IntRange(1), help="Number of processes that share the port. [default: 1]")
@click.option("--engines", help="Engine URLs, comma separated. [env: LORAPLEX_ENGINES]")
@click.option("--base-model", help="The base model's name in the API. [env: LORAPLEX_BASE_MODEL]")
@click.option("--model-dir", help="Folder with config.json and tokenizer; needs no weights. [env: LORAPLEX_MODEL_DIR]")
@click.option("--adapter-store", help="Adapter folder shared with the engines. [env: LORAPLEX_ADAPTER_STORE]")
@click.option("--migrate-on-start", is_flag=True, default=None, help="Upgrade the database schema first.")
def gateway(**flags: Any) -> None:
    """Serve tenants: keys, quotas, adapters and usage in front of engines. Never loads torch.

    Every setting has an environment variable, LORAPLEX_.... Secrets, and URLs that contain one, have no flag:
    LORAPLEX_DATABASE_URL, LORAPLEX_REDIS_URL, LORAPLEX_INTERNAL_TOKEN, LORAPLEX_KEY_PEPPER, LORAPLEX_ADMIN_KEY,
    LORAPLEX_ANNOUNCE_TOKEN.
    """
    from gateway.serve import run
    from gateway.settings import Settings
    from loraplex.up.ports import UpError, check_port

    with settings_errors(), one_line(UpError, OSError):
        settings = Settings.load(**flags)
        check_port(settings.host, settings.port)
        run(settings)


@click.command(epilog=examples("LORAPLEX_DATABASE_URL=postgresql://user:password@host/loraplex loraplex migrate"))
def migrate() -> None:
    """Upgrade the database at LORAPLEX_DATABASE_URL to the newest schema."""
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.records.sql import database

    url = database_url()
    with settings_errors(), one_line(SQLAlchemyError, OSError):
        database.migrate(url)
    click.echo("the database is up to date")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a missing package into an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed; in Loraplex's checkout: pip install -e '.[{extra}]'"
        ) from error


def _check_names(modules: tuple[tuple[str, Path], ...]) -> None:
    """Raise a usage error for a name that is given to two folders."""
    named = dict(modules)
    for name, path in modules:
        if named[name] != path:
            raise click.UsageError(f"--lora-modules: {name!r} is given to {path} and to {named[name]}")


def _check_parent(flag: str, path: Path | None) -> None:
    """Refuse a path whose parent folder is missing, so that a misspelt path is not created."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.ClickException(f"{flag}: no such folder: {path.absolute().parent}")


def _internal_token(file: Path | None) -> str | None:
    """Return the token from the file if one is given, else from the environment.

    An empty token is an error, not None.
    """
    try:
        token = file.read_text().strip() if file else variable("LORAPLEX_INTERNAL_TOKEN")
    except OSError as error:
        raise click.ClickException(f"--internal-token-file: {error}") from error
    if token == "":
        raise click.UsageError("the internal token is empty")
    return token
