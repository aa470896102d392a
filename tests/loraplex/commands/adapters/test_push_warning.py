"""`loraplex adapter push` warns of an adapter whose config names another base model than the served one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from loraplex import resumable_push
from testing.adapter_files import CONFIG, write
from testing.gateway.commands import Run, runner
from testing.gateway.running import BASE_MODEL, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
OTHER = "acme/other-model"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(shared_gateway: Gateway) -> Run:
    await shared_gateway.tenant("acme")
    return runner(shared_gateway)


def adapter(folder: Path, **changes: Any) -> Path:
    return write(folder, config={**CONFIG, **changes})


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "gztar"])
async def test_another_base_is_named(form: str, run: Run, tmp_path: Path):
    path = adapter(tmp_path / "adapter", base_model_name_or_path=OTHER)
    if form != "folder":
        path = Path(shutil.make_archive(str(tmp_path / "archive"), form, path))
    done = await run("adapter", "push", f"pirate-{form}", str(path), "--tenant", "acme")
    assert done.stdout.startswith(f"pushed pirate-{form} version 1")
    expected = f"'{OTHER}', and it is served on '{BASE_MODEL}'; is that the same model?"
    assert done.stderr == f"warning: its config names the base model {expected}\n"


@pytest.mark.parametrize("named", [BASE_MODEL, f"some-hub/{BASE_MODEL.upper()}", f"/models/{BASE_MODEL}/", None, "", 7])
async def test_the_served_base_and_none_give_no_warning(named: Any, run: Run, tmp_path: Path):
    path = adapter(tmp_path / "adapter", base_model_name_or_path=named)
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == named
    assert (await run("adapter", "push", "pirate", str(path), "--tenant", "acme")).stderr == ""


async def test_a_config_that_no_engine_serves_is_refused_before_a_large_upload(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resumable_push, "MIN_BYTES", 0)
    path = adapter(tmp_path / "adapter", modules_to_save=["lm_head"])
    done = await run("adapter", "push", "pirate", str(path), "--tenant", "acme", code=1)
    assert done.stderr == "Error: modules_to_save: fully trained copies of base modules are not served\n"


async def test_no_line_of_progress_appears_twice(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resumable_push, "MIN_BYTES", 0)
    done = await run("adapter", "push", "pirate", str(adapter(tmp_path / "adapter")), "--tenant", "acme")
    assert done.stderr == "0 of 0 MiB\n"
