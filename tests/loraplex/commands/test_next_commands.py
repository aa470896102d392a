"""Commands and options that the output names for the next step: they reach the same gateway when they are pasted."""

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

from testing.gateway.running import ADMIN_KEY
from tests.loraplex.test_cli import refused, run


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


def test_a_command_without_a_running_stack_names_the_option_that_selects_another(tmp_path: Path):
    stored = tmp_path / "local.json"
    for command in (("status",), ("chat", "hello")):
        assert "--data-dir" in refused(run(*command, "--data-dir", str(tmp_path)), 2)
    stored.write_text(json.dumps({"gateway": "http://127.0.0.1:9", "admin_key": "k"}))
    line = refused(run("status", "--data-dir", str(tmp_path)), 1)
    assert "cannot reach the gateway at http://127.0.0.1:9" in line
    assert f"{stored} names it" in line
    assert "--data-dir selects another one" in line
    # The user gave this URL, so no file is to blame.
    given = refused(run("status", "--gateway", "http://127.0.0.1:9", "--admin-key", "k"), 1)
    assert "cannot reach the gateway at http://127.0.0.1:9" in given
    assert "--data-dir" not in given
