"""Answers of a foreign server's own routes that have no end, or values of other types."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import ClientSession, web
from msgspec import Raw

from gateway.api.golden.requests import _text as golden_text
from gateway.errors import UpstreamFailed
from gateway.fleet.calls.answers import FAILED, decode_choices, decode_fields, public_error, read_usage
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.kinds.kind import BodyTooLarge, ErrorDetail, read_detail, retry_after
from gateway.fleet.kinds.prefill import read_params
from gateway.fleet.kinds.vllm import Vllm
from testing.gateway.kinds import kinds_of
from testing.gateway.principals import principal
from testing.gateway.running import BASE_MODEL
from testing.serving import serving


@pytest.mark.usefixtures("starts_servers")
async def test_an_answer_without_an_end_is_not_read(tmp_path: Path):
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        # The gateway closes the connection before the last piece.
        with suppress(ConnectionError):
            for _ in range(64):
                await response.write(bytes(2**20))
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", flood)
    async with serving(app) as url, ClientSession() as session:
        kind, engine = kinds_of(session, tmp_path)["vllm"], EngineRecord(parse_address(f"vllm+{url}"))
        assert isinstance(kind, Vllm)
        with pytest.raises(BodyTooLarge):
            await kind.get(engine, "/v1/models")
        with pytest.raises(BodyTooLarge):
            await kind.tokenize(engine, BASE_MODEL, {"prompt": "a"}, 1000, principal().tenant)
        with pytest.raises(BodyTooLarge):
            await kind.adapters._post(engine, Vllm.adapter_api.load, {})


def test_a_release_is_kept_on_record_without_a_nul():
    """PostgreSQL refuses it, so no check of golden answers was recorded."""
    engine = EngineRecord(parse_address("vllm+http://127.0.0.1:1"), state=EngineState(version="1.0\0" + "x" * 100))
    assert engine.software.version == "1.0\ufffd" + "x" * 60


@pytest.mark.parametrize("value", ["9" * 5000, "86400000", "soon", "-1", "²"])
def test_a_retry_after_of_another_form_is_a_second(value: str):
    """Python reads no number of 5,000 digits, so the request failed."""
    assert retry_after(cast(Any, SimpleNamespace(headers={"Retry-After": value}))) == 1


DEEP = b"[" * 100_000 + b"]" * 100_000


async def test_an_answer_of_any_depth_is_the_servers_failure():
    """It ended in an internal error of the gateway."""
    nested = b'{"a":%s}' % DEEP
    assert read_detail(nested) == ErrorDetail()
    with pytest.raises(UpstreamFailed):
        decode_fields(nested, "answer")
    for read in (decode_choices, read_usage):
        with pytest.raises(UpstreamFailed):
            read({"choices": Raw(DEEP), "usage": Raw(DEEP)})
    with pytest.raises(UpstreamFailed):
        golden_text({"choices": Raw(b'[{"text":"a","x":%s}]' % DEEP)})
    content = SimpleNamespace(iter_any=lambda: pieces(b'{"kv_transfer_params":%s}' % nested))
    with pytest.raises(UpstreamFailed):
        await read_params(cast(Any, SimpleNamespace(content=content)), "http://prefill")


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece


@pytest.mark.parametrize("error", [DEEP, b'{"type": ["invalid_request_error"]}', b'{"type": {}}', b'"a"', b"null"])
def test_a_streams_error_of_any_form_has_a_fixed_message(error: bytes):
    shown = msgspec.json.decode(public_error({"error": Raw(error)}, Vllm.traits)["error"])
    assert (shown["message"], shown["code"]) == (FAILED, "engine_error")


@pytest.mark.parametrize("value", ["[1]", "400", '{"a": 1}', "null"])
def test_an_errors_param_and_code_are_texts(value: str):
    """A param of another type failed where the gateway cuts it to its length."""
    body = f'{{"error": {{"message": "m", "param": {value}, "code": {value}}}}}'
    assert read_detail(body.encode()) == ErrorDetail("m")
