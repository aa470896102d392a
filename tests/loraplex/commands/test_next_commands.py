"""Commands that the output names for the next step: they reach the same gateway when they are pasted."""

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

from testing.gateway.running import ADMIN_KEY
from tests.loraplex.test_cli import run


async def test_a_named_command_has_the_data_directory_and_the_gateway_that_were_given(serve: Any, tmp_path: Path):
    folder = tmp_path / "my data"
    folder.mkdir()
    async with serve() as running:
        (folder / "local.json").write_text(json.dumps({"gateway": running.url, "admin_key": ADMIN_KEY}))
        for flags in (("--data-dir", str(folder)), ("--gateway", running.url, "--data-dir", str(folder))):
            name = f"t{len(flags)}"
            made = await asyncio.to_thread(run, "tenant", "create", name, *flags)
            [named] = re.findall(r"next: loraplex (.*)", made.output)
            key = await asyncio.to_thread(run, *shlex.split(named))
            assert key.exit_code == 0, key.output
            keys = (await running.admin.get("/admin/api/keys?all=true")).json["data"]
            assert name in [each["tenant"] for each in keys]
        env = {"LORAPLEX_GATEWAY": running.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}
        made = await asyncio.to_thread(run, "tenant", "create", "plain", env=env)
        # The environment stays as it is, and a key is not printed.
        assert made.output == "created tenant plain; next: loraplex key create plain\n"
