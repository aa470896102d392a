"""Compatibility with vLLM's command line.

Several values may follow one flag. vLLM's flags that the engine lacks, or has under another name, give advice.
"""

import click

from loraplex.commands.common import WithSubcommands

INSTEAD = {
    "--enable-lora": "leave it out: adapters are always served",
    "--max-loras": "use --adapter-memory: as many adapters run in one batch as fit in it",
    "--max-cpu-loras": "use --host-adapter-memory: as many adapters are kept as fit in it",
    "--tensor-parallel-size": "leave it out: an engine serves one device; start one engine a device",
    "--pipeline-parallel-size": "leave it out: an engine serves one device",
    "--data-parallel-size": "leave it out: start several engines behind a gateway",
    "--swap-space": "leave it out: preempted requests are computed again",
    "--cpu-offload-gb": "leave it out: all weights are kept on the device",
    "--disable-log-requests": "leave it out: requests are logged with --access-log only",
    "--enable-auto-tool-choice": "leave it out: calls are parsed in every request with tools; see --tool-call-parser",
    "--trust-remote-code": "leave it out: a model's own code is never run",
}


# Flags that take several values, as in `--lora-modules a=/path b=/path`; click accepts one value per flag.
LISTS = ("--lora-modules",)


class EngineCommand(WithSubcommands):
    """The command that starts an engine."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, _one_value_a_flag(args))
        except click.NoSuchOption as error:
            if error.option_name not in INSTEAD:
                raise
            raise click.UsageError(f"{error.option_name} is vLLM's: {INSTEAD[error.option_name]}", ctx) from None


def _one_value_a_flag(args: list[str]) -> list[str]:
    """Rewrite `--flag a b` as `--flag a --flag b`.

    Every other word is a flag's value, because the command has no arguments.
    """
    spread: list[str] = []
    flag = ""
    for word in args:
        if word.startswith("-"):
            flag = word.partition("=")[0]
        elif flag in LISTS and spread[-1] != flag:
            spread.append(flag)
        spread.append(word)
    return spread
