"""The `loraplex up` command: the whole service on this machine, in the foreground."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from loraplex.commands.common import examples, one_line
from loraplex.commands.config_options import options_of
from loraplex.up.config import UpConfig
from wire.errors import ConfigError


@click.command(
    epilog=examples(
        "loraplex up --demo",
        "loraplex up --model ~/models/Llama-3.2-1B-Instruct --engines 2",
        "loraplex up --model ~/models/Llama-3.2-1B-Instruct --base qwen=~/models/Qwen3-0.6B --sleep-after 600",
        "loraplex up --demo --engine vllm --vllm-program ~/vllm/bin/vllm",
        "loraplex up --model HuggingFaceTB/SmolLM2-360M-Instruct --engine-args '--max-num-seqs 32'",
    )
)
@options_of(UpConfig)
def up(**flags: Any) -> None:
    """Start Valkey, engines and the gateway on this machine, with a database; Ctrl-C stops them.

    Secrets are generated once into the data directory. To use a DATABASE_URL with a password, prefer `loraplex gateway`
    with LORAPLEX_DATABASE_URL, which does not show it in the process list.
    """
    from loraplex.client import GatewayError
    from loraplex.models import ModelError, ensure_demo_model, ensure_gguf_folder, ensure_model
    from loraplex.up.datadir import DataDir, DataDirError
    from loraplex.up.device_assignment import PinError, choose_pins
    from loraplex.up.display import Display
    from loraplex.up.local import check_redis, run
    from loraplex.up.ports import UpError, check_port
    from loraplex.up.processes import ChildError
    from loraplex.up.vllm import find_program

    display = Display()
    with one_line(ConfigError, UpError, DataDirError, ModelError, ChildError, GatewayError, PinError):
        config = UpConfig(**flags)
        if not config.demo and config.model is None:
            raise click.UsageError("expected --model MODEL, or --demo for the demo model")
        check_port(config.host, config.port)
        if config.engine == "vllm":
            find_program(config)
        if config.redis_url is not None:
            check_redis(config.redis_url)
        pins = choose_pins(config.engines * (1 + len(config.base)), config.engine_args)
        data = DataDir.open(config.data_dir)
        with data.lock():
            with display.step(f"Preparing {config.model or 'the demo model'}") as say:

                def prepare(model: str) -> Path:
                    folder = ensure_model(model, data.models, say)
                    if not folder.is_file():
                        return folder
                    if config.engine == "vllm":
                        raise ConfigError("model", f"expected a model folder with --engine vllm, got {folder.name}")
                    return ensure_gguf_folder(folder, data.models)

                folder = ensure_demo_model(data.models, say) if config.model is None else prepare(config.model)
                further = tuple(f"{name}={prepare(model)}" for name, model in config.further)
            asyncio.run(run(replace(config, model=str(folder), base=further), data, display, pins))
