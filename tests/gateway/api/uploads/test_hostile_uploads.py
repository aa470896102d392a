"""Hostile and failing uploads: they block no other tenant, cost the gateway nothing and leave nothing behind."""

import asyncio
import contextlib
import gzip
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from adapters.check_server import BOOT
from adapters.checkpoint import open_checkpoint
from testing.adapter_files import header_of, pack, tensors
from testing.gateway.mutated_archives import extended, many_entries, tar_header
from testing.gateway.mutated_uploads import BOUNDARY, form
from testing.gateway.running import Answer, Client, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import CONFIG, WEIGHTS, files, nested, push, tarred, zipped
from tests.gateway.api.uploads.conftest import Start

MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


async def in_pieces(body: bytes, size: int = 64 << 10, pause: float = 0.0) -> AsyncIterator[bytes]:
    """Return a body that declares no length and takes no memory of the client. pause: seconds after each piece."""
    for start in range(0, len(body), size):
        yield body[start : start + size]
        await asyncio.sleep(pause)


def leftovers(folder: Path) -> list[str]:
    """Return the entries of the store that are no adapters."""
    return [path.name for path in (folder / "adapters").iterdir() if path.name.startswith(".")]


def children() -> list[int]:
    """Return the running checks: the child processes of the check servers that this process started."""
    return [check.pid for server in check_servers() for check in server.children()]


def check_servers() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if _forks_checks(process)]


def _forks_checks(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return BOOT in process.cmdline()
    return False


TRAINER = {
    "README.md": b"# a model card",
    "training_args.bin": b"\x80\x04cos\nsystem\n(S'touch /tmp/pwned'\ntR.",
    "optimizer.pt": bytes(100_000),
    "tokenizer.json": b"{}",
}


@pytest.mark.parametrize("pack_up", [zipped, tarred, lambda content: gzip.compress(tarred(content))])
async def test_an_archive_as_a_trainer_leaves_it(pack_up: Callable[[dict[str, bytes]], bytes], gateway: Gateway):
    """The root's adapter is used, not a checkpoint's; other files are not read."""
    acme = await gateway.tenant("acme")
    steps = nested(files(1), "checkpoint-1") | nested(files(2), "checkpoint-2") | {"checkpoint-2/optimizer.pt": b"x"}
    wanted = (await push(acme, "plain", files(3))).json["digest"]
    for content in (steps | files(3) | TRAINER, TRAINER | files(3) | steps):
        made = await push(acme, "trained", {"file": pack_up(content)})
        assert (made.status, made.json.get("digest")) == (201, wanted), made.body


async def test_the_store_keeps_one_form_for_all_tenants(gateway: Gateway, tmp_path: Path):
    """Tenants that share a digest never read each other's `__metadata__`, config or order of tensors."""
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    content = tensors()
    header = {"__metadata__": {"secret": "of acme"}, **header_of(content)}
    noted = pack(header, b"".join(data for _, _, data in content.values()))
    ours = files() | {WEIGHTS: noted, CONFIG: files()[CONFIG].replace(b"}", b', "revision": "of acme"}')}
    digest = (await push(acme, "a", ours)).json["digest"]
    folder = tmp_path / "adapters" / digest[7:9] / digest[7:]
    stored = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert not [name for name, raw in stored.items() if b"of acme" in raw]
    assert (await push(globex, "b", files())).json["digest"] == digest
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == stored
    assert f"sha256:{open_checkpoint(folder).digest}" == digest


async def test_a_folder_of_the_release_before_is_rewritten(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    digest = (await push(acme, "a", files())).json["digest"][7:]
    folder = tmp_path / "adapters" / digest[:2] / digest
    new = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(files()[WEIGHTS])
    assert open_checkpoint(folder).digest == digest
    assert (await push(acme, "b", files())).status == 201
    assert (folder / WEIGHTS).read_bytes() == new


BOMBS: dict[str, Callable[[], bytes]] = {
    "96 MiB of pax header": lambda: gzip.compress(extended(b"x", bytes(96 << 20)), 1),
    "digits in a pax header": lambda: gzip.compress(extended(b"x", b"1" * (1 << 20))),
    "a header of 32 TiB": lambda: extended(b"x", b"", 1 << 32),
    "a base-256 size of 2**90": lambda: tar_header(b"x", b"x", b"\x80" + (1 << 87).to_bytes(11, "big")),
    "200,000 entries": lambda: many_entries(200_000),
    "a tar of nothing but headers": lambda: gzip.compress(extended(b"x", b"9 path=x\n") * 20_000),
}


@pytest.mark.parametrize("kind", BOMBS)
async def test_bombs_cost_the_gateway_nothing(kind: str, gateway: Gateway, tmp_path: Path):
    """The event loop stays responsive and the gateway's memory constant: the limits apply to the child process."""
    acme = await gateway.tenant("acme")
    bomb = form({"file": BOMBS[kind]()})
    # The first upload costs memory that stays, such as buffers and compiled statements.
    assert (await push(acme, "good", files())).status == 201
    process = psutil.Process()
    before = largest = process.memory_info().rss
    # The thread's own time: the machine may be busy with other tests.
    begun, longest, last = time.monotonic(), 0.0, time.thread_time()
    sent = acme.call("POST", "/v1/adapters", data=in_pieces(bomb), headers=MULTIPART)
    pushing = asyncio.create_task(sent)
    while not pushing.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.thread_time() - last), time.thread_time()
        largest = max(largest, process.memory_info().rss)
    got = pushing.result()
    assert (got.status, got.error["param"]) == (400, "file"), got.body
    assert len(got.body) < 2048
    assert time.monotonic() - begun < 30
    assert longest < 2.0  # it was more than 600 s
    assert largest - before < 8 << 20  # less than the largest body
    assert leftovers(tmp_path) == []


def slow_form(wait: Awaitable[Any]) -> AsyncIterator[bytes]:
    """Send an upload that begins, waits, and never ends."""

    async def parts() -> AsyncIterator[bytes]:
        yield form(files())[:300]
        await wait
        yield b"x"
        await asyncio.Event().wait()

    return parts()


def trickle(client: Client, path: str = "/v1/adapters") -> "asyncio.Task[Any]":
    async def upload() -> Any:
        forever = asyncio.Event()
        return await client.call("POST", path, data=slow_form(forever.wait()), headers=MULTIPART)

    return asyncio.create_task(upload())


async def test_trickling_uploads_hold_nobody_elses(gateway: Gateway, tmp_path: Path):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    slow = [trickle(acme) for _ in range(12)]
    try:
        await until(lambda: _done(slow, 8))
        refused = [task.result() for task in slow if task.done()]
        assert {(answer.status, answer.error["code"]) for answer in refused} == {(429, "rate_limit_exceeded")}
        assert "4 concurrent uploads" in refused[0].error["message"]
        await until(lambda: _count(tmp_path, 2 * 4))  # a folder and its lock
        assert (await push(globex, "theirs", files())).status == 201
        assert (await push(gateway.admin, "mine", files(), "/admin/api/tenants/acme/adapters")).status == 201
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    await until(lambda: _none(leftovers, tmp_path))


async def _done(tasks: "list[asyncio.Task[Any]]", count: int) -> bool:
    return sum(task.done() for task in tasks) >= count


async def _count(folder: Path, count: int) -> bool:
    return len(leftovers(folder)) == count


async def _none(look: Callable[..., list[Any]], *arguments: Any) -> bool:
    return not look(*arguments)


async def test_an_upload_has_a_minimum_rate_and_a_deadline(start: Start, tmp_path: Path):
    async with start(min_upload_rate=1_000_000, body_timeout=0.3) as gateway:
        acme = await gateway.tenant("acme")
        got = await asyncio.wait_for(trickle(acme), 30)
        assert (got.status, got.error["code"]) == (408, "request_timeout")
    async with start(upload_timeout=0.5, migrate_on_start=False) as gateway:
        globex = await gateway.tenant("globex")
        got = await asyncio.wait_for(trickle(globex), 30)
        assert got.status == 408
        assert "time limit of 0.5 s" in got.error["message"]
    assert leftovers(tmp_path) == []


async def test_an_upload_below_the_minimum_rate_is_refused(start: Start):
    """The rate counts although no pause between the bytes is too long."""
    body = form({"file": tarred(files() | {"optimizer.pt": bytes(128 << 10)})})
    async with start(min_upload_rate=1_000_000, body_timeout=1.0) as gateway:
        acme = await gateway.tenant("acme")
        slow = acme.call("POST", "/v1/adapters", data=in_pieces(body, 2 << 10, 0.1), headers=MULTIPART)
        got = await asyncio.wait_for(slow, 30)
        assert (got.status, got.error["code"]) == (408, "request_timeout")
        assert "more slowly than 1000000 bytes" in got.error["message"]
    async with start(min_upload_rate=10_000, body_timeout=1.0, migrate_on_start=False) as gateway:
        globex = await gateway.tenant("globex")
        # It takes longer than the time before the rate counts.
        made = await globex.call("POST", "/v1/adapters", data=in_pieces(body, 8 << 10, 0.1), headers=MULTIPART)
        assert made.status == 201, made.body


async def test_a_revoked_key_ends_its_upload(gateway: Gateway):
    acme = await gateway.tenant("acme")
    slow = trickle(acme)
    await asyncio.sleep(0.2)
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})).status == 200
    got = await asyncio.wait_for(slow, 30)
    assert (got.status, got.error["code"]) == (403, "tenant_suspended")


@pytest.fixture
def no_limit_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let killed checks, which count as refused ones, make no tenant wait."""
    monkeypatch.setattr("gateway.api.uploads.checking.REFUSED_SECONDS", 1e6)


@pytest.mark.usefixtures("no_limit_of_refusals")
async def test_clients_that_leave_leave_nothing(gateway: Gateway, tmp_path: Path):
    """A client may disconnect at any moment: during the folder's creation, the body, or the child's check."""
    acme = await gateway.tenant("acme", adapter_changes_per_minute=None, max_concurrent_uploads=None)
    body = form(files())
    for number in range(60):
        async with aiohttp.ClientSession() as session:
            headers = acme.headers | MULTIPART
            sending = asyncio.create_task(session.post(acme.url + "/v1/adapters", data=body, headers=headers))
            await asyncio.sleep(number / 1000 * (1 if number < 40 else 5))
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
                (await sending).close()
    await until(lambda: _none(leftovers, tmp_path))
    await until(lambda: _none(children))
    assert (await push(acme, "good", files())).status == 201


async def test_a_child_that_is_killed_is_a_refusal(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    zeros = gzip.compress(tar_header(b"zeros", b"0", b"%011o\0" % (1 << 30)) + bytes(256 << 20), 1)
    pushing = asyncio.create_task(push(acme, "killed", {"file": zeros}))
    killed = False
    while not pushing.done():
        await asyncio.sleep(0)
        for child in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                killed = True
    got = pushing.result()
    assert killed
    assert (got.status, got.error["code"]) == (400, "adapter_check_failed"), got.body
    assert "killed" in got.error["message"]
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("no_limit_of_refusals")
async def test_a_killed_check_server_is_replaced(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    zeros = gzip.compress(tar_header(b"zeros", b"0", b"%011o\0" % (1 << 30)) + bytes(256 << 20), 1)
    pushing = asyncio.create_task(push(acme, "killed", {"file": zeros}))
    while not children():  # noqa: ASYNC110 - processes send no event
        await asyncio.sleep(0)
    (server,) = check_servers()
    server.kill()
    got = await pushing
    assert (got.status, got.error["code"]) == (400, "adapter_check_failed"), got.body
    assert "killed" in got.error["message"]
    for name in ("first", "second"):
        assert (await push(acme, name, files())).status == 201
    (other,) = check_servers()
    assert other != server
    assert (children(), leftovers(tmp_path)) == ([], [])


@pytest.mark.usefixtures("no_limit_of_refusals")
async def test_a_check_server_that_does_not_react_is_replaced(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "first", files())).status == 201
    (server,) = check_servers()
    server.suspend()
    with monkeypatch.context() as patch:
        patch.setattr("gateway.api.uploads.checking.CLOCK_FACTOR", 0.01)
        patch.setattr("gateway.api.uploads.checking.KILL_SECONDS", 0.1)
        got = await push(acme, "second", files())
    assert (got.status, got.error["code"]) == (400, "adapter_check_failed"), got.body
    assert "too much time" in got.error["message"]
    assert (await push(acme, "third", files())).status == 201
    assert check_servers() != [server]


async def test_a_rank_that_no_engine_serves_is_refused(start: Start, upstream: Upstream):
    config = files()[CONFIG]
    large = {
        CONFIG: config.replace(b'"r": 4', b'"r": 65'),
        WEIGHTS: pack(header_of(wide := tensors(rank=65)), b"".join(t[2] for t in wide.values())),
    }
    by_pattern = large | {CONFIG: config.replace(b'"r": 4', b'"r": 4, "rank_pattern": {".*": 65}')}
    async with start() as gateway:
        acme = await gateway.tenant("acme")
        got = await push(acme, "large", large)
        assert (got.status, got.error["code"], got.error["param"]) == (400, "invalid_adapter", "r")
        assert "ranks up to 64" in got.error["message"]
        got = await push(acme, "patterned", by_pattern)
        assert (got.status, got.error["param"]) == (400, "rank_pattern"), got.body
    async with start(max_lora_rank=65, migrate_on_start=False) as gateway:
        globex = await gateway.tenant("globex")
        assert (await push(globex, "large", large)).status == 201


async def test_a_size_that_no_engine_serves_is_refused(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme", adapter_changes_per_minute=None)
    # The engine stores two bytes a weight; the file has four.
    size = (await push(acme, "first", files())).json["size_bytes"] // 2
    answers: list[Answer] = []

    async def is_answered(status: int) -> bool:
        answers.append(await push(acme, "second", files()))
        return answers[-1].status == status

    upstream.reported = {"max_adapter_bytes": size - 1}
    await until(lambda: is_answered(400))
    error = answers[-1].error
    assert (error["code"], error["param"]) == ("invalid_adapter", "adapter")
    assert error["message"].endswith(f"takes {size} bytes of host memory; the engines here have {size - 1}.")
    upstream.reported = {"max_adapter_bytes": size}
    await until(lambda: is_answered(201))


async def test_the_limits_of_a_tenants_adapters(gateway: Gateway):
    acme = await gateway.tenant("acme", max_adapters=2, adapter_changes_per_minute=10)
    assert (await push(acme, "a", files(1))).json["size_bytes"] == 1536
    assert (await push(acme, "b", files(2))).status == 201
    got = await push(acme, "c", files(1))
    assert (got.status, got.error["code"], got.error["param"]) == (403, "adapter_limit_exceeded", "max_adapters")
    assert (await acme.call("DELETE", "/v1/adapters/b")).status == 200
    assert (await push(acme, "a", files(2))).status == 201
    tenant = "/admin/api/tenants/acme"
    await gateway.admin.call("PATCH", tenant, json={"max_adapter_bytes": 4500})
    for body in (form(files(3), b"a"), in_pieces(form(files(3), b"a"))):
        got = await acme.call("POST", "/v1/adapters", data=body, headers=MULTIPART)
        assert (got.status, got.error["code"]) == (403, "adapter_limit_exceeded")
        assert got.error["param"] == "max_adapter_bytes"
    # A busy machine needs more of them, because a change is regained every six seconds.
    for _ in range(30):
        last = await push(acme, "a", files(2))
        if last.status == 429:
            break
    assert (last.status, last.error["code"]) == (429, "rate_limit_exceeded")
    assert "adapter changes" in last.error["message"]
    assert (await acme.call("DELETE", "/v1/adapters/a")).status == 429
    shown = (await gateway.admin.get(tenant)).json
    assert (shown["max_adapters"], shown["max_concurrent_uploads"]) == (2, 4)
    changed = await gateway.admin.call("PATCH", tenant, json={"max_adapters": None})
    assert (changed.json["max_adapters"], changed.json["max_adapter_bytes"]) == (None, 4500)


async def test_a_refused_version_is_not_in_the_store(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme", max_adapters=1)
    assert (await push(acme, "a", files(1))).status == 201
    before = sorted((tmp_path / "adapters").rglob("*"))
    assert (await push(acme, "b", files(2))).status == 403
    assert sorted((tmp_path / "adapters").rglob("*")) == before


async def test_what_a_killed_gateway_left_goes_with_the_next(start: Start, tmp_path: Path):
    store = tmp_path / "adapters"
    dead = store / ".tmp-dead"
    dead.mkdir(parents=True)
    (store / ".tmp-dead.lock").touch()
    (dead / WEIGHTS).write_bytes(bytes(100))
    async with start():
        assert leftovers(tmp_path) == []
