"""The `loraplex gateway | engine | migrate` commands: each program by itself, as a deployment runs it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from loraplex.commands.common import DATA_DIR, examples, one_line, settings_errors
from loraplex.commands.vllm_flags import EngineCommand

# Addresses to listen on that clients cannot connect to.
ANY_HOST = ("0.0.0.0", "::")
MODULE_FIELDS = ("name", "path", "base_model_name")
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Bytes(click.ParamType):
    """A size: `2147483648`, `2048MiB`, `2G` (units are powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().lower().removesuffix("b").removesuffix("i")
        number, unit = text.rstrip("kmgt"), text[len(text.rstrip("kmgt")) :]
        try:
            return int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size; expected bytes or a number with KiB, MiB, GiB or TiB", param, ctx)


class Module(click.ParamType):
    """`name=path` or `{"name": ..., "path": ...}` as in vLLM; a base model's name in it is ignored."""

    name = "name=path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, _, path = value.partition("=")
        if value.lstrip().startswith("{"):
            try:
                fields = json.loads(value)
            except ValueError:
                fields = {}
            name, path = fields.get("name"), fields.get("path")
            if unknown := fields.keys() - MODULE_FIELDS:
                self.fail(f"{value!r} has a field {min(unknown)!r}; known are {', '.join(MODULE_FIELDS)}", param, ctx)
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            self.fail(f"""{value!r} is neither name=path nor {{"name": "...", "path": "..."}}""", param, ctx)
        return name, Path(path).expanduser()


class Sizes(click.ParamType):
    """Whole numbers, comma separated."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(size) for size in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not numbers with commas between them", param, ctx)


@click.command(
    cls=EngineCommand,
    epilog=examples(
        "loraplex engine --model ~/models/Llama-3.2-1B-Instruct --lora-modules sql=~/adapters/sql fr=~/adapters/fr",
        "loraplex engine --model ~/models/Llama-3.2-1B-Instruct --adapter-store /srv/adapters --port 8001",
    ),
)
@click.option("--model", required=True, help="A model folder, a .gguf file, or a hub id.")
@click.option("--tokenizer", help="Folder with the tokenizer to use; default: the model's own.")
@click.option("--served-model-name", help="The base model's name in the API; default: from --model.")
@click.option("--dtype", default="auto", show_default=True, help="Model dtype: auto, float32, bfloat16 or float16.")
@click.option("--device", default="auto", show_default=True, help="Device: auto, cpu or cuda.")
@click.option("--max-model-len", type=int, help="Maximum tokens of prompt and answer together; default: the model's.")
@click.option("--max-num-seqs", default=64, show_default=True, help="Maximum requests in a batch.")
@click.option("--max-num-batched-tokens", default=640, show_default=True, help="Maximum tokens in a step.")
@click.option("--block-size", default=16, show_default=True, help="Tokens per KV cache block.")
@click.option("--threads", type=int, help="CPU threads; default: as many as CPU affinity and cgroup quota allow.")
@click.option("--kv-cache-memory", type=Bytes(), help="Size of the KV cache, such as 4GiB; default: from the device.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="KV cache dtype: auto, fp8_e4m3 or int8.")
@click.option("--enforce-eager", is_flag=True, help="Do not use CUDA graphs.")
@click.option("--cuda-graph-sizes", type=Sizes(), help="Batch sizes of CUDA graphs for decode, such as 1,2,4,8.")
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    show_default=True,
    help="Reuse the KV cache of equal prefixes.",
)
@click.option(
    "--enable-chunked-prefill/--no-enable-chunked-prefill",
    default=True,
    show_default=True,
    help="Split long prompts into chunks that share steps with running requests.",
)
@click.option(
    "--prefill-stretch",
    default=1.8,
    show_default=True,
    help="Maximum slow-down of a decode step caused by prefill, as a factor.",
)
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Plan the next step while the current one runs; default: on a GPU.",
)
@click.option("--max-lora-rank", default=64, show_default=True, help="Maximum rank of an adapter.")
@click.option("--lora-dtype", default="auto", show_default=True, help="Dtype of adapters: auto, fp8_e4m3 or int8.")
@click.option("--adapter-store", help="Folder of adapters by digest, for models named `sha256:...`.")
@click.option("--adapter-memory", type=Bytes(), help="Device memory for adapters; default: from the device.")
@click.option("--host-adapter-memory", type=Bytes(), help="Host memory for adapters.  [default: 4GiB]")
@click.option("--lora-modules", type=Module(), multiple=True, help="Adapter folders to serve under given names.")
@click.option(
    "--max-waiting",
    default=1024,
    show_default=True,
    type=click.IntRange(0),
    help="Maximum waiting requests; further requests get 503.",
)
@click.option(
    "--finished-file",
    type=click.Path(path_type=Path),
    help="File that keeps the usage of finished requests over restarts.",
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(["hermes", "llama3_json"]),
    help="Format of tool calls; default: from the chat template.",
)
@click.option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="Default sampling parameters: the model's generation_config.json (auto) or OpenAI's (none).",
)
@click.option("--seed", default=0, show_default=True, help="Seed of requests without one.")
@click.option(
    "--download-dir",
    type=click.Path(path_type=Path),
    default=DATA_DIR / "models",
    show_default=True,
    help="Folder for models downloaded by hub id.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--gateway", "gateways", multiple=True, help="URL of a gateway to announce this engine to; repeatable.")
@click.option("--advertise-url", help="URL at which gateways reach this engine; default: --host and --port.")
@click.option("--drain-seconds", default=30.0, show_default=True, help="Seconds for requests to finish after SIGTERM.")
@click.option(
    "--internal-token-file",
    type=click.Path(path_type=Path),
    help="File with the internal token, instead of LORAPLEX_INTERNAL_TOKEN.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="LORAPLEX_ENGINE_API_KEY",
    help="Key that clients send as Authorization: Bearer; repeatable. [env: LORAPLEX_ENGINE_API_KEY, space separated]",
)
@click.option("--access-log", is_flag=True, help="Log a line per request.")
def engine(**flags: Any) -> None:
    """Serve one base model and its adapters over the OpenAI API, without tenants or quotas."""
    # OpenMP reads this once, when torch is loaded. Spinning threads would take the cores from the server.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from adapters.manifest import AdapterError
    from adapters.store import open_store
    from engine.config import EngineConfig
    from loraplex.models import ModelError, ensure_model
    from loraplex.up.display import loading_bar
    from loraplex.up.local import UpError, check_port
    from wire.errors import ConfigError

    host, port = flags.pop("host"), flags.pop("port")
    store, modules = flags.pop("adapter_store"), _by_name(flags.pop("lora_modules"))
    with one_line(ConfigError, ModelError, AdapterError, UpError, OSError):
        check_port(host, port)
        token = _internal_token(flags.pop("internal_token_file"))
        api_keys, access_log = flags.pop("api_keys"), flags.pop("access_log")
        if not all(api_keys):
            raise click.UsageError("--api-key is empty")
        gateways, advertise_url = flags.pop("gateways"), flags.pop("advertise_url")
        if gateways and not advertise_url and host in ANY_HOST:
            raise click.UsageError(f"--gateway with --host {host} needs --advertise-url as well")
        drain_s = flags.pop("drain_seconds")
        max_waiting, tool_call_parser = flags.pop("max_waiting"), flags.pop("tool_call_parser")
        finished_file = flags.pop("finished_file")
        _check_parent("--finished-file", finished_file)
        for folder in modules.values():
            if not folder.is_dir():
                raise click.ClickException(f"--lora-modules: no such folder: {folder}")
        if store and "://" not in store:
            _check_parent("--adapter-store", Path(store))
        name = flags["served_model_name"] or Path(flags["model"]).name.removesuffix(".gguf")
        flags["model"] = str(ensure_model(flags["model"], flags.pop("download_dir")))
        given = {flag: value for flag, value in flags.items() if value is not None}
        config = EngineConfig(**given | {"served_model_name": name})
        with _needs_extra("engine"):  # torch loads for seconds, so all checks without it come first
            from engine.program import run
        with loading_bar() as progress:
            code = run(
                config,
                host=host,
                port=port,
                adapter_store=open_store(store) if store else None,
                internal_token=token,
                api_keys=api_keys,
                access_log=access_log,
                lora_modules={lora_name: str(path) for lora_name, path in modules.items()},
                max_waiting=max_waiting,
                tool_call_parser=tool_call_parser,
                finished_file=finished_file,
                drain_s=drain_s,
                gateways=gateways,
                advertise_url=advertise_url,
                announce_token=os.environ.get("LORAPLEX_ANNOUNCE_TOKEN"),
                ready=lambda bound: click.echo(f"engine ready: {name} on http://{host}:{bound}"),
                progress=progress,
            )
    sys.exit(code)


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

    All settings can be given in the environment as LORAPLEX_...; secrets and the URLs that contain one only there:
    LORAPLEX_DATABASE_URL, LORAPLEX_REDIS_URL, LORAPLEX_INTERNAL_TOKEN, LORAPLEX_KEY_PEPPER, LORAPLEX_ADMIN_KEY,
    LORAPLEX_ANNOUNCE_TOKEN.
    """
    from gateway.serve import run
    from gateway.settings import Settings
    from loraplex.up.local import UpError, check_port

    with settings_errors(), one_line(UpError, OSError):
        settings = Settings.load(**flags)
        check_port(settings.host, settings.port)
        run(settings)


@click.command(epilog=examples("LORAPLEX_DATABASE_URL=postgresql://user:password@host/loraplex loraplex migrate"))
def migrate() -> None:
    """Upgrade the database at LORAPLEX_DATABASE_URL to the newest schema."""
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.records import database

    url = os.environ.get("LORAPLEX_DATABASE_URL")
    if not url:
        raise click.UsageError("LORAPLEX_DATABASE_URL: is required; expected the URL of the database")
    with settings_errors(), one_line(SQLAlchemyError, OSError):
        database.migrate(url)
    click.echo("the database is up to date")


@contextmanager
def _needs_extra(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed; pip install 'loraplex[{extra}]'") from error


def _by_name(modules: tuple[tuple[str, Path], ...]) -> dict[str, Path]:
    named = dict(modules)
    for name, path in modules:
        if named[name] != path:
            raise click.UsageError(f"--lora-modules: {name!r} is given to {path} and to {named[name]}")
    return named


def _check_parent(flag: str, path: Path | None) -> None:
    """Refuse a path whose parent folder is missing, so that a misspelt path is not created."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.ClickException(f"{flag}: no such folder: {path.absolute().parent}")


def _internal_token(file: Path | None) -> str | None:
    """Return the token from the file if one is given, else from the environment.

    An empty token is an error, not None.
    """
    try:
        token = file.read_text().strip() if file else os.environ.get("LORAPLEX_INTERNAL_TOKEN")
    except OSError as error:
        raise click.ClickException(f"--internal-token-file: {error}") from error
    if token == "":
        raise click.UsageError("the internal token is empty")
    return token
