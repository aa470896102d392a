"""A missing adapter store: readiness, metric, the list of what needs attention, and the error of a request."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters.store import DirectoryStore
from gateway.process import store_probe
from gateway.process.store_probe import SLOW, StoreProbe
from testing.gateway.running import Gateway, until
from tests.gateway.api.adapters.test_adapters import files, push

MISSING = {"status": 404, "code": "model_not_found"}


async def state(gateway: Gateway) -> str:
    ready = await gateway.nobody.get("/readyz?strict=true")
    assert ready.status == 200
    assert ready.json["status"] == ("ready" if ready.json["parts"]["adapter_store"] == "ok" else "degraded")
    return ready.json["parts"]["adapter_store"]


async def test_a_missing_store_is_a_fault_and_base_models_are_served(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_probe, "CHECK_SECONDS", 0.1)
    async with serve(readiness="strict") as gateway:
        acme = await gateway.tenant("acme")
        assert (await push(acme, "terse", files(1))).status == 201
        await until(lambda: is_state(gateway, "ok"))
        (tmp_path / "adapters").rename(tmp_path / "elsewhere")
        await until(lambda: is_state(gateway, "unavailable: No such file or directory"))
        page = (await gateway.admin.get("/metrics")).body.decode()
        assert 'loraplex_gateway_part_up{part="adapter_store"} 0.0' in page
        needs = (await gateway.admin.get("/admin/api/attention")).json["data"]
        assert "Adapter store is faulty: unavailable: No such file or directory." in [need["text"] for need in needs]
        assert str(tmp_path) not in (await gateway.nobody.get("/readyz")).body.decode()
        assert (await acme.complete()).status == 200
        failed = await acme.complete(model="terse", x_engine=MISSING)
        assert (failed.status, failed.error["code"]) == (502, "adapter_files_missing")
        assert failed.error["message"] == "The files of the adapter 'terse' are missing from the adapter store."
        assert (await acme.complete(x_engine=MISSING)).error["code"] == "engine_error"
        (tmp_path / "elsewhere").rename(tmp_path / "adapters")
        await until(lambda: is_state(gateway, "ok"))


async def is_state(gateway: Gateway, text: str) -> bool:
    return await state(gateway) == text


HANGING = """
import asyncio, time
from gateway.process.store_probe import StoreProbe
class Hanging:
    def check(self): time.sleep(600)
async def main():
    probe = StoreProbe(Hanging())
    print(await probe.state(0.05))
    await probe.close()
asyncio.run(main())
"""


def test_a_gateway_ends_while_its_store_hangs(starts_servers: None):
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)


async def test_a_store_that_hangs_holds_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_probe, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(store_probe, "CHECK_SECONDS", 0.0)
    answers, calls = threading.Event(), []

    class Hanging(DirectoryStore):
        def check(self) -> None:
            calls.append(1)
            answers.wait(30)

    probe = StoreProbe(Hanging(tmp_path))

    async def is_slow() -> bool:
        return await probe.state(0.01) == SLOW

    await until(is_slow)
    assert await probe.state(0.01) == SLOW
    assert len(calls) == 1
    answers.set()
    assert await probe.state(30) == "ok"
    await probe.close()
