"""`loraplex adapter push` sends no large adapter whose rank no engine serves."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from loraplex import resumable_push
from loraplex.client import GatewayClient
from testing.adapter_files import CONFIG, tensors, write
from testing.gateway.commands import Run, runner
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, Gateway

ADAPTERS = "/admin/api/adapters?tenant=acme"
PUSH = ("adapter", "push", "pirate")
OF_ACME = ("--tenant", "acme")
TOO_LARGE = "the rank of model.layers.0.self_attn.q_proj is 65; the engines here serve ranks up to 64\n"


@pytest.fixture
async def run(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(resumable_push, "MIN_BYTES", 0)
    await gateway.tenant("acme")
    return runner(gateway)


def adapter(folder: Path, rank: int, **changes: Any) -> str:
    return str(write(folder, tensors(rank=rank), CONFIG | {"r": rank} | changes))


@pytest.mark.parametrize("base", [(), ("--base", BASE_MODEL)])
async def test_a_rank_that_no_engine_serves_is_refused_before_the_upload(
    base: tuple[str, ...], run: Run, gateway: Gateway, tmp_path: Path
):
    done = await run(*PUSH, adapter(tmp_path / "large", 65), *OF_ACME, *base, code=1)
    assert done.stderr == f"Error: r: {TOO_LARGE}"
    # The gateway saw nothing: it records a refused upload as a rejected version.
    assert (await gateway.admin.get(ADAPTERS)).json["data"] == []
    assert (await run(*PUSH, adapter(tmp_path / "small", 64), *OF_ACME, *base)).stdout.startswith("pushed pirate")


@pytest.mark.parametrize("kind", ["", "zip", "gztar"])
async def test_a_rank_of_a_pattern_is_refused_before_the_upload(kind: str, run: Run, gateway: Gateway, tmp_path: Path):
    """Only `r` was read, so the gateway refused such an adapter after all of the upload."""
    path = folder = adapter(tmp_path / "pattern", 65, r=8, rank_pattern={".*": 65})
    if kind:
        path = shutil.make_archive(str(tmp_path / "packed"), kind, folder)
    assert (await run(*PUSH, path, *OF_ACME, code=1)).stderr == f"Error: rank_pattern: {TOO_LARGE}"
    assert (await gateway.admin.get(ADAPTERS)).json["data"] == []


@pytest.mark.parametrize(
    "config",
    [{"r": 65, "rank_pattern": {".*_proj": 4}}, {"r": 4, "rank_pattern": {"k_proj": 65, ".*": 4, "v_proj": 65}}],
)
async def test_a_large_rank_of_no_module_is_not_refused(config: dict[str, Any], run: Run, tmp_path: Path):
    done = await run(*PUSH, adapter(tmp_path / "unused", 4, **config), *OF_ACME)
    assert done.stdout.startswith("pushed pirate version 1, rank 4")


async def test_the_gateway_checks_what_the_command_cannot(run: Run, tmp_path: Path):
    """An unknown base model has no limit."""
    refused = await run(*PUSH, adapter(tmp_path / "large", 65), *OF_ACME, "--base", "none", code=1)
    assert "there is no base model 'none'" in refused.stderr


async def test_an_older_gateway_reports_no_limit(gateway: Gateway):
    async with GatewayClient(gateway.url, ADMIN_KEY) as client:
        # These paths have no GET, as that of uploads had none.
        for route in ("/v1/adapter-imports", "/admin/api/tenants/acme/adapter-imports", "/v1/unknown"):
            assert await resumable_push.max_rank(client, route, None) is None
