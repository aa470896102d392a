"""A request's `allowed_token_ids`, `bad_words` and `logit_bias` as token ids."""

from array import array
from collections.abc import Awaitable, Callable

from engine.core.messages import TokenRules
from wire.errors import BadRequest
from wire.requests import SamplingRequest
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

# Limit of a word's tokens. Each step makes one lookup per distinct word length: with 256 lengths they take 40 ms of a
# step of 64 such requests.
MAX_BAD_WORD_TOKENS = 32
# Ids that become bytes at once. The conversion holds the interpreter's lock: 4 ms for 2**18 ids, 0.1 ms for these.
# Other threads get it between two pieces.
PIECE = 8192
# The allowed tokens as int32, and the tokens of each banned word.
Tokens = tuple[bytes, list[list[int]]]
OnThread = Callable[[Callable[[], Tokens]], Awaitable[Tokens]]


async def token_rules(
    body: SamplingRequest, grammar: GrammarSpec | None, tokenizer: Tokenizer, on_thread: OnThread
) -> TokenRules:
    """Return the rules of a request. Encodes words on a thread, a thousand take some 30 ms, and many ids too. Raises
    BadRequest.
    """
    allowed_ids, bad_words = body.allowed_token_ids or [], body.bad_words or []

    def encode() -> Tokens:
        return pack(allowed_ids), _encode(bad_words, tokenizer)

    allowed, banned = await on_thread(encode) if bad_words or len(allowed_ids) > PIECE else encode()
    bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
    return TokenRules(grammar, allowed, banned, bias)


def pack(token_ids: list[int]) -> bytes:
    """Return token ids as int32."""
    pieces = (token_ids[start : start + PIECE] for start in range(0, len(token_ids), PIECE))
    return b"".join(array("i", piece).tobytes() for piece in pieces)


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
