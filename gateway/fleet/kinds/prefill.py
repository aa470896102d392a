"""Pairs of vLLM servers: one computes a prompt's KV blocks, the other fetches them and generates the answer.

The protocol is that of vLLM's NIXL connector (vLLM 0.32, `examples/online_serving/disaggregated_serving` and
`kv_connector/v1/nixl`): the first server gets the request with `do_remote_decode` and room for one token, keeps its
blocks, and names them in the `kv_transfer_params` of its answer. The second server gets the request with these. The
gateway alone sets the field: a client's could replace the prompt that was counted and name hosts to fetch blocks from.
"""

import logging
from typing import Any

import msgspec
from aiohttp import ClientResponse

from gateway.errors import UpstreamFailed
from gateway.fleet.calls.answers import JSON_ERRORS, read_chunks
from gateway.fleet.kinds.fields import is_one_sequence

log = logging.getLogger(__name__)

FIELD = "kv_transfer_params"
# Asks a server to keep the prompt's blocks for another one.
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The answer names each block of the prompt: a million tokens in blocks of 16 take 400 KB.
MAX_BYTES = 4 << 20
# Fields that would change the form or the end of the one token, which nobody reads.
_DROPPED = ("logprobs", "min_tokens", "stop", "stop_token_ids", "stream", "stream_options", "top_logprobs")


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def can_be_split(body: dict[str, Any]) -> bool:
    """Return whether a pair may serve the request. The blocks are named for a single sequence, and the second server
    computes no log-probabilities of a prompt that it has not read.
    """
    return is_one_sequence(body) and not body.get("echo") and body.get("prompt_logprobs") is None


def first_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the first server's form of a request: the same prompt, and one token that cannot end it early."""
    sent = {name: value for name, value in body.items() if name not in _DROPPED}
    length = "max_completion_tokens" if "max_completion_tokens" in sent else "max_tokens"
    return {**sent, length: 1, "ignore_eos": True, FIELD: KEEP}


async def read_params(response: ClientResponse, url: str) -> dict[str, Any]:
    """Return the KV transfer parameters that the prefill engine at `url` answered with. Raises UpstreamFailed."""
    body = bytearray()
    async for chunk in read_chunks(response):
        body += chunk
        if len(body) > MAX_BYTES:
            raise UpstreamFailed("The prefill engine sent a larger answer than this gateway accepts.")
    try:
        params = msgspec.json.decode(body, type=_Answer).kv_transfer_params
    except JSON_ERRORS:
        params = None
    if not params:
        log.error("engine %s answered without %s: start it with --kv-transfer-config", url, FIELD)
        raise UpstreamFailed("The prefill engine returned no parameters of the KV transfer.")
    return params
