"""A request's `allowed_token_ids` and `bad_words`, in the sampler's form."""

import asyncio

from engine.execution.token_rules import AllowedTokens, BannedWords
from wire.errors import BadRequest
from wire.requests import SamplingRequest
from wire.text.tokenizer import Tokenizer

# Limit of a word's tokens. Each step makes one lookup per distinct word length: with 256 lengths they take 40 ms of a
# step of 64 such requests.
MAX_BAD_WORD_TOKENS = 32


async def token_rules(body: SamplingRequest, tokenizer: Tokenizer) -> tuple[AllowedTokens | None, BannedWords | None]:
    """Return the rules of a request, None for each that it does not have. Encodes on a thread: a thousand words take
    some 30 ms.
    """
    if not (body.allowed_token_ids or body.bad_words):
        return None, None
    return await asyncio.to_thread(_read, body.allowed_token_ids or [], body.bad_words or [], tokenizer)


def _read(
    allowed: list[int], bad_words: list[str], tokenizer: Tokenizer
) -> tuple[AllowedTokens | None, BannedWords | None]:
    words = set(bad_words)
    for word in bad_words:
        if bare := word.lstrip():
            words |= {bare, " " + bare}  # at a text's beginning and after a space, as in vLLM
    tokens = [ids for word in words if (ids := tokenizer.encode(word, add_special_tokens=False))]
    longest = max(map(len, tokens), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            "bad_words", f"bad_words: expected words of at most {MAX_BAD_WORD_TOKENS} tokens each, got one of {longest}"
        )
    return AllowedTokens(allowed) if allowed else None, BannedWords(tokens) if tokens else None
