"""Whole answers of our engine: their fields are taken by the lengths in a header, and equal decoded ones."""

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import Raw

from gateway.errors import UpstreamFailed
from gateway.fleet.calls import answers
from gateway.fleet.calls.answers import (
    LARGE_BYTES,
    Fields,
    ReportedProgress,
    decode_field,
    decode_fields,
    decode_progress,
    object_parts,
    read_usage,
    slice_fields,
)
from gateway.fleet.engines.engine import EngineState
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream
from testing.gateway.upstream_bodies import counts
from tests.gateway.fleet.calls.test_receipts import row_of
from wire.responses import FIELDS_HEADER, EngineStateResponse, GenerationProgress

# Names of tokens are keys of `top_logprobs`, so a completion can have any field's name with its punctuation.
DECOY = {"index": 0, "text": '"},"usage":{}', "logprobs": {"top_logprobs": [{"a": -1.5, "usage": -2.5}]}}
AT_DECOY = msgspec.json.encode([DECOY]).index(b',"usage":-2.5')
ANSWER = {"id": "cmpl-1", "created": 1, "choices": [DECOY], "usage": {"prompt_tokens": 3}, "loraplex": {"n": 1}}


def encoded(answer: dict[str, Any]) -> tuple[bytearray, dict[str, int]]:
    """Return an answer's JSON and the lengths of its fields, as our engine sends them."""
    return bytearray(msgspec.json.encode(answer)), {k: len(msgspec.json.encode(v)) for k, v in answer.items()}


def header(lengths: dict[str, int]) -> str:
    return json.dumps(lengths)


def texts(fields: Fields) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in fields.items()}


class Saying(Upstream):
    """Engine double whose whole answers have the header and the reason, unless it is a previous release.

    longer: bytes by which the header overstates the choices. size: bytes of each answer's choices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_previous, self.longer, self.size = False, 0, 0

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        made = await super()._generate(request)
        assert isinstance(made, web.Response)
        assert isinstance(made.body, bytes)
        answer = json.loads(made.body)
        answer["choices"][0]["logprobs"] = "p" * self.size
        answer["loraplex"] = counts(answer["usage"]["completion_tokens"])
        if self.is_previous:
            return web.json_response(answer, headers=self._receipt(answer))
        answer["loraplex"]["finish_reason"] = answer["choices"][0]["finish_reason"]
        body, lengths = encoded(answer)
        lengths["choices"] += self.longer
        said = self._receipt(answer) | {FIELDS_HEADER: header(lengths)}
        return web.Response(body=bytes(body), content_type="application/json", headers=said)


@pytest.fixture
async def upstream(starts_servers: None) -> AsyncIterator[Saying]:
    async with Saying().serving() as upstream:
        yield upstream


def test_fields_by_length_are_the_decoded_ones():
    body, lengths = encoded(ANSWER)
    assert texts(slice_fields(body, header(lengths))) == texts(decode_fields(body, "answer"))


@pytest.mark.parametrize("name", ANSWER)
def test_a_wrong_length_is_an_error(name: str):
    body, right = encoded(ANSWER)
    for wrong in {*range(-1, len(body) + 3), 2**63, 10**30} - {right[name]}:
        with pytest.raises(UpstreamFailed):
            slice_fields(body, header(right | {name: wrong}))


@pytest.mark.parametrize(("first", "second"), list(pairwise(ANSWER)))
def test_lengths_that_are_wrong_together_are_an_error(first: str, second: str):
    """The first length is as much too long as the second is too short."""
    body, right = encoded(ANSWER)
    for moved in range(1 - right[first], right[second]):
        if moved and not (first == "choices" and right[first] + moved == AT_DECOY):
            with pytest.raises(UpstreamFailed):
                slice_fields(body, header(right | {first: right[first] + moved, second: right[second] - moved}))


def test_choices_that_end_at_a_name_in_a_completion_leave_no_counts():
    """Such lengths leave all names in place, but then the counts are no JSON."""
    body, right = encoded(ANSWER)
    moved = right["choices"] - AT_DECOY
    fields = slice_fields(body, header(right | {"choices": AT_DECOY, "usage": right["usage"] + moved}))
    with pytest.raises(UpstreamFailed):
        decode_field(fields, "usage")


def test_another_name_is_an_error():
    body, right = encoded(ANSWER)
    with pytest.raises(UpstreamFailed):
        slice_fields(body, header({"model" if name == "usage" else name: right[name] for name in right}))


@pytest.mark.parametrize("said", ["", "{}", "[]", "1", '{"id":null}', '{"id":1.5}', '{"choices":9}', "{\udc80}"])
def test_a_header_of_another_form_is_an_error(said: str):
    with pytest.raises(UpstreamFailed):
        slice_fields(encoded(ANSWER)[0], said)


@pytest.mark.parametrize("body", ['{"id": "cmpl-1"}', '{"id":"cmpl-1"} ', '[{"id":"cmpl-1"}', '{"id":"cmpl-1",}', ""])
def test_a_body_of_another_form_is_an_error(body: str):
    with pytest.raises(UpstreamFailed):
        slice_fields(bytearray(body, "utf-8"), '{"id":8}')


def test_an_objects_parts_are_the_object_and_its_values_are_not_copied():
    fields = {"id": Raw(b'"x"'), "choices": Raw(msgspec.json.encode("p" * LARGE_BYTES)), "usage": Raw(b"{}")}
    parts = object_parts(fields)
    assert b"".join(parts) == msgspec.json.encode(fields)
    assert all(isinstance(value, memoryview) for value in parts[1::2])
    assert b"".join(object_parts({})) == b"{}"


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_an_answer_by_lengths_is_the_answer_decoded(
    endpoint: str, gateway: Gateway, upstream: Saying, tmp_path: Any
):
    upstream.alphabet = '"},"usage":{"completion_tokens":0},"x":{"é'
    acme = await gateway.tenant("acme")
    bodies, rows = [], []
    for is_previous in (False, True):
        upstream.is_previous = is_previous
        got = await getattr(acme, endpoint)(max_tokens=90, x_engine={"tokens": 80, "pad": 9})
        assert got.status == 200, got.body
        assert got.headers.get(FIELDS_HEADER) is None
        bodies.append({name: value for name, value in got.json.items() if name != "id"})
        row = await row_of(gateway, tmp_path, got.headers["x-request-id"])
        rows.append((row.status, row.finish_reason, row.prompt_tokens, row.completion_tokens, row.cached_tokens))
    assert bodies[0] == bodies[1]
    assert "loraplex" not in bodies[0]
    assert rows[0] == rows[1] == ("ok", "stop", 11, 80, 3)


@pytest.mark.parametrize("longer", [-1, 1, 10**6])
async def test_a_wrong_length_is_no_answer(longer: int, gateway: Gateway, upstream: Saying):
    upstream.longer = longer
    acme = await gateway.tenant("acme")
    got = await acme.chat(max_tokens=9)
    assert (got.status, got.error["code"]) == (502, "engine_error")
    upstream.longer = 0
    assert (await acme.chat(max_tokens=9)).status == 200


class Counted:
    """A decoder that counts the bytes that it reads."""

    def __init__(self, decode: Any) -> None:
        self._decode, self.num_bytes = decode, 0

    def decode(self, raw: Any, **options: Any) -> Any:
        self.num_bytes += len(raw.encode() if isinstance(raw, str) else memoryview(raw))
        return self._decode(raw, **options)


async def test_the_choices_of_a_large_answer_are_not_read(
    gateway: Gateway, upstream: Saying, monkeypatch: pytest.MonkeyPatch
):
    """The choices of a large answer are not decoded, with the fields header (our engine) or without it (vLLM, SGLang).

    Those of a small answer without it are.
    """
    acme = await gateway.tenant("acme")
    plain = msgspec.json.decode
    read: dict[tuple[bool, int], int] = {}
    for is_previous, size in ((False, 7 * 2**20), (True, 7 * 2**20), (True, 2**19)):
        upstream.is_previous, upstream.size = is_previous, size
        counted = [Counted(answers._fields.decode), Counted(answers._choices.decode), Counted(plain)]
        with monkeypatch.context() as patch:
            patch.setattr(answers, "_fields", counted[0])
            patch.setattr(answers, "_choices", counted[1])
            patch.setattr(msgspec.json, "decode", counted[2].decode)
            got = await acme.complete(max_tokens=9)
        assert (got.status, len(got.json["choices"][0]["logprobs"])) == (200, size)
        read[is_previous, size] = sum(each.num_bytes for each in counted)
    assert read[False, 7 * 2**20] < 10_000
    assert read[True, 7 * 2**20] < 10_000
    assert read[True, 2**19] > 2 * 2**19


# Fields of a state that the gateway sets itself, for other kinds of engines and for operators.
OWN_FIELDS = {"finds_adapters", "no_base_reason", "reported"}


def test_the_gateway_reads_only_fields_that_our_engine_sends():
    assert set(ReportedProgress.__struct_fields__) <= set(GenerationProgress.__struct_fields__)
    assert set(EngineState.__struct_fields__) - OWN_FIELDS <= set(EngineStateResponse.__struct_fields__)


def test_progress_of_another_form_is_ignored_and_malformed_json_is_the_engines_failure():
    def progress(text: bytes) -> ReportedProgress | None:
        return decode_progress({"loraplex": Raw(text)})

    assert progress(b'{"completion_tokens":3,"finish_reason":null}') == ReportedProgress(completion_tokens=3)
    assert decode_progress({}) is None
    assert [progress(text) for text in (b"null", b"3", b"[]")] == [None] * 3
    with pytest.raises(UpstreamFailed, match="loraplex"):
        progress(b"{")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}', (9, 3, 4)),
        (b'{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":null}', (9, 3, None)),
        (b'{"completion_tokens":3,"prompt_tokens_details":[1]}', (None, 3, None)),
        (b'{"prompt_tokens":-9,"completion_tokens":true,"prompt_tokens_details":{"cached_tokens":4.0}}', (None,) * 3),
        (b'{"prompt_tokens":2147483648,"completion_tokens":2147483647}', (None, 2**31 - 1, None)),
        (b'{"prompt_tokens":"9","completion_tokens":1e3}', (None,) * 3),
        (b"null", None),
        (b"[1]", None),
    ],
)
def test_usage_of_another_form_has_no_counts(text: bytes, expected: tuple[int | None, ...] | None):
    """Details that were no object raised AttributeError."""
    assert read_usage({"usage": Raw(text)}) == expected


def test_progress_of_impossible_counts_has_none():
    found = decode_progress({"loraplex": Raw(b'{"completion_tokens":-1,"prompt_tokens":7,"cached_tokens":"3"}')})
    assert found is not None
    assert found.usage == (7, None, None)
