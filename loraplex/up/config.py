"""Configuration of `loraplex up`, frozen: the flags, and the addresses that follow from them."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from loraplex.up.datadir import DATA_DIR
from wire.errors import ConfigError
from wire.options import check_options, option

LOOPBACK = "127.0.0.1"
EngineProgram = Literal["loraplex", "vllm"]


@dataclass(frozen=True)
class UpConfig:
    """Configuration of `loraplex up`. A URL of None: the embedded service. Raises ConfigError for a bad value."""

    demo: bool = option(False, help="Serve the demo model, with two tenants and their adapters.")
    model: str | None = option(
        None, help="Model folder, .gguf file, or hub id; with --demo it replaces the demo model."
    )
    served_model_name: str | None = option(None, help="The base model's name in the API; default: from --model.")
    host: str = option(LOOPBACK, help="Address for the gateway to listen on.")
    port: int = option(8080, least=1, most=65535, help="The gateway's port.")
    data_dir: Path = option(
        DATA_DIR, help="Folder that keeps database, adapters, secrets, converted models and logs between runs."
    )
    database_url: str | None = option(
        None, help="SQLAlchemy URL (postgresql+asyncpg://...); default: SQLite in the data directory."
    )
    redis_url: str | None = option(None, help="URL of Redis or Valkey; default: an embedded Valkey.")
    engines: int = option(
        1, least=1, most=64, help="Number of engine processes, each with a GPU or a share of the cores."
    )
    base: tuple[str, ...] = option(
        (), help="A further base model, as NAME=MODEL; with as many engines as the first one. Repeatable."
    )
    sleep_after: float | None = option(
        None, least=1, help="Seconds without requests after which a base model's engines stop; default: never."
    )
    engine: EngineProgram = option("loraplex", help="Engine: our own, or a vLLM server.")
    vllm_program: str = option("vllm", help="vLLM's program for --engine vllm, such as VENV/bin/vllm.")
    engine_args: str = option("", help="Flags for every engine, as one string: '--max-num-seqs 32'.")

    def __post_init__(self) -> None:
        check_options(self)
        try:
            shlex.split(self.engine_args)
        except ValueError as error:
            raise ConfigError("engine_args", f"expected flags as in a shell: {error}") from error

        if self.engine == "vllm" and self.sleep_after is not None:
            raise ConfigError("sleep_after", "works with our own engine only, not with --engine vllm")
        names = [self.served_model_name, *(name for name, _ in self.further)]
        if not all(name and model for name, model in self.further) or len(set(names)) < len(names):
            raise ConfigError("base", f"expected NAME=MODEL with different names, got {', '.join(self.base)}")

    @property
    def further(self) -> list[tuple[str, str]]:
        """Return the names and models of `base`."""
        return [(name, model) for name, _, model in (each.partition("=") for each in self.base)]

    @property
    def model_dir(self) -> Path:
        """Return the local folder of the model, once `model` names one."""
        assert self.model is not None
        return Path(self.model)

    @property
    def base_model(self) -> str:
        """Return the base model's name in the API."""
        return self.served_model_name or self.model_dir.name

    @property
    def gateway_url(self) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    @property
    def database_name(self) -> str:
        """Return a name of the database for messages, without user name and password."""
        if self.database_url is None:
            return "local"
        url = urlsplit(self.database_url)
        return f"{url.hostname}:{url.port}{url.path}"
