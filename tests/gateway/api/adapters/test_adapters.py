"""Uploads: served at once in each documented form, refused with a reason in every other."""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from testing.adapter_files import CONFIG as PEFT_CONFIG
from testing.adapter_files import safetensors, tensors
from testing.gateway.running import Answer, Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def files(seed: int = 0) -> dict[str, bytes]:
    return {CONFIG: json.dumps(PEFT_CONFIG).encode(), WEIGHTS: safetensors(tensors(seed=seed))}


def zipped(content: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        for name, target in (links or {}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o120777 << 16
            archive.writestr(info, target)
    return buffer.getvalue()


def tarred(content: dict[str, bytes], mode: str = "w", links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


async def push(
    client: Client, name: str | None, parts: dict[str, bytes], path: str = "/v1/adapters", **options: Any
) -> Answer:
    form = aiohttp.FormData()
    for field, content in parts.items():
        # aiohttp warns of large bytes.
        form.add_field(field, io.BytesIO(content), filename=field)
    if name is not None:
        form.add_field("name", name)
    return await client.call("POST", path, data=form, **options)


@pytest.fixture
async def acme(gateway: Gateway) -> Client:
    return await gateway.tenant("acme")


def nested(content: dict[str, bytes], folder: str = "my-adapter") -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in content.items()} | {f"{folder}/README.md": b"hello"}


FORMS: dict[str, Callable[[dict[str, bytes]], dict[str, bytes]]] = {
    "files": lambda content: content,
    "zip": lambda content: {"file": zipped(content)},
    "zip, one folder": lambda content: {"file": zipped(nested(content))},
    "tar": lambda content: {"file": tarred(content)},
    "tar.gz, one folder": lambda content: {"file": tarred(nested(content), "w:gz")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_upload_is_used_by_the_next_request(form: str, shared_gateway: Gateway, shared_upstream: Upstream):
    acme = await shared_gateway.tenant(f"acme-{list(FORMS).index(form)}")
    made = await push(acme, "pirate", FORMS[form](files()))
    assert made.status == 201, made.body
    assert (made.json["name"], made.json["version"], made.json["rank"]) == ("pirate", 1, 4)
    got = await acme.chat(model="pirate")
    assert (got.status, got.json["model"]) == (200, "pirate")
    assert shared_upstream.requests[-1][1]["model"] == made.json["digest"]
    assert made.json["digest"].startswith("sha256:")
    assert (await acme.get("/v1/adapters")).json["data"] == [made.json]
    assert [m["id"] for m in (await acme.get("/v1/models")).json["data"]] == ["base", "pirate"]
    assert (await acme.get("/v1/models/pirate")).json["parent"] == "base"
    assert (await acme.get("/v1/models/base")).json["id"] == "base"


async def test_the_same_content_has_the_same_digest_in_any_form(acme: Client):
    digests = {(await push(acme, f"a{i}", form(files()))).json["digest"] for i, form in enumerate(FORMS.values())}
    assert len(digests) == 1


async def test_new_content_is_a_new_version_and_delete_frees_the_name(acme: Client, upstream: Upstream):
    first = (await push(acme, "pirate", files(1))).json
    second = (await push(acme, "pirate", files(2))).json
    assert (first["version"], second["version"]) == (1, 2)
    await acme.chat(model="pirate")
    assert upstream.requests[-1][1]["model"] == second["digest"] != first["digest"]
    assert (await acme.call("DELETE", "/v1/adapters/pirate")).status == 200
    assert (await acme.chat(model="pirate")).status == 404
    assert (await acme.call("DELETE", "/v1/adapters/pirate")).status == 404
    assert (await acme.get("/v1/adapters/pirate")).status == 404
    assert (await push(acme, "pirate", files(2))).json["version"] == 3


async def test_anothers_adapter_and_none_answer_alike(gateway: Gateway, acme: Client):
    """Another tenant's adapter and a missing one get the same status, headers and body, except the requested name.

    Also for a stream, and for a request by digest.
    """
    globex = await gateway.tenant("globex")
    digest = (await push(globex, "theirs", files())).json["digest"]
    for body in ({}, {"stream": True}):
        foreign, absent = await acme.chat(model="theirs", **body), await acme.chat(model="nobody", **body)
        assert foreign.status == absent.status == 404
        assert foreign.error["code"] == "model_not_found"
        assert foreign.body.replace(b"theirs", b"nobody") == absent.body
        assert set(foreign.headers) == set(absent.headers)
    assert (await acme.chat(model=digest)).status == 404
    for path in ("/v1/adapters/", "/v1/models/"):
        foreign, absent = await acme.get(f"{path}theirs"), await acme.get(f"{path}nobody")
        assert foreign.status == absent.status == 404
        assert foreign.body.replace(b"theirs", b"nobody") == absent.body
    assert (await acme.call("DELETE", "/v1/adapters/theirs")).status == 404
    assert (await globex.chat(model="theirs")).status == 200


async def test_an_admin_pushes_for_a_tenant(gateway: Gateway, acme: Client):
    path = "/admin/api/tenants/acme/adapters"
    assert (await push(gateway.admin, "pirate", files(), path)).status == 201
    assert (await gateway.admin.get(path)).json == (await acme.get("/v1/adapters")).json
    assert (await acme.chat(model="pirate")).status == 200
    assert (await push(acme, "pirate", files(), path)).status == 403
    missing = await push(gateway.admin, "x", files(), "/admin/api/tenants/nobody/adapters")
    assert (missing.status, missing.error["param"]) == (404, "tenant")


@pytest.mark.parametrize("name", ["", "UPPER", "../up", "a b", "a" * 65, "a" * 2000, "base"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_name_that_is_none(name: str, shared_tenant: Client):
    got = await push(shared_tenant, name, files())
    assert (got.status, got.error["param"]) == (400, "name")


BAD: dict[str, tuple[dict[str, bytes], str]] = {
    # upload -> the parameter that the error names
    "no weights": ({CONFIG: files()[CONFIG]}, WEIGHTS),
    "an unknown field": (files() | {"extra": b"x"}, "extra"),
    "files and an archive": (files() | {"file": zipped(files())}, "file"),
    "not an archive": ({"file": b"hello"}, "file"),
    "a broken zip": ({"file": zipped(files())[:-40]}, "file"),
    "a broken gzip": ({"file": tarred(files(), "w:gz")[:-40]}, "file"),
    "an empty archive": ({"file": zipped({})}, CONFIG),
    "another archive": ({"file": zipped({"readme.txt": b"hello"})}, CONFIG),
    "two of them": ({"file": zipped(nested(files()) | nested(files(), "other"))}, "file"),
    "zip climbs": ({"file": zipped(files() | {"../../evil": b"x"})}, "file"),
    "zip climbs with our file": ({"file": zipped({f"../{CONFIG}": b"{}", WEIGHTS: b""})}, "file"),
    "zip, absolute": ({"file": zipped(files() | {"/etc/evil": b"x"})}, "file"),
    "zip with a link": ({"file": zipped({CONFIG: files()[CONFIG]}, {WEIGHTS: "/etc/passwd"})}, "file"),
    "tar climbs": ({"file": tarred(files() | {"../evil": b"x"})}, "file"),
    "tar with a link": ({"file": tarred({CONFIG: files()[CONFIG]}, links={WEIGHTS: "/etc/passwd"})}, "file"),
    "config of no adapter": (files() | {CONFIG: b'{"peft_type": "IA3"}'}, "peft_type"),
    "config is no JSON": (files() | {CONFIG: b"{"}, CONFIG),
    "weights cut off": (files() | {WEIGHTS: files()[WEIGHTS][:-9]}, WEIGHTS),
}


def tree(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_no_adapter_is_refused_by_name(kind: str, shared_tenant: Client, shared_folder: Path):
    parts, param = BAD[kind]
    before = tree(shared_folder)
    got = await push(shared_tenant, "bad", parts)
    assert got.status == 400, got.body
    assert got.error["param"] == param
    assert got.error["type"] == "invalid_request_error"
    assert (await shared_tenant.get("/v1/adapters")).json["data"] == []
    assert tree(shared_folder) - before <= {"gateway.db-wal", "gateway.db-shm"}


async def test_an_adapter_for_another_base(acme: Client):
    big = tensors()
    for name, (dtype, [rows, columns], data) in list(big.items()):
        if ".lora_A." in name:
            big[name] = (dtype, [rows, 2 * columns], data * 2)
    got = await push(acme, "bad", files() | {WEIGHTS: safetensors(big)})
    assert (got.status, got.error["code"]) == (400, "invalid_adapter")
    assert got.error["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"json": {"name": "x"}}, None),
        ({"data": b"--x\r\nbroken", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, None),
        ({"data": b"", "headers": {"Content-Type": "multipart/form-data"}}, None),
        ({"data": aiohttp.FormData({"file": "x"}, default_to_multipart=True)}, "name"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_form_that_is_none(options: dict[str, Any], param: str | None, shared_tenant: Client):
    got = await shared_tenant.call("POST", "/v1/adapters", **options)
    assert got.status == 400, got.body
    assert got.error["param"] == param


def bomb_tar() -> bytes:
    return gzip.compress(tarred({CONFIG: b"\0" * 5_000_000, WEIGHTS: b""}))


@pytest.mark.parametrize(
    "parts",
    [
        {CONFIG: b"{}", WEIGHTS: b"\0" * 300_000},
        {"file": zipped({CONFIG: b"{}", WEIGHTS: b"\0" * 5_000_000})},
        {"file": zipped(files() | {"zeros": b"\0" * 5_000_000})},
        {"file": bomb_tar()},
    ],
    ids=["the body", "a zip bomb", "a zip bomb we would not unpack", "a gzip bomb"],
)
async def test_too_large(parts: dict[str, bytes], tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str):
    small = settings(tmp_path, model_dir, [upstream.url], redis_url, max_upload_bytes=200_000)
    async with running(small) as gateway:
        acme = await gateway.tenant("acme")
        got = await push(acme, "big", parts)
        assert (got.status, got.error["code"]) == (413, "request_too_large")
        assert (await push(acme, "fits", files())).status == 201


async def test_operators_list_the_adapters_of_all_tenants(gateway: Gateway, upstream: Upstream):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    made = (await push(acme, "pirate", files(1))).json
    assert (await push(globex, "json", files(2))).status == 201
    upstream.resident = [made["digest"]]

    async def is_resident() -> bool:
        listed = await gateway.admin.get("/admin/api/adapters", params={"q": "pir"})
        return [each["resident"] for each in listed.json["data"]] == [[upstream.url]]

    await until(is_resident)
    listed = await gateway.admin.get("/admin/api/adapters", params={"sort": "-tenant", "limit": "1"})
    assert (listed.json["total"], listed.json["has_more"]) == (2, True)
    [one] = listed.json["data"]
    assert (one["tenant"], one["name"], one["state"], one["versions"], one["resident"]) == (
        *("globex", "json", "ready", 1),
        [],
    )
    wrong = ("sort=size;", "state=lost", "rank=0", "rank=x", "base=abc", "page=0", "limit=2000")
    for query in (*wrong, "unused=yes", "idle_days=0"):
        refused = await gateway.admin.get(f"/admin/api/adapters?{query}")
        assert (refused.status, refused.error["param"]) == (400, query.partition("=")[0])
    assert (await acme.get("/admin/api/adapters")).status == 403
