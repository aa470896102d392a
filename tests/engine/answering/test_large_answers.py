"""Large answers, and clients that do not read them."""

import asyncio
import io
import json
import re
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from engine.answering import completions as generate
from engine.answering import report
from engine.answering import running as run
from engine.answering.answers import Answer, ChatAnswer, CompletionAnswer
from engine.answering.sequence import Delta
from testing.engine import Client, RunningServer
from wire.decoding import decode
from wire.responses import FIELDS_HEADER

PROMPT = list(range(3, 303))
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 5}


async def test_a_large_answer_comes_whole(client: Client, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {"prompt": [PROMPT] * 4, "max_tokens": 3, "prompt_logprobs": 5, "logprobs": 2, "seed": 1}
    large = await client.complete(**asked)
    monkeypatch.setattr(run, "INLINE_LOGPROBS", 10**9)
    monkeypatch.setattr(run, "PIECE_BYTES", 10**9)
    small = await client.complete(**asked)
    assert len(json.dumps(large)) > 300_000
    assert large["choices"] == small["choices"]
    assert large["usage"] == small["usage"]
    assert len(large["choices"][3]["prompt_logprobs"]) == len(PROMPT)
    answer = await client.chat(**CHAT, max_tokens=400, ignore_eos=True, n=3)
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [400] * 3
    assert [len(entry["top_logprobs"]) for entry in answer["choices"][2]["logprobs"]["content"]] == [5] * 400


@pytest.mark.parametrize(("kind", "asked"), [(ChatAnswer, CHAT), (CompletionAnswer, {"prompt": "hi", "logprobs": 5})])
async def test_log_probabilities_are_encoded_while_their_tokens_are_generated(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Answer[Any]], asked: dict[str, Any]
):
    """Many answers that end in one step would hold the event loop one after the other."""
    encode, sizes = kind.encode, defaultdict[int, list[int]](list)

    def recorded(answer: Answer[Any], delta: Delta) -> None:
        if delta.logprobs:
            sizes[delta.index].append(len(delta.logprobs))
        encode(answer, delta)

    monkeypatch.setattr(kind, "encode", recorded)
    ask = client.chat if kind is ChatAnswer else client.complete
    answer = await ask(**asked, max_tokens=400, ignore_eos=True, n=2)
    assert len(answer["choices"]) == 2
    assert {index: sum(each) for index, each in sizes.items()} == {0: 400, 1: 400}
    assert all(len(each) > 1 for each in sizes.values()), "not all at the end"


async def test_only_a_gateway_is_told_the_lengths_of_the_fields(client: Client):
    async with client.session.post(f"{client.url}/v1/completions", json={"model": "tiny", "prompt": "hi"}) as response:
        assert response.status == 200
        assert FIELDS_HEADER not in response.headers
        assert set(await response.json()) == {"id", "object", "created", "model", "choices", "usage"}


async def read_bytes(client: Client, body: str) -> bytes:
    async with client.session.post(f"{client.url}/v1/completions", data=body) as response:
        assert response.status == 200
        return await response.read()


class Encoder:
    """msgspec, with a record of the bytes that each thread encodes at once."""

    Raw, UNSET = msgspec.Raw, msgspec.UNSET

    def __init__(self) -> None:
        self.json = self
        self.most: defaultdict[threading.Thread, int] = defaultdict(int)

    def encode(self, value: Any) -> bytes:
        encoded = msgspec.json.encode(value)
        thread = threading.current_thread()
        self.most[thread] = max(self.most[thread], len(encoded))
        return encoded


@pytest.mark.parametrize(
    ("prompts", "repeats", "fields"),
    [(6, 8, {"prompt_logprobs": 20}), (1, 13, {"echo": True, "logprobs": 20, "stream": True})],
)
async def test_a_large_answer_stalls_nobody(
    client: Client,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    prompts: int,
    repeats: int,
    fields: dict[str, Any],
):
    """On the loop it would delay all other requests, for as long as the decoder here takes."""
    encoder = Encoder()
    monkeypatch.setattr(run, "msgspec", encoder)
    asked = {"prompt": [list(range(3, 303)) * repeats] * prompts, "max_tokens": 1} | fields
    answer = await read_bytes(client, json.dumps({"model": "tiny", "temperature": 0} | asked))
    events = [json.loads(line.removeprefix(b"data: ")) for line in answer.splitlines() if line.endswith(b"}")]
    assert len({choice["index"] for event in events for choice in event["choices"]}) == prompts
    on_the_loop = encoder.most.pop(server._thread, 0)
    assert max(encoder.most.values()) > 1_000_000, "it is large"
    assert on_the_loop < 10_000


async def test_a_large_conversation_to_tokenize_stalls_nobody(
    client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
):
    messages = [{"role": "user", "content": "a"}] * 100_000 + [{"role": "nobody", "content": "a"}]
    body, ran_on = json.dumps({"messages": messages}).encode(), list[threading.Thread]()

    def recorded(kind: type[Any], raw: bytes) -> Any:
        ran_on.append(threading.current_thread())
        return decode(kind, raw)

    monkeypatch.setattr("engine.http.routes.decode", recorded)
    async with client.session.post(f"{client.url}/tokenize", data=io.BytesIO(body)) as response:
        assert response.status == 400
    assert len(ran_on) == 1
    assert server._thread not in ran_on


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_too_many_log_probabilities_are_refused_by_name(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr(generate, "MAX_LOGPROB_ENTRIES", 500)
    body = {"model": "tiny", "max_tokens": 10}
    if path == "/v1/completions":
        body |= {"prompt": [[5] * 30] * 2, "n": 2}
        over, under, field = {"prompt_logprobs": 4}, {"prompt_logprobs": 3}, "prompt_logprobs"
    else:
        body |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "n": 5}
        over, under, field = {"top_logprobs": 10}, {"top_logprobs": 9}, "logprobs"
    status, answer = await client.post(path, body | over)
    assert (status, answer["error"]["param"]) == (400, field)
    assert "at most 500 log-probabilities" in answer["error"]["message"]
    assert (await client.post(path, body | under))[0] == 200


@pytest.fixture
def impatient(model: Path, small_send_buffers: None) -> Iterator[RunningServer]:
    running = RunningServer(model, config={"max_num_seqs": 2}, max_waiting=0, internal_token="secret")
    yield running
    running.close()


def write_limit(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let writes of answers wait without a limit until the event is set, and for half a second after that."""
    is_limited = threading.Event()

    @asynccontextmanager
    async def timeout(_: float) -> AsyncIterator[None]:
        async def watch() -> None:
            while not is_limited.is_set():  # noqa: ASYNC110 - set on another thread
                await asyncio.sleep(0.01)
            limit.reschedule(asyncio.get_running_loop().time() + 0.5)

        async with asyncio.timeout(None) as limit:
            watching = asyncio.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()

    monkeypatch.setattr(report, "asyncio", SimpleNamespace(timeout=timeout))
    return is_limited


def idle_reader(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """Send a request and never read the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    idle.connect((host, int(port)))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: idle\r\nContent-Length: {len(raw)}\r\n"
    idle.sendall(head.encode() + b"x-loraplex-internal-token: secret\r\n\r\n" + raw)
    return idle


# More bytes than the kernel and the server buffer. A whole answer must end first, so most of it describes the prompts.
LONG_STREAM = {"stream": True, "prompt": "x", "n": 2, "max_tokens": 600, "logprobs": 20}
LONG_ANSWER = {"prompt": [PROMPT * 2] * 2, "prompt_logprobs": 20, "max_tokens": 30}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("asked", [LONG_STREAM, LONG_ANSWER], ids=["stream", "whole"])
async def test_a_client_that_does_not_read_is_cut_off(
    impatient: RunningServer, session: aiohttp.ClientSession, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    cut_off = write_limit(monkeypatch)
    session.headers["x-loraplex-internal-token"] = "secret"
    client = Client(session, impatient.url)
    with idle_reader(impatient, asked | {"model": "tiny", "ignore_eos": True}) as idle:
        await client.wait_for(lambda _: impatient.server._in_flight._places.held == 2)
        status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "engine_overloaded")
        cut_off.set()
        # Its seats are free, although it neither reads nor disconnects; the generated tokens are in the books.
        await client.wait_for(lambda _: impatient.server._in_flight._places.held == 0, seconds=120)
        assert (await client.post("/v1/completions", {"model": "tiny", "prompt": "x"}))[0] == 200
        _, books = await client.get("/finished?ids=idle&wait=10")
        assert books["data"][0]["finish_reason"] is not None
        assert books["data"][0]["completion_tokens"] > 0
        # Only the bytes that fit into the kernel's buffers were sent.
        received = b""
        with suppress(ConnectionError):
            while piece := idle.recv(1 << 16):
                received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        if length := re.search(rb"Content-Length: (\d+)", head):
            assert 0 < len(body) < int(length[1])
        else:
            assert body
            assert not body.endswith(b"\r\n0\r\n\r\n")  # the last chunk


@pytest.mark.timeout(300)
async def test_a_gateway_that_waits_for_its_client_is_not_cut_off(
    impatient: RunningServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(report, "GATEWAY_WRITE_SECONDS", 600.0)
    session.headers["x-loraplex-internal-token"] = "secret"
    client = Client(session, impatient.url)
    with idle_reader(impatient, LONG_STREAM | {"model": "tiny", "ignore_eos": True}) as idle:
        await client.wait_for(lambda state: state["generated_tokens"] == 2 * LONG_STREAM["max_tokens"], seconds=120)
        # Several times the limit of other clients, which holds for each write.
        await asyncio.sleep(3 * report.WRITE_SECONDS)
        assert impatient.server._in_flight._places.held == 2

        def rest() -> bytes:
            received = b""
            while b"[DONE]" not in received[-100:] and (piece := idle.recv(1 << 20)):
                received = received[-100:] + piece
            return received

        idle.settimeout(120.0)
        assert b"data: [DONE]" in (await asyncio.to_thread(rest))[-100:]
        await client.wait_for(lambda _: impatient.server._in_flight._places.held == 0)
