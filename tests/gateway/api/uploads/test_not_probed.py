"""Reasons for which a version is not probed now, as its tenant sees them."""

from pathlib import Path
from typing import Any

import pytest

from gateway.api.uploads import validating
from gateway.fleet.failures.quarantine import Quarantine, Quarantined
from testing.adapter_files import upload_form
from testing.gateway.running import until
from testing.gateway.upstream import Upstream

PROBE = "/v1/adapters/pirate/versions/1/probe"


async def test_the_tenant_of_a_version_that_is_not_probed_gets_the_reason_and_the_time(
    serve: Any, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It got "No engine can probe the adapter now" in each case."""
    monkeypatch.setattr(validating, "SEARCH_SECONDS", 3600.0)
    async with serve(adapter_probe="required") as gateway:
        acme = await gateway.tenant("acme")
        pushed = await acme.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"))
        assert (pushed.status, pushed.json["state"]) == (202, "validating")

        async def answer() -> tuple[int, str, str]:
            got = await acme.post(PROBE)
            return got.status, got.error["message"], got.headers["Retry-After"]

        text = "The adapter cannot be probed now: "
        assert await answer() == (503, f"{text}no engine that can probe is available.", "1")
        upstream.probe_status = 500

        async def reaches_the_engine() -> bool:
            await answer()
            return upstream.probed > 0

        await until(reaches_the_engine)
        assert await answer() == (503, f"{text}the engine answered 500.", "1")

        def refuse(*_: object) -> None:
            raise Quarantined("this adapter", 76.5)

        monkeypatch.setattr(Quarantine, "check_adapter", refuse)
        died = "Engines died while they worked on this adapter; it is refused for 77 s."
        assert await answer() == (503, f"{text}{died}", "77")
