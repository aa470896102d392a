"""Hostile bodies and connections: tiny chunks, unread bodies, endless heads."""

import asyncio
import contextlib
import gzip
import json
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.api.requests import memory as body_memory
from gateway.api.requests.body_reader import FREE_CHUNKS
from gateway.api.requests.memory import OPERATOR, BodyMemory, BodyShare
from gateway.api.requests.prompts import CHAT, COMPLETIONS, Endpoint, PromptReader
from gateway.billing.inference_request import InferenceRequest
from gateway.errors import TooManyBodies
from testing.gateway.bases import measured, one_base, with_tokenizer
from testing.gateway.running import BASE_MODEL, Client, Gateway, until
from testing.gateway.upstream import Upstream
from testing.tiny import save_byte_level_tokenizer
from tests.gateway.api.inference.test_time_limits import connect
from wire.text.tokenizer import Tokenizer

CRUMB = b"1;a=b\r\n \r\n"


def head(client: Client, path: str, *lines: str) -> bytes:
    parts = [f"POST {path} HTTP/1.1", "Host: test", f"Authorization: Bearer {client.key}", *lines, "", ""]
    return "\r\n".join(parts).encode()


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await connect(gateway)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Return an answer's status, head and body."""
    top = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30.0)
    length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(top.split()[1]), top, await reader.readexactly(length)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "application/json"), ("/v1/adapters", "multipart/form-data; boundary=b")],
)
async def test_a_body_in_crumbs_is_refused_early(path: str, kind: str, serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        begin = b"" if "json" in kind else b"3\r\n--b\r\n"
        if "json" not in kind:
            text = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'
            begin = b"%x\r\n%s\r\n" % (len(text), text)
        async with connected(gateway) as (reader, writer):
            writer.write(head(acme, path, f"Content-Type: {kind}", "Transfer-Encoding: chunked") + begin)
            # The body has no end: the gateway refuses it before.
            writer.write(CRUMB * (FREE_CHUNKS + 100))
            status, top, body = await answered(reader)
            assert status == 400
            assert b"chunks are too small" in body
            assert b"connection: close" in top.lower()
            writer.write(CRUMB * 200_000)
        assert (await acme.complete()).status == 200


async def test_a_small_body_may_come_in_crumbs(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        raw = json.dumps({"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
        crumbs = b"".join(b"1\r\n%c\r\n" % byte for byte in raw) + b"0\r\n\r\n"
        async with connected(gateway) as (reader, writer):
            writer.write(head(acme, "/v1/completions", "Content-Type: application/json", "Transfer-Encoding: chunked"))
            writer.write(crumbs)
            assert (await answered(reader))[0] == 200


async def test_a_large_body_in_fair_chunks_and_one_compressed(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        raw = json.dumps({"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 1, "x": "a" * 900_000}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(raw), 100):
                yield raw[at : at + 100]

        kind = {"Content-Type": "application/json"}
        assert (await acme.call("POST", "/v1/completions", data=pieces(), headers=kind)).status == 200
        packed = kind | {"Content-Encoding": "gzip"}
        assert (await acme.call("POST", "/v1/completions", data=gzip.compress(raw), headers=packed)).status == 200
        assert [len(body["x"]) for _, body in upstream.requests] == [900_000] * 2


async def test_a_wrong_keys_body_is_not_read(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        nobody = gateway.client("lpx_wrong")
        async with connected(gateway) as (reader, writer):
            writer.write(head(nobody, "/v1/completions", "Content-Length: 1000000") + b"{")
            status, top, _ = await answered(reader)
            assert status == 401
            assert b"connection: close" in top.lower()


async def test_a_head_is_small(serve: Any, upstream: Upstream):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        for lines in (["X-A: " + "a" * 5000], [f"X-{i}: a" for i in range(100)]):
            async with connected(gateway) as (reader, writer):
                writer.write(head(acme, "/v1/completions", *lines, "Content-Length: 2") + b"{}")
                top = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30.0)
                assert top.split()[1] == b"400"


async def begin(gateway: Gateway, client: Client, length: int, body: bytes = b"{", *lines: str) -> Any:
    reader, writer = await connect(gateway)
    writer.write(head(client, "/v1/completions", "Content-Type: application/json", f"Content-Length: {length}", *lines))
    writer.write(body)
    return reader, writer


async def held(gateway: Gateway) -> int:
    page = (await gateway.admin.get("/metrics")).body.decode()
    name = "loraplex_gateway_request_body_bytes "
    return int(float(next(line for line in page.splitlines() if line.startswith(name)).split()[1]))


async def test_large_bodies_of_one_tenant_have_a_share(serve: Any, upstream: Upstream):
    """Two trickled bodies take a tenant's half; its third is refused unread, but no neighbour's or operator's."""
    async with serve(max_body_bytes=2**20, body_memory_bytes=2**22) as gateway:
        greedy, neighbour = await gateway.tenant("greedy"), await gateway.tenant("neighbour")
        slow = [await begin(gateway, greedy, 2**20) for _ in range(2)]

        async def both_are_held() -> bool:
            return await held(gateway) == 2**21

        await until(both_are_held)
        reader, writer = await begin(gateway, greedy, 2**20)
        status, top, body = await answered(reader)
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_bodies")
        assert b"retry-after: 1" in top.lower()
        assert b"connection: close" in top.lower()
        # Small bodies do not count.
        assert (await greedy.complete(max_tokens=1)).status == 200
        assert (await neighbour.complete(max_tokens=1, x="a" * 500_000)).status == 200
        named = await gateway.admin.post("/admin/api/tenants", {"name": "x" * 500_000})
        assert named.status == 400
        for _, each in (*slow, (reader, writer)):
            each.transport.abort()

        async def nothing_is_held() -> bool:
            return await held(gateway) == 0

        await until(nothing_is_held)


async def test_small_bodies_of_one_tenant_have_places(serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body_memory, "SMALL_AT_ONCE", 3)
    async with serve() as gateway:
        greedy, neighbour = await gateway.tenant("greedy"), await gateway.tenant("neighbour")
        # Its key is known then: requests that wait for a look-up may continue after later ones.
        assert (await greedy.complete(max_tokens=1)).status == 200
        slow = [await begin(gateway, greedy, 1000) for _ in range(3)]

        # A request of `is_full` that came before them would have the place of one.
        async def are_there() -> bool:
            return "loraplex_gateway_http_in_flight 4.0" in (await gateway.admin.get("/metrics")).body.decode()

        await until(are_there)

        async def is_full() -> bool:
            return (await greedy.complete(max_tokens=1)).status == 429

        await until(is_full)
        assert (await greedy.complete()).error["code"] == "too_many_bodies"
        assert (await neighbour.complete(max_tokens=1)).status == 200
        for _, each in slow:
            each.transport.abort()

        async def is_free() -> bool:
            return (await greedy.complete(max_tokens=1)).status == 200

        await until(is_free)


async def test_a_body_that_grows_beyond_its_share_is_refused(serve: Any, upstream: Upstream):
    """A compressed or wide-character body counts by its decoded size."""
    async with serve(max_body_bytes=2**20, body_memory_bytes=2**22) as gateway:
        acme = await gateway.tenant("acme")
        kind = {"Content-Type": "application/json"}
        wide = json.dumps({"model": BASE_MODEL, "prompt": "Hi", "user": "\U0001f600" + "a" * 600_000}).encode()
        for body, headers in ((wide, kind), (gzip.compress(wide), kind | {"Content-Encoding": "gzip"})):
            got = await acme.call("POST", "/v1/completions", data=body, headers=headers)
            assert (got.status, got.error["code"]) == (413, "request_too_large")
        slow = [await begin(gateway, acme, 700_000) for _ in range(2)]

        async def both_are_held() -> bool:
            return await held(gateway) == 1_400_000

        await until(both_are_held)
        bomb = gzip.compress(bytes(2**20))
        got = await acme.call("POST", "/v1/completions", data=bomb, headers=kind | {"Content-Encoding": "gzip"})
        assert (got.status, got.error["code"]) == (429, "too_many_bodies")
        for _, each in slow:
            each.transport.abort()


def test_tenants_that_fill_the_memory_together_leave_some_to_others_and_operators_may_use_all():
    memory = BodyMemory(2**26)
    BodyShare(memory, "a").take(2**25)
    for tenant, most in (("b", 2**24), ("c", 2**23)):
        with pytest.raises(TooManyBodies):
            BodyShare(memory, tenant).take(most + 1)
        BodyShare(memory, tenant).take(most)
    assert memory.held == 2**25 + 2**24 + 2**23
    BodyShare(memory, OPERATOR).take(2**26)


async def test_a_neighbours_large_prompt_waits_for_no_other_tenants(tmp_path: Any):
    memory = BodyMemory(2**26)
    begun, gone = threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert gone.wait(60.0)

    greedy = [asyncio.ensure_future(BodyShare(memory, "greedy").run(long)) for _ in range(32)]
    try:
        assert await asyncio.to_thread(begun.wait, 30.0)
        assert await asyncio.wait_for(BodyShare(memory, "neighbour").run(lambda: 7), 30.0) == 7
        assert not any(each.done() for each in greedy)
    finally:
        gone.set()
        await asyncio.gather(*greedy)


def digits(count: int, max_tokens: int = 1) -> bytes:
    return json.dumps({"model": BASE_MODEL, "prompt": "1" * count, "max_tokens": max_tokens}).encode()


async def test_only_work_below_a_millisecond_is_done_on_the_event_loop(tmp_path: Any):
    """Bodies of more than a millisecond's work wait for their tenant's thread, which is busy here."""
    save_byte_level_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    reader = PromptReader(with_tokenizer(Tokenizer.from_dir(tmp_path)), default_max_tokens=16)
    memory, gone = BodyMemory(2**26), threading.Event()
    share = BodyShare(memory, "acme")

    async def measure(raw: bytes, endpoint: Endpoint = COMPLETIONS) -> InferenceRequest:
        return await measured(reader, raw, endpoint, share, one_base(context_length=100_000))

    def chat(**fields: Any) -> bytes:
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}).encode()

    text = json.dumps({"model": "m", "prompt": "Why is the sky blue " * 60, "max_tokens": 1}).encode()
    dear = [
        (digits(1000), COMPLETIONS),
        (json.dumps({"model": "m", "prompt": "\u4e00" * 250}).encode(), COMPLETIONS),
        (chat(chat_template_kwargs={"a": 1}), CHAT),
        (chat(chat_template_kwargs={"a": 1}).replace(b"chat_t", b"ch\\u0061t_t"), CHAT),
    ]
    held = asyncio.ensure_future(share.run(lambda: gone.wait(60.0)))
    try:
        for quick in (digits(300), text):
            assert await asyncio.wait_for(measure(quick), 30.0)
        waiting = [asyncio.ensure_future(measure(*each)) for each in dear]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in waiting)
    finally:
        gone.set()
        await held
    assert [each.prompt_tokens > 0 for each in await asyncio.gather(*waiting)] == [True] * len(dear)


async def test_counting_on_a_thread_leaves_the_event_loop_free(tmp_path: Any):
    save_byte_level_tokenizer(tmp_path, "")
    tokenizer = Tokenizer.from_dir(tmp_path)
    text = "".join(random.Random(0).choices("abc ,.0123456789", k=1_000_000))
    stalls = []
    # Three times, because a busy machine may take the core away once.
    for _ in range(3):
        began = time.perf_counter()
        counting = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, text))
        longest, last = 0.0, began
        while not counting.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        stalls.append(longest / (time.perf_counter() - began))
    assert min(stalls) < 0.5, f"the loop stood still for these shares of the time: {stalls}"


async def test_prompts_that_are_counted_for_no_engine_have_a_rate(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body_memory, "REFUSED_SECONDS", 0.05)
    upstream.healthy = False
    async with serve(max_model_len=20_000) as gateway:
        greedy, honest = await gateway.tenant("greedy"), await gateway.tenant("honest")

        async def ask() -> Any:
            kind = {"Content-Type": "application/json"}
            return await greedy.call("POST", "/v1/completions", data=digits(8000), headers=kind)

        asked = 0
        while (refused := await ask()).status == 503:
            assert refused.error["code"] == "no_engine"
            asked += 1
            assert asked < 1000
        assert (refused.status, refused.error["code"]) == (429, "too_many_refused_requests")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await honest.complete()).error["code"] == "no_engine"


async def test_threads_rest_after_a_tenants_refused_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body_memory, "FREE_REFUSED_SECONDS", 0.02)
    monkeypatch.setattr(body_memory, "REFUSED_REST", 50.0)
    memory, loop = BodyMemory(2**26), asyncio.get_running_loop()

    def burn() -> None:
        deadline = time.thread_time() + 0.03
        while time.thread_time() < deadline:
            pass

    async def ask(owner: str, *, is_admitted: bool) -> float:
        """Return the time at which the request's work began."""
        with contextlib.suppress(ValueError), memory.share(owner) as share:
            began = await share.run(loop.time)
            await share.run(burn)
            if is_admitted:
                share.admitted()
            raise ValueError
        return began

    for _ in range(3):
        await ask("honest", is_admitted=True)
    asked_at = loop.time()
    await ask("greedy", is_admitted=False)
    greedy, honest = await asyncio.gather(ask("greedy", is_admitted=True), ask("honest", is_admitted=True))
    assert honest < greedy
    assert greedy > asked_at + body_memory.REFUSED_REST * 0.03


async def test_refused_requests_have_a_rate_and_admitted_ones_do_not(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body_memory, "REFUSED_SECONDS", 0.05)
    kind = {"Content-Type": "application/json"}
    async with serve(max_model_len=20_000) as gateway:
        greedy, honest = await gateway.tenant("greedy"), await gateway.tenant("honest")

        async def ask(client: Client, max_tokens: int) -> Any:
            return await client.call("POST", "/v1/completions", data=digits(8000, max_tokens), headers=kind)

        for _ in range(200):
            assert (await ask(honest, 1)).status == 200
        refusals = []
        while (refused := await ask(greedy, 20_000)).status == 400:
            refusals.append(refused)
            assert len(refusals) < 1000
        assert (refused.status, refused.error["code"]) == (429, "too_many_refused_requests")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await greedy.complete()).status == 429
        assert (await ask(honest, 1)).status == 200

        async def is_served() -> bool:
            return bool((await greedy.complete()).status == 200)

        await until(is_served)
