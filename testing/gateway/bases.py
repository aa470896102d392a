"""Base models and tokenizers for parts of a gateway that run without one."""

from typing import Any

from gateway.api.requests.memory import BodyShare
from gateway.api.requests.prompts import Endpoint, PromptReader
from gateway.billing.inference_request import InferenceRequest
from gateway.fleet.tokenizers import Tokenizers
from gateway.records.bases.base import Base, Shape
from gateway.records.bases.registry import Bases
from gateway.records.tenants.tenants import Tenant
from testing.gateway.principals import principal
from wire.text.tokenizer import Tokenizer

NO_SHAPE = Shape(num_layers=1, projections={}, outside={})


def one_base(name: str = "base", context_length: int = 4096) -> Base:
    """Return the first base model of a deployment."""
    return Base(name=name, shape=NO_SHAPE, context_length=context_length)


def only(name: str = "base") -> Bases:
    """Return the base models of a deployment with one, which stays as it is."""
    return Bases(own=one_base(name))


def with_tokenizer(tokenizer: Tokenizer) -> Tokenizers:
    """Return the tokenizers of a deployment with the base model of `one_base`."""

    async def ask(_base: Base, _body: dict[str, Any], _tenant: Tenant) -> list[int]:
        raise AssertionError("the tokenizer is in memory")

    return Tokenizers(ask, ("base", tokenizer))


async def measured(
    reader: PromptReader, raw: bytes, endpoint: Endpoint, share: BodyShare, base: Base
) -> InferenceRequest:
    """Return a body, read as for a request to a base model."""
    parsed = await reader.parse(raw, endpoint, share)
    return await reader.measure(
        parsed, raw, share, base, await reader.counter(parsed, raw, share, base, principal().tenant)
    )
