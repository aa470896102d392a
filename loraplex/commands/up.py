"""The `loraplex up` command: the whole service on this machine, in the foreground."""

import asyncio
import shlex
from pathlib import Path

import click

from loraplex.commands.common import DATA_DIR, examples, one_line


@click.command(
    epilog=examples(
        "loraplex up --demo",
        "loraplex up --model ~/models/Llama-3.2-1B-Instruct --engines 2",
        "loraplex up --model HuggingFaceTB/SmolLM2-360M-Instruct --engine-args '--max-num-seqs 32'",
    )
)
@click.option("--demo", is_flag=True, help="Serve the demo model, with two tenants and their adapters.")
@click.option("--model", help="Model folder, .gguf file, or hub id; with --demo it replaces the demo model.")
@click.option("--served-model-name", help="The base model's name in the API; default: from --model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address for the gateway to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(1, 65535), help="The gateway's port.")
@click.option(
    "--data-dir",
    default=DATA_DIR,
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder that keeps database, adapters, secrets, converted models and logs between runs.",
)
@click.option(
    "--database-url", help="SQLAlchemy URL (postgresql+asyncpg://...); default: SQLite in the data directory."
)
@click.option("--redis-url", help="URL of Redis or Valkey; default: an embedded Valkey.")
@click.option("--engines", default=1, show_default=True, type=click.IntRange(1, 64), help="Number of engine processes.")
@click.option("--engine-args", default="", help="Flags for every engine, as one string: '--max-num-seqs 32'.")
def up(
    demo: bool,
    model: str | None,
    served_model_name: str | None,
    host: str,
    port: int,
    data_dir: Path,
    database_url: str | None,
    redis_url: str | None,
    engines: int,
    engine_args: str,
) -> None:
    """Start Valkey, the database, engines and the gateway on this machine; Ctrl-C stops them.

    Secrets are generated once into the data directory. To use a DATABASE_URL with a password, prefer `loraplex gateway`
    with LORAPLEX_DATABASE_URL, which does not show it in the process list.
    """
    from loraplex.client import GatewayError
    from loraplex.models import ModelError, ensure_demo_model, ensure_gguf_folder, ensure_model
    from loraplex.up.datadir import DataDir, DataDirError
    from loraplex.up.display import Display
    from loraplex.up.local import UpError, UpOptions, check_port, check_redis, run
    from loraplex.up.processes import ChildError

    if not demo and model is None:
        raise click.UsageError("say which model to serve with --model, or --demo for the demo model")
    display = Display()
    with one_line(UpError, DataDirError, ModelError, ChildError, GatewayError):
        check_port(host, port)
        if redis_url is not None:
            check_redis(redis_url)
        data = DataDir.open(data_dir)
        with data.lock():
            with display.step(f"Preparing {model or 'the demo model'}") as say:
                if model is None:
                    folder = ensure_demo_model(data.models, say)
                else:
                    folder = ensure_model(model, data.models, say)
                    if folder.is_file():
                        folder = ensure_gguf_folder(folder, data.models)
            options = UpOptions(
                model_dir=folder,
                base_model=served_model_name or folder.name,
                host=host,
                port=port,
                database_url=database_url,
                redis_url=redis_url,
                engines=engines,
                engine_args=tuple(shlex.split(engine_args)),
            )
            asyncio.run(run(options, data, display, demo=demo))
