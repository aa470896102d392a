"""Imports from a folder, a bucket and a hub: only below prefixes that the operator allows."""

import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from adapters import store_s3
from gateway.setting_errors import SettingsError
from testing.gateway.running import Answer, Client
from testing.ports import free_port
from testing.s3_server import BUCKET, S3Server
from testing.serving import serving
from tests.gateway.api.adapters.test_adapters import CONFIG, WEIGHTS, files
from tests.gateway.api.uploads.conftest import Start

PATH = "/v1/adapter-imports"
# Sources outside the prefixes that the test allows.
NOT_ALLOWED = (
    f"s3://{BUCKET}/private/x",
    f"S3://{BUCKET}/shared/x",
    "s3://other/shared/x",
    "http://127.0.0.1/x",
    "https://169.254.169.254/latest",
    "hf://org/repo",
    "/etc",
    "",
)
# Rests of an allowed prefix that name no folder below it.
NO_PATHS = (
    "../outside/secret",
    "good/../../outside/secret",
    "%2e%2e/outside/secret",
    "/etc",
    "",
    ".",
    "a?b=c",
    "good\n",
    "good@main",
    "x" * 500,
)


async def import_(client: Client, source: str, name: str = "a", path: str = PATH) -> Answer:
    return await client.post(path, params={"name": name, "source": source})


def save(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    for name, content in files(seed).items():
        (folder / name).write_bytes(content)
    return folder


@asynccontextmanager
async def hub(asked: list[str], location: str = "") -> AsyncIterator[str]:
    """Serve a double of a hub: `org/repo` at revision main, and a redirect from `org/moved`."""
    app = web.Application()

    async def resolve(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.match_info["repo"] == "moved":
            return web.Response(status=302, headers={"Location": location or request.path.replace("moved", "repo")})
        if (request.match_info["repo"], request.match_info["revision"]) != ("repo", "main"):
            raise web.HTTPNotFound
        return web.Response(body=files(5)[request.match_info["file"]])

    app.router.add_get("/org/{repo}/resolve/{revision}/{file}", resolve)
    async with serving(app) as url:
        yield url


async def test_only_what_is_allowed_is_read(
    start: Start, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (s3.environment | {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    save(tmp_path / "open" / "good", 1)
    outside = save(tmp_path / "outside" / "secret", 2)
    (tmp_path / "open" / "link").symlink_to(outside)
    (tmp_path / "open" / "circle").symlink_to(tmp_path / "open" / "circle")
    (tmp_path / "open" / "pipe").mkdir()
    for name in (CONFIG, WEIGHTS):
        s3.client("shared/x").put(name, files(3)[name])
        s3.client("private/x").put(name, files(4)[name])
    allowed = f"file://{tmp_path}/open/,s3://{BUCKET}/shared/"
    async with start(import_sources=tuple(allowed.split(","))) as gateway:
        acme = await gateway.tenant("acme")
        for source in (f"file://{tmp_path}/open/good", f"s3://{BUCKET}/shared/x"):
            made = await import_(acme, source)
            assert made.status == 201, made.body
        assert (await acme.get("/v1/adapters/a")).json["version"] == 2
        outside_sources = (f"file://{tmp_path}/outside/secret", f"file://{tmp_path}/openly")
        for source in (*outside_sources, *NOT_ALLOWED):
            refused = await import_(acme, source)
            assert (refused.status, refused.error["code"]) == (403, "import_not_allowed"), source
        for rest in NO_PATHS:
            refused = await import_(acme, f"file://{tmp_path}/open/{rest}")
            assert (refused.status, refused.error["param"]) == (400, "source"), rest
        absent = [f"file://{tmp_path}/open/{name}" for name in ("link", "circle", "none")]
        for missing in (*absent, f"s3://{BUCKET}/shared/none"):
            refused = await import_(acme, missing)
            assert (refused.status, refused.error["code"]) == (400, "import_not_found"), missing
            assert str(tmp_path) not in refused.error["message"]
        as_operator = await import_(
            gateway.admin, f"file://{tmp_path}/open/good", "b", "/admin/api/tenants/acme/adapter-imports"
        )
        assert as_operator.status == 201
        path, source = "/admin/api/tenants/acme/adapter-imports", f"file://{tmp_path}/open/good"
        once = {"Idempotency-Key": uuid.uuid4().hex}
        first, again = [
            await gateway.admin.post(path, params={"name": "c", "source": source}, headers=once) for _ in range(2)
        ]
        assert (first.status, again.status, again.json) == (201, 201, first.json), first.body
        assert [path for path in (tmp_path / "adapters").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("place", ["adapters", "adapters/below", "", "link", "copies", "%61dapters"])
async def test_no_prefix_holds_or_lies_in_the_store(place: str, start: Start, tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "adapters")
    with pytest.raises(SettingsError, match=r"LORAPLEX_IMPORT_SOURCES: file://.* holds adapters of tenants"):
        async with start(import_sources=(f"file://{tmp_path}/{place}",), adapter_cache=tmp_path / "copies"):
            pass
    async with start(import_sources=(f"file://{tmp_path}/adapters-of-the-house", "hf://adapters")):
        pass


async def test_no_bucket_prefix_holds_or_lies_in_the_store(start: Start):
    for source in ("s3://bucket", "s3://bucket/store/below", "s3://bucket/store/"):
        with pytest.raises(SettingsError, match=r"LORAPLEX_IMPORT_SOURCES: s3://bucket.* holds adapters of tenants"):
            async with start(import_sources=("s3://bucket/other", source), adapter_store="s3://bucket/store"):
                pass


async def test_nothing_is_allowed_by_default(start: Start, tmp_path: Path):
    async with start() as gateway:
        acme = await gateway.tenant("acme")
        for source in ("hf://org/repo", f"file://{tmp_path}/x", "s3://bucket/x"):
            assert (await import_(acme, source)).error["code"] == "import_not_allowed"


async def test_a_bucket_that_cannot_be_read(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(store_s3, "RETRIES", 0)
    async with start(import_sources=("s3://bucket/x",)) as gateway:
        answer = await import_(await gateway.tenant("acme"), "s3://bucket/x/y")
        assert (answer.status, answer.error["code"]) == (503, "import_unavailable")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SettingsError, match=r"LORAPLEX_IMPORT_SOURCES: s3:// needs Loraplex's extra `s3`"):
        async with start(import_sources=("s3://bucket/x",)):
            pass


async def test_a_hubs_redirects_stay_with_the_hub(start: Start):
    asked: list[str] = []
    async with (
        hub([]) as elsewhere,
        hub(asked, f"{elsewhere}/org/repo/resolve/main/{CONFIG}") as url,
        hub([], "https://hf.co:port/x") as malformed,
        hub([]) as plain,
    ):
        for hub_url, source, status, code in (
            (plain, "hf://org/repo", 201, None),
            (plain, "hf://org/moved@main", 201, None),
            (plain, "hf://org/repo@other", 400, "import_not_found"),
            (plain, "hf://other/repo", 403, "import_not_allowed"),
            (url, "hf://org/moved", 503, "import_unavailable"),
            (malformed, "hf://org/moved", 503, "import_unavailable"),
        ):
            async with start(import_sources=("hf://org/",), import_hub=hub_url) as gateway:
                name = f"t{abs(hash((hub_url, source))):x}"[:20]
                answer = await import_(await gateway.tenant(name), source)
                assert (answer.status, answer.json.get("error", {}).get("code")) == (status, code), source
        assert asked == [f"/org/moved/resolve/main/{CONFIG}"]
