"""A check that exceeds its limits: the upload is refused with the reason, and the gateway continues."""

import asyncio
import json
import os
import struct
import sys
import time
from pathlib import Path

import pytest

from tests.gateway.running import Gateway
from tests.gateway.test_adapters import CONFIG, WEIGHTS, files, push
from tests.gateway.test_uploads import children

DEAR = {"rank_pattern": {rf"(?=(\w|\d)*x{number})(.*.*.*)z": 4 for number in range(3000)}}


def dear() -> dict[str, bytes]:
    return files() | {CONFIG: json.dumps(json.loads(files()[CONFIG]) | DEAR).encode()}


def many_tensors() -> dict[str, bytes]:
    header = b"{" + b",".join(b'"%x":{}' % number for number in range(150_000)) + b"}"
    return files() | {WEIGHTS: struct.pack("<Q", len(header)) + header}


async def test_too_much_cpu_time(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.uploads.checking.CPU_SECONDS", 1)
    monkeypatch.setattr("gateway.api.uploads.checking.CLOCK_FACTOR", 120)
    acme = await gateway.tenant("acme")
    got = await push(acme, "dear", dear())
    assert (got.status, got.error["code"]) == (400, "adapter_check_failed"), got.body
    assert "CPU time" in got.error["message"]
    assert list((tmp_path / "adapters").iterdir()) == []
    assert (await acme.get("/v1/adapters")).json["data"] == []


async def test_too_much_time_by_the_clock(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.uploads.checking.CLOCK_FACTOR", 0.001)
    acme = await gateway.tenant("acme")
    got = await push(acme, "late", files())
    assert (got.status, got.error["code"]) == (400, "adapter_check_failed"), got.body
    assert "too much time" in got.error["message"]
    assert list((tmp_path / "adapters").iterdir()) == []


async def test_too_much_memory(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.uploads.checking.MEMORY_BYTES", 64 << 20)
    acme = await gateway.tenant("acme")
    got = await push(acme, "large", many_tensors())
    assert (got.status, got.error["code"]) == (400, "adapter_check_failed"), got.body
    assert "64 MiB of memory" in got.error["message"]


async def test_dear_patterns_are_refused_by_their_cost(gateway: Gateway):
    acme = await gateway.tenant("acme")
    got = await push(acme, "dear", dear())
    assert (got.status, got.error["param"]) == (400, "rank_pattern")
    assert "too costly" in got.error["message"]


async def priority_of_check(upload: asyncio.Task) -> tuple[int, int]:
    """Return the niceness and the scheduling policy of the check that runs for an upload."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not upload.done():
        for pid in children():
            found = os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
            if found[0] > os.getpriority(os.PRIO_PROCESS, 0):
                await asyncio.sleep(0.05)  # it may be between the two calls that lower it
                return os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
        await asyncio.sleep(0.005)
    raise AssertionError("no check was seen")


@pytest.mark.skipif(sys.platform != "linux", reason="there is no idle priority elsewhere")
async def test_a_tenant_whose_checks_took_long_has_them_on_idle_cores_one_at_a_time(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.api.uploads.checking.BUSY_SECONDS", 0.1)
    tenants = [await gateway.tenant(name) for name in ("acme", "other")]
    for tenant in tenants:
        upload = asyncio.create_task(push(tenant, "dear", dear()))
        assert (await priority_of_check(upload))[1] == os.SCHED_OTHER
        assert (await upload).status == 400
    uploads = [asyncio.create_task(push(tenant, "dear", dear())) for tenant in tenants]
    assert await priority_of_check(uploads[0]) == (19, os.SCHED_IDLE)
    assert len(children()) == 1
    third = await push(await gateway.tenant("third"), "mine", files())
    assert third.status == 201, third.body
    assert sum(upload.done() for upload in uploads) < 2
    assert [(await upload).status for upload in uploads] == [400, 400]
