"""Uploads in parts: they go on at another gateway, count against their tenant, and leave nothing behind."""

import asyncio
import hashlib
import io
import random
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import gateway.records.adapters.uploads
from gateway.api.uploads import receiving, resumable
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.uploads import Uploads
from gateway.sharing.byte_rate import ByteRate
from loraplex import resumable_push
from loraplex.client import GatewayClient
from testing.gateway.running import Answer, Client, until
from tests.gateway.api.adapters.test_adapters import files, push, tarred
from tests.gateway.api.uploads.conftest import Start
from tests.gateway.test_left_clients import hold

PATH = "/v1/adapter-uploads"
COLLECT = "/admin/api/adapters/collect"
MIB = 1 << 20
ARCHIVE = tarred(files(1) | {"optimizer.pt": random.Random(0).randbytes(2 * MIB + MIB // 2)})


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def begin(client: Client, content: bytes = ARCHIVE, name: str = "a", path: str = PATH, **changed: Any) -> Answer:
    query = {"name": name, "size": len(content), "sha256": sha(content)} | changed
    return await client.post(path, params=query)


async def put(client: Client, upload: str, start: int, part: bytes, path: str = PATH, **changed: Any) -> Answer:
    query = {"offset": start, "sha256": sha(part)} | changed
    return await client.call("PUT", f"{path}/{upload}", params=query, data=io.BytesIO(part))


async def test_a_tenants_uploads_share_a_rate(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(receiving, "_RATE", ByteRate(4 * MIB))
    async with start(min_upload_rate=100 * MIB) as gateway_:
        acme, other = await gateway_.tenant("acme"), await gateway_.tenant("other")
        begun = [await begin(each) for each in (acme, other)]
        uploads = [each.json["id"] for each in begun]

        async def timed(client: Client, upload: str) -> float:
            began = time.monotonic()
            assert (await put(client, upload, 0, ARCHIVE[: 2 * MIB], sha256="0" * 64)).status == 400
            return time.monotonic() - began

        many = [asyncio.create_task(timed(acme, uploads[0])) for _ in range(3)]
        await asyncio.sleep(0.1)
        free = await timed(other, uploads[1])
        # Six MiB of one tenant take 1.5 s; another tenant's two do not wait for them.
        slowest = max(await asyncio.gather(*many))
        assert slowest > 1.2
        assert free < slowest


async def test_bytes_of_refused_parts_count(start: Start):
    async with start() as gateway_:
        acme = await gateway_.tenant("acme", upload_bytes_per_minute=5 * MIB)
        upload = (await begin(acme)).json["id"]
        for _ in range(2):
            wrong = await put(acme, upload, 0, ARCHIVE[: 2 * MIB], sha256="0" * 64)
            assert (wrong.status, wrong.error["param"]) == (400, "sha256")
        late = await put(acme, upload, 0, ARCHIVE[: 2 * MIB])
        assert (late.status, late.error["type"]) == (429, "requests"), late.body
        assert "5242880 uploaded bytes per minute; needed 2097152, remaining" in late.error["message"]
        assert int(late.headers["Retry-After"]) >= 1
        whole = await push(acme, "small", {"file": ARCHIVE})
        assert whole.status == 429, whole.body
        path = "/admin/api/tenants/acme/adapter-uploads"
        assert (await put(gateway_.admin, upload, 0, ARCHIVE[: 2 * MIB], path)).json["received"] == 2 * MIB


def stored(folder: Path) -> list[Path]:
    return [path for path in (folder / "adapters" / "uploads").rglob("*") if path.is_file()]


async def test_an_upload_goes_on_at_another_gateway(start: Start, tmp_path: Path):
    async with start() as one, start(migrate_on_start=False) as other:
        acme, globex = await one.tenant("acme"), await one.tenant("globex")
        there = other.client(acme.key or "")
        made = await begin(acme)
        assert (made.status, made.json["received"]) == (201, 0), made.body
        upload = made.json["id"]
        assert (await put(acme, upload, 0, ARCHIVE[:MIB])).json["received"] == MIB
        assert (await begin(there)).json["id"] == upload  # a client that lost the id finds it by the content
        assert (await there.get(f"{PATH}/{upload}")).json["received"] == MIB
        wrong = await put(there, upload, 0, ARCHIVE[:MIB])
        assert (wrong.status, wrong.error["code"], wrong.headers["Upload-Offset"]) == (409, "wrong_offset", str(MIB))
        assert (await there.post(f"{PATH}/{upload}/complete")).status == 409
        for part, changed, param in (
            (ARCHIVE[MIB : 2 * MIB], {"sha256": "0" * 64}, "sha256"),
            (ARCHIVE[MIB : 2 * MIB], {"sha256": "x"}, "sha256"),
            (ARCHIVE[MIB : MIB + 10], {}, None),
            (ARCHIVE[MIB:], {"offset": "-1"}, "offset"),
        ):
            refused = await put(there, upload, MIB, part, **changed)
            assert (refused.status, refused.error["param"]) == (400, param), refused.body
        assert (await put(there, upload, MIB, ARCHIVE[MIB:] + b"x")).status == 413
        for call in (
            globex.get(f"{PATH}/{upload}"),
            put(globex, upload, MIB, ARCHIVE[MIB:]),
            globex.post(f"{PATH}/{upload}/complete"),
            globex.call("DELETE", f"{PATH}/{upload}"),
            globex.get(f"{PATH}/{'0' * 32}"),
        ):
            answer = await call
            assert (answer.status, answer.error["message"]) == (404, "There is no unfinished upload of this id.")
        assert (await put(there, upload, MIB, ARCHIVE[MIB:])).json["received"] == len(ARCHIVE)
        done = await there.post(f"{PATH}/{upload}/complete")
        assert (done.status, done.json["name"]) == (201, "a"), done.body
        assert (await acme.chat(model="a")).status == 200
        assert (await acme.get(f"{PATH}/{upload}")).status == 404
        assert stored(tmp_path) == []
        # Operators upload for a tenant.
        path = "/admin/api/tenants/globex/adapter-uploads"
        upload = (await begin(one.admin, path=path)).json["id"]
        assert (await put(other.admin, upload, 0, ARCHIVE, path)).status == 200
        assert (await one.admin.post(f"{path}/{upload}/complete")).status == 201
        assert (await globex.get("/v1/adapters/a")).json["digest"] == done.json["digest"]


async def test_a_completion_is_repeated(start: Start, tmp_path: Path):
    content, key = tarred(files(2)), {"Idempotency-Key": uuid.uuid4().hex}
    async with start() as gateway_:
        acme, limited = await gateway_.tenant("acme"), await gateway_.tenant("limited", adapter_changes_per_minute=1)
        admins = "/admin/api/tenants/acme/adapter-uploads"
        for client, path in ((acme, PATH), (gateway_.admin, admins)):
            upload = (await begin(client, content, path=path)).json["id"]
            assert (await put(client, upload, 0, content, path)).status == 200
            malformed = await client.post(f"{path}/{upload}/complete", headers={"Idempotency-Key": "x" * 256})
            assert (malformed.status, malformed.error["param"]) == (400, "Idempotency-Key")
            first, again = [await client.post(f"{path}/{upload}/complete", headers=key) for _ in range(2)]
            assert (first.status, again.status, again.json) == (201, 201, first.json), (first.body, again.body)
            assert again.headers["Idempotent-Replayed"] == "true"
            assert (await client.post(f"{path}/{upload}/complete")).status == 404
            other = await client.post(f"{path}/{'0' * 32}/complete", headers=key)
            assert other.error["code"] == "idempotency_key_reused"
        # A completion counts as a change; a refusal for a limit leaves the upload.
        upload = (await begin(limited, content)).json["id"]
        assert (await put(limited, upload, 0, content)).status == 200
        assert (await limited.post(f"{PATH}/{upload}/complete")).status == 429
        assert (await limited.get(f"{PATH}/{upload}")).status == 200
        # An upload that has lost a part cannot be completed any more.
        upload = (await begin(acme, content, "lost")).json["id"]
        assert (await put(acme, upload, 0, content)).status == 200
        for part in (tmp_path / "adapters" / "uploads" / upload).iterdir():
            part.unlink()
        assert (await acme.post(f"{PATH}/{upload}/complete")).status == 400
        assert (await acme.get(f"{PATH}/{upload}")).status == 404


async def test_an_unfinished_upload_counts_against_other_uploads_and_not_against_itself(start: Start):
    async with start() as gateway_:
        acme = await gateway_.tenant("acme", max_adapter_bytes=len(ARCHIVE))
        upload = (await begin(acme)).json["id"]
        content_type = {"Content-Type": "multipart/form-data; boundary=b"}
        whole = await acme.call("POST", "/v1/adapters", data=b"--b--\r\n", headers=content_type)
        assert (whole.status, whole.error["param"]) == (403, "max_adapter_bytes"), whole.body
        assert f"{len(ARCHIVE)} belong to unfinished uploads" in whole.error["message"]
        assert (await put(acme, upload, 0, ARCHIVE)).status == 200
        completed = await acme.post(f"{PATH}/{upload}/complete")
        assert completed.status == 201, completed.body


async def test_unfinished_uploads_count_and_go(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with start() as gateway_:
        acme = await gateway_.tenant("acme", max_adapter_bytes=2 * len(ARCHIVE))
        upload = (await begin(acme)).json["id"]
        assert (await put(acme, upload, 0, ARCHIVE[:MIB])).status == 200
        assert (await begin(acme, name="b")).status == 201
        full = await begin(acme, name="c")
        assert (full.status, full.error["param"]) == (403, "max_adapter_bytes")
        for changed, status in (
            ({"size": 0}, 400),
            ({"size": 1 << 40}, 413),
            ({"name": "../x"}, 400),
            ({"sha256": "A" * 64}, 400),
            ({"more": 1}, 400),
        ):
            assert (await begin(acme, **changed)).status == status, changed
        assert (await acme.call("DELETE", f"{PATH}/{upload}")).status == 200
        assert stored(tmp_path) == []
        # A whole that differs from its declaration, or is no adapter, is refused and removed.
        for content, name, declared in ((b"x" * 10, "d", sha(b"y" * 10)), (b"x" * 10, "e", sha(b"x" * 10))):
            upload = (await begin(acme, content, name, sha256=declared)).json["id"]
            assert (await put(acme, upload, 0, content)).status == 200
            assert (await acme.post(f"{PATH}/{upload}/complete")).status == 400
            assert (await acme.get(f"{PATH}/{upload}")).status == 404
        assert stored(tmp_path) == []
        monkeypatch.setattr(gateway.records.adapters.uploads, "MAX_UPLOADS", 1)
        assert (await begin(acme, b"1", "f")).status == 403
        monkeypatch.undo()
        upload = (await begin(acme, b"1", "f")).json["id"]
        assert (await put(acme, upload, 0, b"1")).status == 200
        monkeypatch.setattr(gateway.records.adapters.uploads, "KEPT", timedelta(0))
        assert (await acme.get(f"{PATH}/{upload}")).status == 404
        assert (await gateway_.admin.post(COLLECT)).status == 200
        assert stored(tmp_path) == []
        monkeypatch.undo()
        upload = (await begin(acme, b"1", "g")).json["id"]
        assert (await put(acme, upload, 0, b"1")).status == 200
        assert (await gateway_.admin.call("DELETE", "/admin/api/tenants/acme")).status == 200
        assert (await gateway_.admin.post(COLLECT)).status == 200
        assert len(stored(tmp_path)) == 1  # younger parts may belong to a running request
        monkeypatch.setattr(resumable, "ORPHAN_SECONDS", -5.0)
        assert (await gateway_.admin.post(COLLECT)).status == 200
        assert stored(tmp_path) == []


@pytest.mark.parametrize("call", ["abort", "complete"])
async def test_a_client_that_leaves_during_a_removal_leaves_no_parts(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    content = random.Random(1).randbytes(MIB)  # no archive: completing the upload removes it
    removed, goes_on = asyncio.Event(), asyncio.Event()
    remove = Uploads.remove

    async def held_up(uploads: Uploads, upload_id: str) -> None:
        await remove(uploads, upload_id)
        removed.set()
        await goes_on.wait()

    monkeypatch.setattr(Uploads, "remove", held_up)
    async with start() as gateway_:
        acme = await gateway_.tenant("acme")
        path = f"{PATH}/{(await begin(acme, content)).json['id']}"
        assert (await put(acme, path.rpartition("/")[2], 0, content)).status == 200
        assert len(stored(tmp_path)) == 1
        leaving = asyncio.create_task(acme.call("DELETE", path) if call == "abort" else acme.post(f"{path}/complete"))
        await asyncio.wait_for(removed.wait(), 30)
        leaving.cancel()

        async def is_alone() -> bool:
            """Return whether the request of the metrics is the only one."""
            return "loraplex_gateway_http_in_flight 1.0" in (await gateway_.admin.get("/metrics")).body.decode()

        async def is_empty() -> bool:
            return not stored(tmp_path)

        await until(is_alone)
        goes_on.set()
        await until(is_empty)


async def test_a_client_that_leaves_during_the_completion_leaves_no_upload(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held = hold(monkeypatch, Catalog, "add_version")
    async with start() as gateway_:
        acme = await gateway_.tenant("acme")
        path = f"{PATH}/{(await begin(acme)).json['id']}"
        assert (await put(acme, path.rpartition("/")[2], 0, ARCHIVE)).status == 200
        await held.leave(gateway_, acme.post(f"{path}/complete"))

        async def is_gone() -> bool:
            return (await acme.get(path)).status == 404 and not stored(tmp_path)

        await until(is_gone)
        assert (await acme.get("/v1/adapters/a")).json["version"] == 1


async def test_a_push_resumes_after_the_gateway_went_away(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resumable_push, "PART_BYTES", MIB)
    monkeypatch.setattr(resumable_push, "PAUSES", ())
    (tmp_path / "a.tar").write_bytes(ARCHIVE)
    seen: list[int] = []

    def leave(received: int, size: int) -> None:
        seen.append(received)
        if received == MIB:
            raise ConnectionResetError("the line is cut")

    async with start() as one:
        acme = await one.tenant("acme")
        async with GatewayClient(one.url, acme.key or "") as client:
            with pytest.raises(ConnectionResetError):
                await resumable_push.push_in_parts(client, PATH, "a", tmp_path / "a.tar", leave)
    async with start(migrate_on_start=False) as two:
        async with GatewayClient(two.url, acme.key or "") as client:
            made = await resumable_push.push_in_parts(
                client, PATH, "a", tmp_path / "a.tar", lambda received, size: seen.append(received)
            )
        assert (made["name"], made["version"]) == ("a", 1)
    assert seen == [0, MIB, MIB, 2 * MIB, len(ARCHIVE)]
