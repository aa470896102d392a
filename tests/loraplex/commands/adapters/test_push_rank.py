"""`loraplex adapter push` sends no large adapter whose rank no engine serves."""

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


@pytest.fixture
async def run(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(resumable_push, "MIN_BYTES", 0)
    await gateway.tenant("acme")
    return runner(gateway)


def adapter(folder: Path, rank: int, **changes: Any) -> str:
    return str(write(folder, tensors(rank=rank), {**CONFIG, "r": rank, **changes}))


@pytest.mark.parametrize("base", [(), ("--base", BASE_MODEL)])
async def test_a_rank_that_no_engine_serves_is_refused_before_the_upload(
    base: tuple[str, ...], run: Run, gateway: Gateway, tmp_path: Path
):
    done = await run(*PUSH, adapter(tmp_path / "large", 65), *OF_ACME, *base, code=1)
    assert done.stderr == "Error: r: its rank is 65; the engines here serve ranks up to 64\n"
    # The gateway saw nothing: it records a refused upload as a rejected version.
    assert (await gateway.admin.get(ADAPTERS)).json["data"] == []
    assert (await run(*PUSH, adapter(tmp_path / "small", 64), *OF_ACME, *base)).stdout.startswith("pushed pirate")


async def test_the_gateway_checks_what_the_command_cannot(run: Run, gateway: Gateway, tmp_path: Path):
    """A pattern gives one module a larger rank than `r`, and an unknown base model has no limit."""
    path = adapter(tmp_path / "pattern", 4, rank_pattern={"q_proj": 65})
    assert "q_proj" in (await run(*PUSH, path, *OF_ACME, code=1)).stderr
    [rejected] = (await gateway.admin.get(ADAPTERS)).json["data"]
    assert rejected["newest_state"] == "rejected"
    refused = await run(*PUSH, adapter(tmp_path / "large", 65), *OF_ACME, "--base", "none", code=1)
    assert "there is no base model 'none'" in refused.stderr


async def test_an_older_gateway_reports_no_limit(gateway: Gateway):
    async with GatewayClient(gateway.url, ADMIN_KEY) as client:
        # These paths have no GET, as that of uploads had none.
        for route in ("/v1/adapter-imports", "/admin/api/tenants/acme/adapter-imports", "/v1/unknown"):
            assert await resumable_push.max_rank(client, route, None) is None
