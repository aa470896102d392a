"""Tokenization by an engine, for base models whose tokenizer is not on the gateway's machine."""

import logging
from typing import Any

import msgspec

from gateway.errors import BadRequest, NoEngine
from gateway.fleet.calls.answers import REFUSED
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
        context, of which millions would take some hundred MB here, NoEngine if no engine answers.
        """
        most = OTHER_BYTES + TOKEN_BYTES * base.context_length
        for engine in self._engines(base):
            try:
                kind = self._kinds[engine.address.traits.name]
                status, answer = await kind.tokenize(engine, base.name, body, most, tenant)
            except BodyTooLarge:
                raise TextTooLong(base.context_length) from None
            except HTTP_ERRORS as error:
                log.warning("engine %s did not tokenize a prompt: %s", engine.url, type(error).__name__)
                continue
            if status in (400, 422):
                raise _refusal(engine, answer)
            try:
                if status == 200:
                    return msgspec.json.decode(answer, type=_Tokens).tokens
            except msgspec.MsgspecError:
                status = 0
            log.warning("engine %s did not tokenize a prompt: it answered %d", engine.url, status)
        absence = NoEngine(
            f"No engine of '{base.name}' is available to count the prompt's tokens, and its tokenizer is not on this "
            "gateway; try again shortly."
        )
        raise await self._registry.absence(base.id, absence)

    def _engines(self, base: Base) -> list[EngineRecord]:
        """Return the engines to ask in turn: those of the present weights first, each group by increasing load."""
        found = [each for each in self._registry.up if each.base == base.id]
        present = Binding.of(base.id, base.digest)
        return sorted(found, key=lambda each: (not each.serves(present), each.load))


def _refusal(engine: EngineRecord, answer: bytes) -> BadRequest:
    """Return the error for the client, with the engine's message unless the kind's messages are not for clients."""
    if not engine.address.traits.shows_messages:
        return BadRequest(REFUSED)
    detail = read_detail(answer)
    return BadRequest(detail.message or REFUSED, param=detail.param, code=detail.code)
