"""Large answers of any engine: their fields are found in pieces, and equal the decoded ones."""

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest

from gateway.errors import UpstreamFailed
from gateway.fleet.calls import json_field_scanner
from gateway.fleet.calls.answers import LARGE_BYTES, Choice, decode_choices, decode_fields, read_fields
from gateway.fleet.calls.json_field_scanner import PIECE_BYTES, read_object

TEXTS = ['"', "\\", '\\"', "{[", "]}", "a\\\\", '"},"usage":{"completion_tokens":0},"x":{"', "é", ":,", " ", "\n", ""]


def answer_of(rng: random.Random, choices: int, tokens: int) -> dict[str, Any]:
    def text() -> str:
        return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(6)))

    def token() -> dict[str, Any]:
        return {"token": text(), "logprob": -rng.random(), "bytes": [97, 98], "top": {text(): 1.5, "x": [[], {}]}}

    def choice(index: int) -> dict[str, Any]:
        found = {"index": index, "logprobs": {"content": [token() for _ in range(tokens)]}, "finish_reason": "stop"}
        kind = rng.randrange(3)
        return found | ({"text": text() * 9} if kind == 0 else {"delta": {"content": text()}} if kind == 1 else {})

    answer = {"id": text(), "prompt_ids": list(range(50)), "n": None, "deep": [[[{"choices": [1]}]]]}
    answer |= {"choices": [choice(i) for i in range(choices)], "usage": {"prompt_tokens": 3}, text() or "y": True}
    names = list(answer)
    rng.shuffle(names)
    return {name: answer[name] for name in names}


@pytest.mark.parametrize("seed", range(40))
async def test_fields_and_choices_are_the_decoded_ones(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Pieces begin and end at every kind of place: they have a random size."""
    rng = random.Random(seed)
    monkeypatch.setattr(json_field_scanner, "PIECE_BYTES", rng.randrange(3, 300))
    monkeypatch.setattr(json_field_scanner, "PART_BYTES", rng.randrange(2, 60))
    monkeypatch.setattr(json_field_scanner, "MAX_PASSES", rng.randrange(1, 5))
    answer = answer_of(rng, choices=rng.randrange(4), tokens=rng.randrange(30))
    raw = json.dumps(answer, indent=rng.choice([None, 2]), ensure_ascii=bool(seed % 2)).encode()
    found, decoded = await read_object(raw), decode_fields(raw, "answer")
    assert {name: bytes(value) for name, value in found.items()} == {n: bytes(v) for n, v in decoded.items()}
    assert decode_choices(found) == decode_choices(decoded)


async def test_what_is_no_object_is_an_error(monkeypatch: pytest.MonkeyPatch):
    good = b'{"id":"x","choices":[{"index":0,"text":"]"},{}],"usage":{"a":[1]}}'
    assert list(await read_object(b" " + good + b"\n")) == ["id", "choices", "usage"]
    monkeypatch.setattr(json_field_scanner, "PART_BYTES", 7)
    wrong = [
        *(good[:end] for end in range(len(good))),
        *(good[start:] for start in range(1, len(good))),
        good + b"{}", good + b"x", b"x" + good, good[:-1] + b"]", b"[1]", b'{"a"}', b"{1:2}", b'{"a":1,}', b'{"a":}',
        b'{"a":1 "b":2:3}', b'{"choices":[1]}', b'{"choices":{"a":1}}', b'{"choices":[{},]}', b'{"choices":[,{}]}',
        b'{"choices":[{]}', b'{"choices":[{"index"}]}', b'{"choices":[{}}', b'{,"a":1}', b'{"a":1,,"b":2}', b"\\",
    ]  # fmt: skip
    for text in wrong:
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            await read_object(text)


async def test_a_large_text_is_no_decoded_value():
    large = {"choices": [{"index": 3, "text": "a" * 2**21}, {"index": 4, "text": "", "finish_reason": "length"}]}
    found = await read_fields(msgspec.json.encode(large), "answer")
    assert decode_choices(found) == [Choice(index=3, text=True), Choice(index=4, text="", finish_reason="length")]
    delta = {"choices": [{"delta": {"content": "a" * 2**21}}]}
    assert decode_choices(await read_fields(msgspec.json.encode(delta), "event")) == [Choice(text=True)]
    for wrong in (5, "x", True):
        with pytest.raises(UpstreamFailed, match="are not a list of choices"):
            decode_choices(await read_fields(msgspec.json.encode({"choices": wrong, "x": "a" * 2**21}), "answer"))
    for empty in (None, []):
        assert decode_choices(await read_fields(msgspec.json.encode({"choices": empty, "x": "a" * 2**21}), "a")) == []
    with pytest.raises(UpstreamFailed, match="is not valid JSON"):
        await read_fields(b"[" + msgspec.json.encode(large), "answer")


@pytest.mark.parametrize("kind", ["log-probabilities", "quotes", "backslashes", "brackets", "many choices"])
async def test_other_tasks_run_between_the_pieces(kind: str, monkeypatch: pytest.MonkeyPatch):
    """No piece is decoded, and few of them are read closely, whatever the answer consists of."""
    entry = {"token": "word", "logprob": -1.5, "bytes": [97], "top_logprobs": []}
    size = 4 * LARGE_BYTES
    choices = {
        "log-probabilities": [{"index": 0, "logprobs": {"content": [entry] * 70_000}}],
        "quotes": [{"index": 0, "text": '"' * (size // 2)}],
        "backslashes": [{"index": 0, "text": "\\" * (size // 2 + 1)}],
        "brackets": [{"index": 0, "logprobs": {"tokens": ["{["] * 900_000}}],
        "many choices": [{"index": i, "logprobs": {"content": [entry] * 600}} for i in range(128)],
    }[kind]
    raw = msgspec.json.encode({"id": "x", "choices": choices, "usage": {"prompt_tokens": 1}})
    assert len(raw) > size
    closely = iterations = 0
    read_closely = json_field_scanner._Scanner._read_closely

    def counting(scanner: Any, part: bytes, start: int) -> None:
        nonlocal closely
        closely += len(part)
        read_closely(scanner, part, start)

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(json_field_scanner._Scanner, "_read_closely", counting)
    counting_task = asyncio.create_task(count())
    found = await read_fields(raw, "answer")
    counting_task.cancel()
    assert [choice.index for choice in decode_choices(found)] == [each["index"] for each in choices]
    assert iterations >= len(raw) // PIECE_BYTES
    assert closely < len(raw) / 10
