"""A request's logit edits, kept between steps so that a step's cost does not depend on the length of the text.

Owned by the engine's thread. No torch: `engine/execution/edit_uploads.py` uploads them.
"""

from collections.abc import Iterable, Mapping

import numpy as np


class TokenCounts:
    """The distinct tokens of a growing list, from `start` on, and the number of each."""

    __slots__ = ("_counts", "_next", "_places", "_tokens")

    def __init__(self, start: int) -> None:
        self._next = start
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)

    def update(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Count the tokens since the last call. Return the tokens and their counts; the next call changes both."""
        if not self._places and len(token_ids) > self._next:
            self._tokens, self._counts = np.unique(np.array(token_ids[self._next :], np.int64), return_counts=True)
            self._places = {token: place for place, token in enumerate(self._tokens.tolist())}
        else:
            for token in token_ids[self._next :]:
                self._add(token)
        self._next = len(token_ids)
        return self._tokens[: len(self._places)], self._counts[: len(self._places)]

    def _add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            room = max(64, place)
            self._tokens = np.concatenate((self._tokens, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.int64)))
        self._tokens[place] = token
        self._counts[place] += 1


class LogitEdits:
    """Edits of one request's logits.

    bias_ids, bias: `logit_bias`.
    ends: tokens that are banned before `min_tokens`.
    all, output: token counts of prompt and answer together, and of the answer alone.
    """

    __slots__ = ("all", "bias", "bias_ids", "ends", "output")

    def __init__(self, bias: Mapping[int, float], ends: Iterable[int], num_prompt_tokens: int) -> None:
        self.bias_ids = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        self.ends = np.array(sorted(ends), np.int64)
        self.all = TokenCounts(0)
        self.output = TokenCounts(num_prompt_tokens)
