"""Prompt lookup: predicts the next tokens of a text by an earlier occurrence of its last tokens (Saxena, "Prompt Lookup
Decoding", 2023; Yang et al., "Inference with Reference", 2023).

Knows neither requests nor the engine.
"""

from collections.abc import Sequence

import numpy as np

from engine.scheduling.draft_acceptance import DraftAcceptance


class PromptLookup:
    """A text, and an earlier occurrence of its last tokens.

    Every token is compared with its prediction, whether a step computed it as a draft or not, so `rates` costs no step.
    """

    __slots__ = ("_is_first", "_length", "_max_match", "_min_match", "_source", "_text", "rates")

    def __init__(self, min_match: int, max_match: int, rates: DraftAcceptance) -> None:
        """min_match: number of last tokens that must occur earlier in the text. max_match: number of last tokens that
        are compared at most.
        """
        self._min_match, self._max_match = min_match, max_match
        self._text = np.empty(0, np.int32)
        self._length = 0
        # Index of the predicted next token, -1 for none.
        self._source = -1
        self._is_first = True
        self.rates = rates

    def follow(self, token_ids: Sequence[int]) -> list[tuple[bool, bool]]:
        """Take the tokens that were appended to the text since the last call. Return for each prediction whether it
        came true, and whether it was the first of several.
        """
        found: list[tuple[bool, bool]] = []
        new = token_ids[self._length :]
        for token in new if self._source >= 0 else ():
            # Within the new tokens, the text is not stored yet.
            at = self._source - self._length
            is_true = bool(token == (new[at] if at >= 0 else self._text[self._source]))
            found.append((is_true, self._is_first))
            self.rates.observe(is_true, is_first=self._is_first)
            if not is_true:
                self._source = -1
                break
            self._source += 1
            self._is_first = False
        self._append(new)
        return found

    def find(self) -> bool:
        """Return whether the end of the text occurs before."""
        if self._source < 0:
            self._source = self._find()
            self._is_first = True
        return self._source >= 0

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the text."""
        if not self.find():
            return []
        found: list[int] = self._text[self._source : min(self._source + most, self._length)].tolist()
        period = self._length - self._source
        while len(found) < most:  # the text repeats its own end
            found.append(found[len(found) - period])
        return found

    def chances(self, number: int) -> list[float]:
        """Return the probability that all of the first 1, 2, ... `number` proposed tokens come true."""
        return self.rates.chances(number, is_first=self._is_first)

    def _append(self, token_ids: Sequence[int]) -> None:
        end = self._length + len(token_ids)
        if end > len(self._text):
            text = np.empty(end + max(64, end // 4), np.int32)
            text[: self._length] = self._text[: self._length]
            self._text = text
        self._text[self._length : end] = token_ids
        self._length = end

    def _find(self) -> int:
        """Return the index after the last of the places with most equal tokens before it; -1 if fewer than
        `min_match` are equal. It takes some 10 us, for 128k tokens 100 us.
        """
        text, last = self._text, self._length - 1
        ends = np.flatnonzero(text[: max(last, 0)] == text[last])
        equal = 1
        while equal < self._max_match and len(ends):
            inside = ends[ends >= equal]
            longer = inside[text[inside - equal] == text[last - equal]]
            if not len(longer):
                break
            ends, equal = longer, equal + 1
        return int(ends[-1]) + 1 if len(ends) and equal >= self._min_match else -1
