"""A request's `allowed_token_ids`, `bad_words` and `logit_bias` as token ids."""

from collections.abc import Awaitable, Callable
from functools import partial

from engine.core.messages import TokenRules
from wire.errors import BadRequest
from wire.requests import SamplingRequest
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

# Limit of a word's tokens. Each step makes one lookup per distinct word length: with 256 lengths they take 40 ms of a
# step of 64 such requests.
MAX_BAD_WORD_TOKENS = 32
OnThread = Callable[[Callable[[], list[list[int]]]], Awaitable[list[list[int]]]]


async def token_rules(
    body: SamplingRequest, grammar: GrammarSpec | None, tokenizer: Tokenizer, on_thread: OnThread
) -> TokenRules:
    """Return the rules of a request. Encodes on a thread: a thousand words take some 30 ms. Raises BadRequest."""
    banned: list[list[int]] = []
    if body.bad_words:
        banned = await on_thread(partial(_encode, body.bad_words, tokenizer))
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    return TokenRules(grammar, body.allowed_token_ids or [], banned, bias)


def _encode(bad_words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    # In order, so that every engine names the same word in an error.
    words = dict.fromkeys(bad_words)
    for word in bad_words:
        if bare := word.lstrip():
            words |= {bare: None, " " + bare: None}  # at a text's beginning and after a space, as in vLLM
    tokens: list[list[int]] = []
    for word in words:
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise BadRequest(
                "bad_words",
                f"bad_words: expected words of at most {MAX_BAD_WORD_TOKENS} tokens each, got one of {len(ids)}.",
            )
        if ids:
            tokens.append(ids)
    return tokens
