"""A check that exceeds its limits: the upload is refused with the reason, and the gateway continues."""

import asyncio
import gzip
import json
import os
import signal
import struct
import zlib
from pathlib import Path

import pytest

from adapters.check import ARCHIVE
from gateway.api.uploads.checking import QUICK_CPU_SECONDS, CheckClient
from testing.gateway.mutated_archives import tar_header
from testing.gateway.running import Gateway
from tests.gateway.api.adapters.test_adapters import CONFIG, WEIGHTS, files, push, tarred
from tests.gateway.api.uploads.conftest import Start
from tests.gateway.api.uploads.test_hostile_uploads import children

DEAR = {"rank_pattern": {rf"(?=(\w|\d)*x{number})(.*.*.*)z": 4 for number in range(3000)}}


def dear() -> dict[str, bytes]:
    return files() | {CONFIG: json.dumps(json.loads(files()[CONFIG]) | DEAR).encode()}


def many_tensors() -> dict[str, bytes]:
    header = b"{" + b",".join(b'"%x":{}' % number for number in range(150_000)) + b"}"
    return files() | {WEIGHTS: struct.pack("<Q", len(header)) + header}


def eight_gib_of_zeros() -> bytes:
    """Return a tar.gz of 37 MB with one member of zeros. Its expansion takes seconds on any machine."""
    size, piece = 8 << 30, 16 << 20
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    start = deflate.compress(tar_header(b"zeros", b"0", b"%011o\0" % (size - 1))) + deflate.flush(zlib.Z_FULL_FLUSH)
    # A full flush resets the compressor, so the same compressed bytes can be repeated.
    zeros = deflate.compress(bytes(piece)) + deflate.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + start + zeros * (size // piece)


async def test_too_much_cpu_time(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.uploads.checking.CPU_SECONDS", 1)
    monkeypatch.setattr("gateway.api.uploads.checking.CLOCK_FACTOR", 120)
    async with start(max_upload_bytes=16 << 30) as gateway:
        acme = await gateway.tenant("acme", max_adapter_bytes=None)
        got = await push(acme, "dear", {"file": eight_gib_of_zeros()})
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


async def test_too_large_a_file(tmp_path: Path):
    """A check cannot write a larger file than its job permits, whatever the limit of the unpacked content is."""
    (tmp_path / ARCHIVE).write_bytes(gzip.compress(tarred(files() | {WEIGHTS: bytes(4 << 20)})))
    job = {
        "folder": str(tmp_path),
        "bases": {},
        "closed": [],
        "max_bytes": 1 << 30,
        "memory_bytes": 512 << 20,
        "file_bytes": 1 << 20,
        "cpu_seconds": 10,
        "seconds": 60,
    }
    client = CheckClient()
    try:
        code, out = await client.run(json.dumps(job).encode(), 60.0)
    finally:
        client.close()
    answer = json.loads(out)
    assert (code, answer["refused"], answer["field"]) == (0, "too_large", "file")
    assert max(file.stat().st_size for file in os.scandir(tmp_path)) == 1 << 20


async def test_too_many_inflated_bytes(start: Start):
    """Bytes behind the archive's last member are counted when they are inflated. The limit adds 4 MB for headers."""
    good = tarred(files())
    async with start(max_upload_bytes=200_000) as gateway:
        acme = await gateway.tenant("acme")
        got = await push(acme, "large", {"file": gzip.compress(good + bytes(8 << 20))})
        assert (got.status, got.error["code"], got.error["param"]) == (413, "request_too_large", "file")
        assert "inflates to more than" in got.error["message"]
        assert (await push(acme, "fits", {"file": gzip.compress(good + bytes(1 << 20))})).status == 201


async def test_too_large_a_member_is_named(start: Start):
    async with start(max_upload_bytes=200_000) as gateway:
        acme = await gateway.tenant("acme")
        got = await push(acme, "large", {"file": gzip.compress(tarred(files() | {"optimizer.pt": bytes(1 << 20)}))})
        assert (got.status, got.error["code"], got.error["param"]) == (413, "request_too_large", "file")
        assert "200000 bytes this gateway accepts. The archive's members up to 'optimizer.pt'" in got.error["message"]


async def test_dear_patterns_are_refused_by_their_cost(gateway: Gateway):
    acme = await gateway.tenant("acme")
    got = await push(acme, "dear", dear())
    assert (got.status, got.error["param"]) == (400, "rank_pattern")
    assert "too costly" in got.error["message"]


async def test_expensive_refusals_of_a_tenant_end_its_checks_for_a_while(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.api.uploads.checking.REFUSED_SECONDS", 0.1)
    acme = await gateway.tenant("acme", max_concurrent_uploads=5)
    answers = await asyncio.gather(*(push(acme, f"dear-{number}", dear()) for number in range(5)))
    # The first check is refused for its cost, and the others, which wait for their turn, are not checked.
    assert sorted(answer.status for answer in answers) == [400, 429, 429, 429, 429]
    late = await push(acme, "mine", files())
    assert (late.status, late.error["code"]) == (429, "too_many_refused_uploads"), late.body
    assert 1 <= int(late.headers["Retry-After"]) <= 60
    assert (await push(await gateway.tenant("other"), "mine", files())).status == 201
    assert (await acme.get("/v1/adapters")).json["data"] == []


async def test_a_full_store_does_not_count_as_a_refusal(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    async def full(self: CheckClient, job: bytes, seconds: float) -> tuple[int, bytes]:
        return 1, b"ENOSPC"

    monkeypatch.setattr("gateway.api.uploads.checking.REFUSED_SECONDS", 1e-9)
    acme = await gateway.tenant("acme")
    with monkeypatch.context() as patch:
        patch.setattr(CheckClient, "run", full)
        for _ in range(2):
            got = await push(acme, "mine", files())
            assert (got.status, got.error["code"]) == (503, "adapter_store_full"), got.body
    assert (await push(acme, "mine", files())).status == 201


async def test_checks_of_busy_tenants_run_one_at_a_time(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.uploads.checking.BUSY_SECONDS", 0.1)
    tenants = [await gateway.tenant(name) for name in ("acme", "other")]
    for tenant in tenants:
        assert (await push(tenant, "dear", dear())).status == 400
    uploads = [asyncio.create_task(push(tenant, "dear", dear())) for tenant in tenants]
    while not children():  # noqa: ASYNC110 - processes send no event
        await asyncio.sleep(0.01)
    assert len(children()) == 1
    third = await push(await gateway.tenant("third"), "mine", files())
    assert third.status == 201, third.body
    assert sum(upload.done() for upload in uploads) < 2
    assert [(await upload).status for upload in uploads] == [400, 400]


async def test_long_checks_of_two_tenants_leave_places_to_a_quick_one(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.api.uploads.checking.QUICK_CPU_SECONDS", 1)
    async with start(max_upload_bytes=16 << 30) as gateway:
        heavy = [await gateway.tenant(name, max_adapter_bytes=None) for name in ("acme", "other")]
        uploads = [asyncio.create_task(push(tenant, "long", {"file": eight_gib_of_zeros()})) for tenant in heavy]
        while len(children()) < 2:  # noqa: ASYNC110 - processes send no event
            await asyncio.sleep(0.01)
        third = await push(await gateway.tenant("third"), "mine", files())
        assert third.status == 201, third.body
        assert not any(upload.done() for upload in uploads)
        for upload in uploads:
            upload.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)


@pytest.mark.parametrize("archived", [False, True])
async def test_a_quick_check_that_takes_long_begins_again_as_a_long_one(
    archived: bool, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    run = CheckClient.run

    async def late(self: CheckClient, job: bytes, seconds: float) -> tuple[int, bytes]:
        done = await run(self, job, seconds)
        if json.loads(job)["cpu_seconds"] > QUICK_CPU_SECONDS:
            return done
        # The files are unpacked and written when it is killed, and the archive may be there too.
        if archived:
            leave_archive(json.loads(job)["folder"])
        return -signal.SIGXCPU, b""

    def leave_archive(folder: str) -> None:
        Path(folder, ARCHIVE).write_bytes(archive)

    archive = gzip.compress(tarred(files()))
    monkeypatch.setattr(CheckClient, "run", late)
    acme = await gateway.tenant("acme")
    got = await push(acme, "mine", {"file": archive} if archived else files())
    assert got.status == 201, got.body
