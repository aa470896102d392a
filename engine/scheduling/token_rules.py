"""Token rules without a grammar: `allowed_token_ids` and `bad_words`.

Created once per request and shared by its choices; the next tokens depend on the output tokens alone.
"""

from collections.abc import Iterable, Sequence

import numpy as np


class AllowedTokens:
    """A fixed set of tokens as a mask. largest: the largest id."""

    __slots__ = ("_token_ids", "_words", "largest")

    def __init__(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """token_ids: at least 1, none negative; an array of int32 is not copied. The mask is built at its first use,
        after the engine has checked `largest` against the vocabulary, so that an id near 2**31 does not allocate
        256 MiB.
        """
        self._token_ids = np.asarray(token_ids, np.int32)
        self.largest = int(self._token_ids.max())
        self._words: np.ndarray | None = None

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may come next: bit i of uint32 `[ceil(vocab / 32)]`, all zero before, is
        token i.
        """
        if self._words is None:
            allowed = np.zeros((self.largest // 32 + 1) * 32, np.bool_)
            allowed[self._token_ids] = True
            self._words = np.packbits(allowed, bitorder="little").view(np.uint32)
            self._token_ids = np.empty(0, np.int32)
        bits[: len(self._words)] = self._words


class BannedWords:
    """Token sequences that the output may not contain: the last token of each is banned after the others.

    A step makes one lookup per distinct length of the sequences, whatever their number. largest: the largest id.
    """

    __slots__ = ("_last_tokens", "_lengths", "largest")

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """words: at least 1, none empty."""
        last_tokens: dict[tuple[int, ...], set[int]] = {}
        for *before, last in words:
            last_tokens.setdefault(tuple(before), set()).add(last)
        self._last_tokens = {before: np.array(sorted(ids)) for before, ids in last_tokens.items()}
        self._lengths = sorted({len(before) for before in last_tokens})
        self.largest = max(max(*before, *ids) if before else max(ids) for before, ids in last_tokens.items())

    def after(self, token_ids: Sequence[int], num_output_tokens: int) -> np.ndarray:
        """Return the tokens banned after `token_ids`, whose last `num_output_tokens` are output; duplicates are
        possible.
        """
        found = [np.empty(0, np.int64)]
        for length in self._lengths:
            if length > num_output_tokens:
                break
            before = tuple(token_ids[len(token_ids) - length :])
            if before in self._last_tokens:
                found.append(self._last_tokens[before])
        return np.concatenate(found)
