"""A vLLM server in place of our engine: its command, environment and address for the gateway.

The server has a key of its own, because a foreign server must never see the internal token.
"""

import hashlib
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from loraplex.up.config import LOOPBACK, UpConfig
from loraplex.up.device_assignment import flag_value
from wire.errors import ConfigError

# Variable with the key, for vLLM and for the gateway.
KEY = "VLLM_API_KEY"
# Flags that determine the gateway's limits for the server, with our defaults.
REQUESTS, ADAPTERS, RANK = ("--max-num-seqs", "64"), ("--max-cpu-loras", "64"), ("--max-lora-rank", "64")
DEFAULTS = (*REQUESTS, *ADAPTERS, *RANK, "--max-loras", "8")
# Variables that the plugin reads, beside the store's.
PLUGIN_VARIABLES = ("LORAPLEX_ADAPTER_CACHE", "LORAPLEX_ADAPTER_CACHE_BYTES", "LORAPLEX_BASE_DIGEST")


def find_program(config: UpConfig) -> str:
    """Return the path of vLLM's program. Raises ConfigError."""
    program = shutil.which(config.vllm_program)
    if program is None:
        raise ConfigError(
            "vllm_program", f"expected vLLM's program, such as VENV/bin/vllm; found no program {config.vllm_program!r}"
        )
    return program


def command(config: UpConfig, base: str, model: str, port: int) -> tuple[str, ...]:
    """Return the command of a server of a base model (its name and folder).

    The operator's flags come last, so they replace the defaults. Raises ConfigError.
    """
    return (
        *(find_program(config), "serve", model, "--served-model-name", base),
        *("--host", LOOPBACK, "--port", str(port), "--enable-lora", *DEFAULTS),
        *shlex.split(config.engine_args),
    )


def environment(store: Path, internal_token: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the server's variables: its key, and the store for Loraplex's plugin, if that is installed there.

    inherited: variables of this process. The server gets none of the gateway's settings, several of which are secrets.
    """
    return {
        **{
            name: text
            for name, text in inherited.items()
            if not name.startswith("LORAPLEX_") or name in PLUGIN_VARIABLES
        },
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "LORAPLEX_ADAPTER_STORE": str(store),
        **key(internal_token),
    }


def key(internal_token: str) -> Mapping[str, str]:
    """Return the variable with the server's key, which is the same after a restart of either part."""
    return {KEY: hashlib.sha256(f"vllm\0{internal_token}".encode()).hexdigest()}


def address(config: UpConfig, url: str) -> str:
    """Return the server's item in LORAPLEX_ENGINES."""
    requests, adapters, rank = (flag_value(config.engine_args, *flag) for flag in (REQUESTS, ADAPTERS, RANK))
    return f"vllm+{url}?requests={requests}&adapters={adapters}&max_rank={rank}&key_env={KEY}"
