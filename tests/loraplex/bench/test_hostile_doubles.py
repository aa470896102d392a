"""Engine doubles of `benchmarks.hostile`, whose own work must not delay the neighbour's chats."""

import tracemalloc

import aiohttp
import pytest

from benchmarks.hostile.doubles import LARGE_ANSWER_BYTES, LargeVllm


@pytest.mark.usefixtures("starts_servers")
async def test_the_vllm_double_answers_large_requests_without_copies_of_the_answer():
    """Its process answers the neighbour's chats too, which waited for each copy: 7 to 16 ms for one answer."""
    double = LargeVllm()
    async with double.serving(), aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {double.api_key}"}
        body = {"model": double.base_model, "prompt": "a", "max_tokens": 1, "logprobs": 5, "cache_salt": "s"}
        tracemalloc.start()
        try:
            async with session.post(f"{double.url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                received, size = b"", 0
                async for piece in response.content.iter_any():
                    size, received = size + len(piece), (received + piece)[-200:]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert size == response.content_length > LARGE_ANSWER_BYTES
    assert b'"usage": {' in received
    assert received.endswith(b"}")
    assert peak < LARGE_ANSWER_BYTES / 2
