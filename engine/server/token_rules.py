"""A request's `allowed_token_ids` and `bad_words`, as the sampler takes them."""

import asyncio

from engine.protocol import SamplingRequest
from engine.structured.tokens import AllowedTokens, BannedWords
from engine.tokenizer import Tokenizer


async def token_rules(body: SamplingRequest, tokenizer: Tokenizer) -> tuple[AllowedTokens | None, BannedWords | None]:
    """None for what was not asked for. In a thread: a thousand words take some 30 ms to encode."""
    if not (body.allowed_token_ids or body.bad_words):
        return None, None
    return await asyncio.to_thread(_read, body.allowed_token_ids or [], body.bad_words or [], tokenizer)


def _read(
    allowed: list[int], bad_words: list[str], tokenizer: Tokenizer
) -> tuple[AllowedTokens | None, BannedWords | None]:
    words = set(bad_words)
    for word in bad_words:
        if bare := word.lstrip():
            words |= {bare, " " + bare}  # at a text's beginning and behind a space, as vLLM has them
    tokens = [ids for word in words if (ids := tokenizer.encode(word, add_special_tokens=False))]
    return AllowedTokens(allowed) if allowed else None, BannedWords(tokens) if tokens else None
