"""The `loraplex size` command: memory and throughput of an engine before it exists."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.config import EngineConfig
from loraplex.commands.common import download_dir_option, examples, one_line
from loraplex.commands.config_options import options_of
from loraplex.commands.output import json_option, print_json
from loraplex.commands.programs.programs import needs_extra
from wire.errors import ConfigError

if TYPE_CHECKING:
    from engine.sizing import Estimate
    from engine.sizing_speed import ExpectedLoad

PER_MILLISECOND = 1000


@click.command(
    epilog=examples(
        "loraplex size --model ~/models/Llama-3.1-8B-Instruct --gpu h100 --adapters 500 --rank 16",
        "loraplex size --model ~/models/Llama-3.1-8B-Instruct --gpu l4 --quantization int4 --prompt-tokens 2000",
        "loraplex size --model ~/models/SmolLM2-135M-Instruct --streams 16 --json",
    )
)
@click.option("--gpu", help="GPU by name, such as h100, l4 or rtx-4090; default: --device of this machine.")
@click.option("--adapters", type=click.IntRange(0), default=64, show_default=True, help="Adapters in use.")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Their rank.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output-tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens of an answer.")
@click.option("--streams", type=click.IntRange(1), help="Requests at once; default: as many as fit.")
@options_of(EngineConfig)
@download_dir_option
@json_option
def size(gpu: str | None, download_dir: Path, as_json: bool, streams: int | None, **flags: Any) -> None:
    """Estimate the memory and the throughput of an engine with these flags, without starting it.

    Without --gpu this machine's device is measured, for a few seconds. A model by hub id needs config.json only; a
    quantised model needs its weights.
    """
    from loraplex.models import ModelError, ensure_config

    with one_line(ConfigError, ModelError, OSError):
        model = str(ensure_config(flags["model"], download_dir))
        named = ("adapters", "rank", "prompt_tokens", "output_tokens")
        load = {name: flags.pop(name) for name in named}
        config = EngineConfig(**flags | {"model": model})
        with needs_extra("engine"):
            from engine.gpus import GPUS
            from engine.sizing import estimate
            from engine.sizing_speed import ExpectedLoad
        asked = ExpectedLoad(**load, streams=streams)
        if gpu is not None and gpu not in GPUS:
            raise click.UsageError(f"--gpu: expected one of {', '.join(GPUS)}; got {gpu!r}")
        found = estimate(config, gpu, asked)
    if as_json:
        print_json(asdict(found.memory) | asdict(found.throughput))
    else:
        _show(found, asked)


def _show(estimate: "Estimate", load: "ExpectedLoad") -> None:
    m, t = estimate.memory, estimate.throughput
    needs = m.needs
    rows = [
        ("weights", needs.weights, ""),
        ("adapters", needs.adapters, f"{m.num_pages:,} pages; {m.resident:,} of {load.adapters:,} adapters at once"),
        ("activations", needs.activations, "estimate; an engine on a GPU measures it"),
        ("CUDA graphs", needs.graphs, "estimate; an engine on a GPU measures it"),
        ("tables by seat", needs.seats, "token counts for penalties, and allowed tokens"),
        ("KV cache", m.kv_cache, f"{m.kv_tokens:,} tokens; a request has at most {m.context:,}"),
    ]
    click.echo(f"{m.device}: {_gib(m.usable)} of {_gib(m.total)} usable")
    for name, num_bytes, note in rows:
        if num_bytes:
            click.echo(f"  {name:<14} {_gib(num_bytes):>11}   {note}".rstrip())
    click.echo(f"  {'sum':<14} {_gib(needs.total + m.kv_cache):>11}")
    click.echo(f"host: {_gib(m.host_adapters)} for adapters; {m.in_host:,} of {load.adapters:,} fit")
    click.echo(
        f"{t.streams:,} streams of {load.prompt_tokens:,} + {load.output_tokens:,} tokens, {t.adapters:,} adapters "
        f"in a step: {t.tokens_per_second:,.0f} tokens/s"
    )
    click.echo(
        f"  a step takes {t.step_seconds * PER_MILLISECOND:.2f} ms (at least {t.bound_seconds * PER_MILLISECOND:.2f}), "
        f"a first token alone {t.first_token_seconds * PER_MILLISECOND:.1f} ms"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
