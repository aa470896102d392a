"""`loraplex adapter push` warns of an adapter whose config names another base model than the served one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from testing.adapter_files import CONFIG, write
from testing.gateway.commands import Run, runner
from testing.gateway.running import BASE_MODEL, Gateway

OTHER = "acme/other-model"


@pytest.fixture
async def run(gateway: Gateway) -> Run:
    await gateway.tenant("acme")
    return runner(gateway)


def adapter(folder: Path, **changes: Any) -> Path:
    return write(folder, config={**CONFIG, **changes})


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "gztar"])
async def test_another_base_is_named(form: str, run: Run, tmp_path: Path):
    path = adapter(tmp_path / "adapter", base_model_name_or_path=OTHER)
    if form != "folder":
        path = Path(shutil.make_archive(str(tmp_path / "archive"), form, path))
    done = await run("adapter", "push", "pirate", str(path), "--tenant", "acme")
    assert done.stdout.startswith("pushed pirate version 1")
    expected = f"'{OTHER}', and it is served on '{BASE_MODEL}'; is that the same model?"
    assert done.stderr == f"warning: its config names the base model {expected}\n"


@pytest.mark.parametrize("named", [BASE_MODEL, f"some-hub/{BASE_MODEL.upper()}", f"/models/{BASE_MODEL}/", None, "", 7])
async def test_the_served_base_and_none_give_no_warning(named: Any, run: Run, tmp_path: Path):
    path = adapter(tmp_path / "adapter", base_model_name_or_path=named)
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == named
    assert (await run("adapter", "push", "pirate", str(path), "--tenant", "acme")).stderr == ""
