"""Commands of the command line beside a running gateway, in the same process."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from click.testing import CliRunner, Result

from loraplex.cli import main
from testing.gateway.running import ADMIN_KEY, Gateway

Run = Callable[..., Awaitable[Result]]


def runner(gateway: Gateway) -> Run:
    """Return a function that runs a command as a user does, in a thread beside the gateway.

    The command must succeed unless `code` is given.
    """
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def run(*arguments: str, code: int = 0, **options: Any) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env, **options)
        assert result.exit_code == code, result.output
        return result

    return run
