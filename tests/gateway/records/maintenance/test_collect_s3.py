"""A gateway whose adapter store is a bucket: uploads, removal of a deleted tenant's weights, an outage."""

from pathlib import Path
from typing import Any

import pytest

import gateway.api.adapters.handlers
from gateway.api.adapters.handlers import UNUSED_SECONDS
from testing.s3_server import BUCKET, S3Server
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.records.maintenance.test_collect import COLLECT


async def test_a_deleted_tenants_weights_leave_the_bucket_and_the_local_folder(
    serve: Any, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    cache = tmp_path / "cache"
    async with serve(adapter_store=s3.url("collected"), adapter_cache=cache) as running:
        acme, globex = await running.tenant("acme"), await running.tenant("globex")
        shared, own = [(await push(acme, f"a{i}", files(i))).json["digest"][7:] for i in range(2)]
        assert (await push(globex, "same", files(0))).json["digest"][7:] == shared
        assert (await running.admin.call("DELETE", "/admin/api/tenants/acme")).status == 200
        assert (await running.admin.post(COLLECT)).json["removed"] == 0
        monkeypatch.setattr(gateway.api.adapters.handlers, "UNUSED_SECONDS", -5.0)
        dry = (await running.admin.post(f"{COLLECT}?dry_run=true")).json
        assert (dry["removed"], dry["dry_run"]) == (1, True)
        assert len(s3.keys("collected")) == 4
        done = (await running.admin.post(COLLECT)).json
        assert (done["removed"], done["bytes"]) == (1, dry["bytes"])
        assert {key.split("/")[1] for key in s3.keys("collected")} == {shared}
        assert not [path for path in cache.rglob("*") if own in str(path) or path.is_file()]
        monkeypatch.setattr(gateway.api.adapters.handlers, "UNUSED_SECONDS", UNUSED_SECONDS)
        # The content is uploaded as a whole again although another tenant has it: the objects are new.
        key = f"{shared[:2]}/{shared}/adapter_config.json"
        s3.client("collected").put(key, b"{}")
        assert (await push(globex, "again", files(0))).status == 201
        assert bytes(s3.client("collected").get(key).bytes()) != b"{}"


async def test_what_a_killed_upload_wrote_leaves_the_bucket(
    serve: Any, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    async with serve(adapter_store=s3.url("killed"), adapter_cache=tmp_path / "cache") as running:
        acme = await running.tenant("acme")
        whole = (await push(acme, "a", files())).json["digest"][7:]
        s3.client("killed").put(f"ab/ab{'c' * 62}/adapter_model.safetensors", b"weights")
        monkeypatch.setattr(gateway.api.adapters.handlers, "UNUSED_SECONDS", -5.0)
        done = (await running.admin.post(COLLECT)).json
        assert (done["removed"], done["bytes"]) == (1, len(b"weights"))
        assert {key.split("/")[1] for key in s3.keys("killed")} == {whole}


async def test_an_outage_refuses_uploads_and_nothing_else(
    serve: Any, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = s3.url("outage").replace(BUCKET, "No-Such-Bucket")
    async with serve(adapter_store=url, adapter_cache=tmp_path / "cache") as running:
        acme = await running.tenant("acme")
        got = await push(acme, "a", files())
        assert (got.status, got.error["code"]) == (503, "adapter_store_unavailable")
        assert (await acme.get("/v1/adapters")).json["data"] == []
        assert (await acme.chat()).status == 200
    assert not any(secret in caplog.text for secret in s3.environment.values())
