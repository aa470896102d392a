"""Tokenization by an engine, for base models whose tokenizer is not on the gateway's machine."""

import logging
from typing import Any

import msgspec

from gateway.errors import BadRequest, NoEngine, UpstreamFailed
from gateway.fleet.calls.answers import JSON_ERRORS, REFUSED
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.kinds.kind import BodyTooLarge, read_detail
from gateway.fleet.kinds.table import Kinds
from gateway.records.bases.base import Base, Binding
from gateway.records.tenants.tenants import Tenant
from wire.http_errors import HTTP_ERRORS
from wire.text.tokenizer import TextTooLong

log = logging.getLogger(__name__)

# Bytes of an answer for each token, with the comma behind its id, and for everything else.
TOKEN_BYTES, OTHER_BYTES = 16, 2**16
# Most tokens that a chat template adds to those of a body, of which each has a byte at least.
TEMPLATE_TOKENS = 4096
# Number of engines whose answers have too many ids at which a prompt counts as too long.
ENOUGH_ANSWERS = 2


class _Tokens(msgspec.Struct):
    tokens: list[int]


class EngineTokenizer:
    """Client of the engines' `/tokenize`."""

    def __init__(self, registry: Registry, kinds: Kinds) -> None:
        self._registry = registry
        self._kinds = kinds

    async def tokens(self, base: Base, body: dict[str, Any], tenant: Tenant) -> list[int]:
        """Return the token ids of a `/tokenize` body (without `model`), computed by an engine of the base in the
        tenant's turn.

        Raises BadRequest for a conversation that the chat template refuses, TextTooLong for more tokens than the
        context, of which millions would take some hundred MB here, NoEngine if no engine answers. An answer with more
        tokens than the body has bytes is none, and a prompt is too long only if two engines say so, or one while no
        other counts it.
        """
        most, num_too_long = TEMPLATE_TOKENS + _size(body), 0
        for engine in self._engines(base):
            try:
                found = await self._ask(engine, base, body, tenant)
            except BodyTooLarge:
                num_too_long += most > base.context_length
                if num_too_long == ENOUGH_ANSWERS:
                    break
                continue
            if found is not None and len(found) <= most:
                return found
            if found is not None:
                log.warning("engine %s counts %d tokens in %d bytes", engine.url, len(found), most - TEMPLATE_TOKENS)
        if num_too_long:
            raise TextTooLong(base.context_length)
        absence = NoEngine(
            f"No engine of '{base.name}' is available to count the prompt's tokens, and its tokenizer is not on this "
            "gateway; try again shortly."
        )
        raise await self._registry.absence(base.id, absence)

    async def _ask(self, engine: EngineRecord, base: Base, body: dict[str, Any], tenant: Tenant) -> list[int] | None:
        """Return an engine's tokens, or None without a usable answer. Raises BadRequest, BodyTooLarge."""
        most = OTHER_BYTES + TOKEN_BYTES * base.context_length
        try:
            kind = self._kinds[engine.address.traits.name]
            status, answer = await kind.tokenize(engine, base.name, body, most, tenant)
        except BodyTooLarge:
            raise
        except (*HTTP_ERRORS, UpstreamFailed) as error:
            log.warning("engine %s did not tokenize a prompt: %s", engine.url, type(error).__name__)
            return None
        if status in (400, 422):
            raise _refusal(engine, answer)
        try:
            if status == 200:
                return msgspec.json.decode(answer, type=_Tokens).tokens
        except JSON_ERRORS:
            status = 0
        log.warning("engine %s did not tokenize a prompt: it answered %d", engine.url, status)
        return None

    def _engines(self, base: Base) -> list[EngineRecord]:
        """Return the engines in the order in which they are asked: those of the present weights first.

        Our engines come before foreign servers, which may refuse a prompt for reasons of their own, and then those with
        less load.
        """
        found = [each for each in self._registry.up if each.base == base.id]
        present = Binding.of(base.id, base.digest)
        return sorted(
            found, key=lambda each: (not each.serves(present), not each.address.traits.has_usage_log, each.load)
        )


def _size(body: dict[str, Any]) -> int:
    """Return the bytes of a body's texts and encoded fields."""
    texts = (value.encode() if isinstance(value, str) else value for value in body.values())
    return sum(memoryview(text).nbytes for text in texts if isinstance(text, bytes | msgspec.Raw))


def _refusal(engine: EngineRecord, answer: bytes) -> BadRequest:
    """Return the error for the client, with the engine's message unless the kind's messages are not for clients."""
    if not engine.address.traits.shows_messages:
        return BadRequest(REFUSED)
    detail = read_detail(answer)
    return BadRequest(detail.message or REFUSED, param=detail.param, code=detail.code)
