"""The receipt on the wire: each answer names the adapter whose pages its steps read."""

import asyncio
from typing import Any

import pytest

from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from testing.engine import Client, RunningServer
from testing.tiny import save_adapter

HEADER = "x-loraplex-adapter-digest"
INTERNAL = {"x-loraplex-internal-token": "secret"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    running = RunningServer(model, tmp_path_factory.mktemp("store"), internal_token="secret")
    yield running
    running.close()


@pytest.fixture
def digests(server, model, tmp_path) -> list[str]:
    store, found = DirectoryStore(server.store), []
    for seed in (1, 2):
        save_adapter(tmp_path / str(seed), seed=seed)
        found.append(f"sha256:{store.put(tmp_path / str(seed), BaseShape.from_config_dir(model)).digest}")
    return found


async def ask(client: Client, path: str, body: Any, headers: dict[str, str] = INTERNAL) -> tuple[str, Any]:
    async with client.session.post(client.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return response.headers[HEADER], await response.json()


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)])
async def test_a_whole_answer_names_what_its_steps_read(client: Client, digests: list[str], path: str, asked: Any):
    models = ["tiny", *digests] * 3
    bodies = [asked | {"model": model, "max_tokens": 4, "n": 2} for model in models]
    answers = await asyncio.gather(*(ask(client, path, body) for body in bodies))
    for model, (header, answer) in zip(models, answers, strict=True):
        expected = "base" if model == "tiny" else model
        assert header == expected
        assert answer["loraplex"]["adapter_digest"] == expected
        assert answer["loraplex"]["completion_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)])
async def test_each_event_of_a_stream_names_it_too(client: Client, digests: list[str], path: str, asked: Any):
    for model in ("tiny", *digests):
        body = asked | {"model": model, "max_tokens": 8, "ignore_eos": True}
        expected = "base" if model == "tiny" else model
        events = await client.events(path, body, headers=INTERNAL)
        assert {event["loraplex"]["adapter_digest"] for event in events} == {expected}
        async with client.session.post(client.url + path, json=body | {"stream": True}, headers=INTERNAL) as response:
            assert response.headers[HEADER] == expected
            await response.read()


async def test_pages_of_another_adapter_show_in_the_receipt(client: Client, server: RunningServer, digests: list[str]):
    """The receipt describes the slots that the step reads, even if the request asked for another adapter."""
    one, other = (digest.removeprefix("sha256:") for digest in digests)
    for digest in digests:
        await ask(client, "/v1/completions", {"model": digest, "prompt": "hi", "max_tokens": 1})
    pool = server.core.engine.adapters
    pin = pool.pin

    def pin_wrongly(digest: str, tenant_id: str) -> int:
        slot = pin(digest, tenant_id)
        return pool._residents.by_digest[other].slot if digest == one else slot

    pool.pin = pin_wrongly
    try:
        header, answer = await ask(client, "/v1/completions", {"model": digests[0], "prompt": "hi", "max_tokens": 3})
    finally:
        pool.pin = pin
    assert header == answer["loraplex"]["adapter_digest"] == digests[1]
