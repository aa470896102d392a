"""Server-sent events, however the stream is divided into pieces."""

from collections.abc import AsyncIterator

import pytest

from wire.sse import DONE, EventReader, read_events

STREAM = b': a comment\n\nevent: x\r\ndata: {"a": "data: b"}\r\n\r\ndata:{"c": 1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_pieces_of_any_size_give_the_same_events(size):
    reader = EventReader()
    found = [data for i in range(0, len(STREAM), size) for data in reader.feed(STREAM[i : i + size])]
    assert found == [b'{"a": "data: b"}', b'{"c": 1}', DONE]


async def test_a_stream_of_pieces_ends_without_its_mark():
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(STREAM), 5):
            yield STREAM[start : start + 5]

    assert [data async for data in read_events(pieces())] == [b'{"a": "data: b"}', b'{"c": 1}']


def test_an_unfinished_line_is_no_event():
    reader = EventReader()
    assert reader.feed(b'data: {"a"') == []
    assert reader.feed(b": 1}") == []
    assert reader.feed(b"\n") == [b'{"a": 1}']
